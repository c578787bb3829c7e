"""Make the pictures of the gallery: `uv run --group integrations python docs/images/make_gallery.py [PAGE ...]`.

It runs all Python code of a page in `docs/gallery`, including the code below the heading "Picture", which writes a PNG
file with the name of the page. `sources.json` records a checksum of the code that each picture was made by, so that a
test finds outdated pictures without running anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

GALLERY = Path(__file__).resolve().parents[1] / "gallery"
PICTURES = Path(__file__).resolve().parent / "gallery"
SOURCES = PICTURES / "sources.json"

_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the pages of the gallery that have a picture."""
    return sorted(page for page in GALLERY.glob("*.md") if f"images/gallery/{page.stem}.png" in page.read_text("utf-8"))


def code_of(page: Path) -> str:
    """Return all Python code of a page."""
    return "\n".join(_FENCE.findall(page.read_text(encoding="utf-8")))


def checksum(page: Path) -> str:
    """Return the checksum of the code of a page."""
    return hashlib.sha256(code_of(page).encode()).hexdigest()[:16]


def draw(page: Path) -> None:
    """Run the code of a page, and keep the picture that it writes."""
    os.environ["MPLBACKEND"] = "Agg"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        script = Path(folder, f"{page.stem}.py")
        script.write_text(code_of(page), encoding="utf-8")
        runpy.run_path(str(script), run_name=f"gallery_{page.stem}")
        shutil.copy(Path(folder, f"{page.stem}.png"), PICTURES)


if __name__ == "__main__":
    sources = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    for page in pages():
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            draw(page)
            sources[page.stem] = checksum(page)
    SOURCES.write_text(json.dumps(dict(sorted(sources.items())), indent=2) + "\n")
