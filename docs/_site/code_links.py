"""Links from code in the text of a page to the reference, so that pages need no markup for them.

`Learner`, `ClipGradients(1.0)`, `callbacks.ClipGradients`, `fluxcb.inject` and `learner.fit` become links where they
stand in a sentence, once per section.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

# A class, with or without arguments, a path, or a method of a Learner. Functions such as `on` and `accuracy` are linked
# by their path only: as single words they have other meanings.
_CODE = re.compile(r"^(?P<name>[A-Z]\w+|[a-z]+\.[\w.]+)(?:\(.*\))?$")


def link_code(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn the first mention of a documented name in each section into a link."""
    targets = _targets(app)
    linked: set[tuple[int, str]] = set()
    for literal in list(doctree.findall(nodes.literal)):
        found = _CODE.match(literal.astext())
        target = targets.get(found["name"]) if found else None
        if target is None or _is_inside(literal, (nodes.reference, nodes.title, nodes.field_name)):
            continue
        page, anchor = target
        section = literal.parent
        while section.parent is not None and not isinstance(section, nodes.section):
            section = section.parent
        if page == docname or (id(section), anchor) in linked:
            continue
        linked.add((id(section), anchor))
        reference = make_refnode(app.builder, docname, page, anchor, [literal.deepcopy()])
        literal.replace_self(reference)


def _targets(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Return page and anchor of each documented name: by its full path, and classes also by their own name."""
    targets: dict[str, tuple[str, str]] = {}
    for path, entry in app.env.domains["py"].objects.items():
        targets[path] = target = (entry.docname, entry.node_id)
        if entry.objtype in ("class", "exception"):
            targets.setdefault(path.rpartition(".")[2], target)
        if path.startswith("fluxcb.Learner."):
            if entry.objtype == "method":  # not properties: `learner.params` in a handler is another object
                targets[path.replace("fluxcb.Learner.", "learner.")] = target
        elif path.count(".") == 2:
            targets[path.removeprefix("fluxcb.")] = target
    return targets


def _is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False
