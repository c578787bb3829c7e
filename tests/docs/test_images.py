"""The pictures in the documentation are current."""

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
    """Create the current pictures, and return their folder."""
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["graph", "events", "state", "order", "host-and-traced", "windows", "resume"])
def test_drawings_are_current(made, name):
    assert (IMAGES / f"{name}.svg").read_text() == (made / f"{name}.svg").read_text(), CURE


@pytest.mark.long
def test_terminal_picture_matches_output_of_example(made):
    lines = shown_lines(made / "terminal.svg")
    assert shown_lines(IMAGES / "terminal.svg") == lines, CURE
    assert any(line.startswith("Training finished after epoch #") for line in lines)


@pytest.mark.long
def test_demo_picture_matches_output_of_demo(made):
    lines = shown_lines(made / "demo.svg")
    assert shown_lines(IMAGES / "demo.svg") == lines, CURE
    assert "# after #: ClipGradients writes `step.grads`, GradientNorm reads it" in lines
    assert any(
        line.startswith("wrote runs/demo #") and line.endswith("graph.svg: the callback graph") for line in lines
    )


@pytest.mark.long
def test_picture_of_population_matches_its_page(made):
    lines = shown_lines(made / "sweep.svg")
    assert shown_lines(IMAGES / "sweep.svg") == lines, CURE
    assert " ".join(lines).count("member #") == 4


def test_readme_links_and_pictures_work_on_pypi():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\((\S+?)\)", text)
    pictures = re.findall(r"!\[[^]]*\]\((\S+?)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    prefix = "https://raw.githubusercontent.com/fluxcb/fluxcb/main/"
    assert [picture for picture in pictures if not (ROOT / picture.removeprefix(prefix)).is_file()] == []
    assert len(pictures) == 2
