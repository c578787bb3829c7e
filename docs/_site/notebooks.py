"""The pages of the gallery as Jupyter notebooks, which readers can download from the site."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_CODE = re.compile(r"^```python\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
# Marks for the tests, and the picture, which the notebook draws itself.
_LEFT_OUT = re.compile(r"^<!-- .* -->\n+|^!\[.*\]\(.*\)\n?", re.MULTILINE)


def notebook(text: str) -> dict[str, Any]:
    """Return a page as the content of a notebook: a cell for each fence of Python, and one for the text in between."""
    cells = []
    for number, part in enumerate(_CODE.split(text)):
        source = part.strip() if number % 2 else _LEFT_OUT.sub("", part).strip()
        if source:
            cells.append(_cell("code" if number % 2 else "markdown", source, f"cell-{number}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind: str, source: str, name: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def with_download(source: str, name: str) -> str:
    """Return the source of a page with a link to its notebook below the title."""
    title, _, rest = source.partition("\n")
    return f'{title}\n\n<p><a href="{name}.ipynb" download>Download this page as a notebook</a></p>\n{rest}'


def write_notebooks(pages: list[Path], folder: Path) -> None:
    """Write a notebook for each page into a folder of the site."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        content = json.dumps(notebook(page.read_text(encoding="utf-8")), indent=1)
        (folder / f"{page.stem}.ipynb").write_text(content + "\n", encoding="utf-8")
