"""`plot_curves`: with matplotlib, and in a terminal."""

import io
import math
import re
import sys

import numpy as np
import pytest
import rich
from rich.console import Console

from fluxcb import DataError, DeclarationError
from fluxcb.plots import plot_curves
from fluxcb.plots.panel import Panel
from fluxcb.plots.svg import panels_svg

CURVES = {"up": [(0, 0.0), (5, 5.0), (10, 10.0)], "down": [(0, 10.0), (10, 0.0)]}


def printed(curves=CURVES, colour=None, **options):
    console = Console(file=(file := io.StringIO()), width=40, color_system=colour, force_terminal=colour is not None)
    assert plot_curves(curves, **{"x_label": "step", "y_label": "value", **options}, ax=console) is None
    return file.getvalue()


def test_new_figure(plt):
    ax = plot_curves(CURVES, x_label="step", y_label="value")
    assert [line.get_xydata().tolist() for line in ax.lines] == [list(map(list, points)) for points in CURVES.values()]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["up", "down"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("step", "value", "linear")
    assert plt.get_fignums() == [ax.figure.number]


def test_user_axes_with_marks_and_logarithmic_axis(plt):
    own = plt.figure().add_subplot()
    curve = {"loss": [(0.1, 1.0), (1.0, math.nan), (10.0, 2.0)]}
    assert plot_curves(curve, x_label="rate", y_label="loss", log_x=True, marks={"best": 0.5}, ax=own) is own
    line, mark = own.lines
    np.testing.assert_array_equal(line.get_xydata(), curve["loss"])  # matplotlib leaves a gap at NaN
    assert list(mark.get_xdata()) == [0.5, 0.5]
    assert own.get_xscale() == "log"
    assert [text.get_text() for text in own.get_legend().get_texts()] == ["loss", "best"]
    assert len(plt.get_fignums()) == 1


def test_single_curve_has_no_legend_and_steps_are_integers(plt):
    ax = plot_curves({"loss": [(1, 2.0), (2, 1.0), (3, 0.5)]}, x_label="epoch", y_label="loss")
    assert ax.get_legend() is None
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_curves_share_chart_with_and_without_colors():
    for colour, legend in ((None, "o up   x down"), ("truecolor", "■ up   ■ down")):
        lines = [re.sub("\x1b[^m]*m", "", line) for line in printed(colour=colour).splitlines()]
        assert len(lines) == 1 + 12 + 2  # the legend, the chart, the axis
        assert lines[0] == legend
        assert lines[-1].split() == ["0", "step", "10"]


def test_markers_without_colors_for_few_points():
    # "up" has points in both corners and the middle, "down" in the other two corners. The labels "  0 ┤" take 5.
    rows = [line[5:].ljust(35) for line in printed().splitlines()[1:13]]
    found = {(mark, row, column) for row, line in enumerate(rows) for column, mark in enumerate(line) if mark in "ox"}
    assert found == {("o", 11, 0), ("o", 6, 17), ("o", 0, 34), ("x", 0, 0), ("x", 11, 34)}


def test_markers_without_colors_for_many_points():
    curves = {"low": [(x, 0.0) for x in range(1000)], "high": [(x, 10.0) for x in range(1000)]}
    first, *_, last = printed(curves).splitlines()[1:13]
    assert first[5:].count("x") == last[5:].count("o") == 6
    assert "o" not in first
    assert "x" not in last


def test_wide_legend_continues_on_next_line():
    curves = {f"training/metric{n}": CURVES["up"] for n in range(3)} | {"x" * 50: CURVES["down"]}
    lines = printed(curves).splitlines()
    assert lines[:3] == ["o training/metric0   x training/metric1", "+ training/metric2", f"* {'x' * 50}"]
    assert len(lines) == 3 + 12 + 2


def test_mark_is_vertical_line():
    text = printed({"up": CURVES["up"]}, marks={"middle: 5": 5.0})
    head, *rows = text.splitlines()
    assert head == "■ up   │ middle: 5"
    assert all(row[4:].strip() for row in rows[:12])  # something in each row, where the curve is in two columns
    columns = [{4 + i for i, character in enumerate(row[4:]) if character != " "} for row in rows[:12]]
    assert set.intersection(*columns)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_without_braille(encoding):
    def drawn(curves, **options):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # refuses other characters
        plot_curves(curves, x_label="step", y_label="y", ax=Console(file=file, width=24, **options), marks={"µ": 5.0})
        file.seek(0)
        return file.read().splitlines()

    name = r"\xb5" if encoding == "ascii" else "µ"
    head, *rows, axis, steps = drawn({"up": CURVES["up"]})
    assert head == f"* up   | {name}"
    assert [rows[0], rows[-1], axis, steps.split()] == [
        " 10 +         |       **",
        "  0 +**       |",
        "    +" + "-" * 19,
        ["0", "step", "10"],
    ]
    assert drawn(CURVES)[0] == f"o up   x down   | {name}"
    assert drawn({"Größe →": CURVES["up"]})[0].startswith("* Gr" + (r"\xf6\xdfe \u2192" if encoding == "ascii" else ""))


def test_points_outside_axes_are_skipped():
    points = [(-1, 3.0), (0, 3.0), (1, 1.0), (10, math.nan), (math.inf, 1.0), (100, 2.0)]
    assert printed({"loss": points}, log_x=True) == printed({"loss": [(1, 1.0), (100, 2.0)]}, log_x=True)


def test_terminal_chart_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    console = Console(file=(file := io.StringIO()), width=40)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    picture = plot_curves(CURVES, x_label="step", y_label="value")
    picture.save(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<svg")
    assert repr(picture) == "<Picture of up, down>"
    assert file.getvalue() == printed()


def test_notebook_image_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setattr(rich, "get_console", lambda: Console(force_jupyter=True))
    shown = plot_curves(CURVES, x_label="step", y_label="value", marks={"middle": 5.0})
    assert repr(shown) == "<Picture of up, down>"
    assert shown._repr_svg_() == panels_svg([Panel(CURVES, "step", "value", marks={"middle": 5.0})])
    shown.save(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text() == shown._repr_svg_()
    with pytest.raises(DeclarationError) as error:
        shown.save("curves.png")
    assert str(error.value) == (
        "Plots can only be saved as SVG files, not as curves.png.\n  fix:   use a file name that ends in `.svg`"
    )


def test_legend_of_new_figure_is_inside_figure(plt):
    ax = plot_curves({f"training/some_metric_{n}": CURVES["up"] for n in range(9)}, x_label="step", y_label="value")
    ax.figure.canvas.draw()
    box, figure = ax.get_legend().get_window_extent(), ax.figure.bbox
    assert figure.x0 <= box.x0 < box.x1 <= figure.x1
    assert ax.get_window_extent().y1 <= box.y0 < box.y1 <= figure.y1


def test_single_point_is_visible(plt):
    ax = plot_curves({"loss": [(1, 2.0)]}, x_label="epoch", y_label="loss")
    assert ax.lines[0].get_marker() == "."
    many = plot_curves({"loss": [(x, 2.0) for x in range(41)]}, x_label="epoch", y_label="loss")
    assert many.lines[0].get_marker() == "None"


@pytest.mark.parametrize("log_x", [False, True])
def test_curve_without_finite_points_raises(log_x):
    points = [(0, 1.0), (-1, 2.0)] if log_x else [(1, math.nan), (2, math.inf)]
    with pytest.raises(DataError) as error:
        plot_curves({"loss": points}, x_label="rate", y_label="loss", log_x=log_x)
    assert str(error.value) == (
        "`loss` has no point that can be drawn.\n"
        "  where: it has 2 points\n"
        "  why:   only finite numbers have a place on an axis" + (", and above 0 on a logarithmic one" if log_x else "")
    )


def test_invalid_axes_raise():
    with pytest.raises(DeclarationError) as error:
        plot_curves(CURVES, x_label="step", y_label="value", ax="terminal")
    assert str(error.value) == (
        "`ax` takes matplotlib axes or a rich console, not 'terminal'.\n"
        "  fix:   write e.g. `ax=plt.figure().add_subplot()`"
    )
