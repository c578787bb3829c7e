"""The pictures of the documentation show what the code does today."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
CURE = "run `python docs/images/make_images.py` and commit the pictures"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with the pictures as they are made today."""
    folder = tmp_path_factory.mktemp("images")
    run = subprocess.run(
        [sys.executable, "-W", "error", str(IMAGES / "make_images.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return folder


def shown_lines(picture):
    """Return the text of each line of a terminal's picture; numbers and widths depend on the machine, and are left out.

    The pieces of a line are texts at the same height.
    """
    lines = {}
    for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        lines.setdefault(text.get("y"), []).append((float(text.get("x", 0)), text.text or ""))
    whole = ["".join(text for _, text in sorted(pieces)) for pieces in lines.values()]
    return [re.sub(r"[\s-]+", " ", re.sub(r"\d[\d.,]*", "#", line)).strip() for line in whole]


def test_the_picture_of_a_graph_is_what_is_drawn_today(made):
    assert (IMAGES / "graph.svg").read_text() == (made / "graph.svg").read_text(), CURE


def test_the_picture_of_the_demo_shows_what_it_prints_today(made):
    lines = shown_lines(made / "demo.svg")
    assert shown_lines(IMAGES / "demo.svg") == lines, CURE
    assert "# after #: ClipGradients writes `step.grads`, GradientNorm reads it" in lines
    assert any(
        line.startswith("wrote runs/demo #") and line.endswith("graph.svg: the callback graph") for line in lines
    )
