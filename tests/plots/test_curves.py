"""`plot_curves`: with matplotlib, and in a terminal."""

import io
import math
import sys

import numpy as np
import pytest
import rich
from rich.console import Console

from fluxcb import DataError, DeclarationError
from fluxcb.plots import plot_curves

CURVES = {"up": [(0, 0.0), (5, 5.0), (10, 10.0)], "down": [(0, 10.0), (10, 0.0)]}


def printed(curves=CURVES, colour=None, **options):
    console = Console(file=(file := io.StringIO()), width=40, color_system=colour, force_terminal=colour is not None)
    assert plot_curves(curves, **{"x_label": "step", "y_label": "value", **options}, ax=console) is None
    return file.getvalue()


@pytest.fixture
def plt():
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def test_a_new_figure(plt):
    ax = plot_curves(CURVES, x_label="step", y_label="value")
    assert [line.get_xydata().tolist() for line in ax.lines] == [list(map(list, points)) for points in CURVES.values()]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["up", "down"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("step", "value", "linear")
    assert plt.get_fignums() == [ax.figure.number]


def test_axes_of_ones_own_with_marks_on_a_logarithmic_axis(plt):
    own = plt.figure().add_subplot()
    curve = {"loss": [(0.1, 1.0), (1.0, math.nan), (10.0, 2.0)]}
    assert plot_curves(curve, x_label="rate", y_label="loss", log_x=True, marks={"best": 0.5}, ax=own) is own
    line, mark = own.lines
    np.testing.assert_array_equal(line.get_xydata(), curve["loss"])  # matplotlib leaves a gap at NaN
    assert list(mark.get_xdata()) == [0.5, 0.5]
    assert own.get_xscale() == "log"
    assert [text.get_text() for text in own.get_legend().get_texts()] == ["loss", "best"]
    assert len(plt.get_fignums()) == 1


def test_one_curve_needs_no_legend_and_steps_are_whole(plt):
    ax = plot_curves({"loss": [(1, 2.0), (2, 1.0), (3, 0.5)]}, x_label="epoch", y_label="loss")
    assert ax.get_legend() is None
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_without_colours_each_curve_has_a_chart_and_with_them_they_share_one():
    assert [line for line in printed().splitlines() if "■" in line] == ["■ up", "■ down"]
    assert printed().count("└") == 2
    assert printed(colour="truecolor").count("└") == 1
    lines = printed().splitlines()
    assert len(lines) == 2 * (1 + 12 + 2)  # a name, the chart, the axis
    assert [line.split() for line in lines if "step" in line] == [["0", "step", "10"]] * 2


def test_a_mark_is_a_vertical_line_over_the_height_of_the_curves():
    text = printed({"up": CURVES["up"]}, marks={"middle: 5": 5.0})
    head, *rows = text.splitlines()
    assert head == "■ up   ■ middle: 5"
    assert all(row[4:].strip() for row in rows[:12])  # something in each row, where the curve is in two columns
    columns = [{4 + i for i, character in enumerate(row[4:]) if character != " "} for row in rows[:12]]
    assert set.intersection(*columns)


def test_points_that_have_no_place_are_passed_over_in_the_terminal():
    points = [(-1, 3.0), (0, 3.0), (1, 1.0), (10, math.nan), (math.inf, 1.0), (100, 2.0)]
    assert printed({"loss": points}, log_x=True) == printed({"loss": [(1, 1.0), (100, 2.0)]}, log_x=True)


def test_without_matplotlib_the_terminal_is_drawn_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    console = Console(file=(file := io.StringIO()), width=40)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    assert plot_curves(CURVES, x_label="step", y_label="value") is None
    assert file.getvalue() == printed()


@pytest.mark.parametrize("log_x", [False, True])
def test_nothing_to_draw(log_x):
    points = [(0, 1.0), (-1, 2.0)] if log_x else [(1, math.nan), (2, math.inf)]
    with pytest.raises(DataError) as error:
        plot_curves({"loss": points}, x_label="rate", y_label="loss", log_x=log_x)
    assert str(error.value) == (
        "`loss` has no point that can be drawn.\n"
        "  where: it has 2 points\n"
        "  why:   only finite numbers have a place on an axis" + (", and above 0 on a logarithmic one" if log_x else "")
    )


def test_neither_axes_nor_a_console():
    with pytest.raises(DeclarationError) as error:
        plot_curves(CURVES, x_label="step", y_label="value", ax="terminal")
    assert str(error.value) == (
        "`ax` takes matplotlib axes or a rich console, not 'terminal'.\n  fix:   e.g. `ax=plt.figure().add_subplot()`"
    )
