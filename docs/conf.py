"""How Sphinx builds the site; docs/contributing.md has the command.

Pages are Markdown that GitHub shows as well. Their code is executed by the tests (tests/docs/test_pages.py), and not
again when the site is built.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the reference imports modules; none of them needs an accelerator

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from _site.api import Api, add_signature  # noqa: E402
from _site.code_links import link_code  # noqa: E402
from _site.contents import with_toctrees  # noqa: E402
from _site.docstrings import after_napoleon, before_napoleon  # noqa: E402
from _site.notebooks import with_download, write_notebooks  # noqa: E402

import fluxcb  # noqa: E402

project = "fluxcb"
author = "The fluxcb developers"
copyright = "The fluxcb developers"
version = release = fluxcb.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_site"]
nb_execution_mode = "off"

# GitHub's anchors of headings, so that a link works in both places.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Access", "Runs", "Cost", "Source"]
napoleon_use_ivar = True
napoleon_attr_annotations = False  # they would show private paths
python_maximum_signature_line_length = 100
add_module_names = True
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "fluxcb"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "repository_url": "https://github.com/fluxcb/fluxcb",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # the search field is in the sidebar
    "show_toc_level": 2,
}


def complete_page(app, docname, content):
    page = DOCS / f"{docname}.md"
    if page.name == "index.md":
        content[0] = with_toctrees(content[0], page)
    elif page.parent == DOCS / "gallery":
        content[0] = with_download(content[0], page.stem)


def add_notebooks(app, error):
    if error is None and app.builder.format == "html":
        pages = [page for page in sorted((DOCS / "gallery").glob("*.md")) if page.name != "index.md"]
        write_notebooks(pages, Path(app.outdir) / "gallery")


def setup(app):
    app.add_directive("api", Api)
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-signature", add_signature)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("doctree-resolved", link_code)
    app.connect("build-finished", add_notebooks)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
