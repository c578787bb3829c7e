"""`CallbackGraph`, the order of a set of callbacks for users and later stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fluxcb._check.graph_diff import differences
from fluxcb._check.ordering import Ordering
from fluxcb._check.render import counts, explain, summary
from fluxcb._check.shown import ShownText
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError

if TYPE_CHECKING:
    import networkx as nx

    from fluxcb._check.pictures import HandlerCosts

__all__ = ["CallbackGraph"]


class CallbackGraph(Ordering):
    """The order of a set of callbacks, derived from their declarations. It can be shown as text, picture or data."""

    # The graph of a Learner has this function, because counting costs needs the model and a batch.
    handler_costs: Callable[[], HandlerCosts] | None = None

    def order(self, event: type[Event], phase: type[Phase]) -> list[Callback]:
        """Return the callbacks that run at a moment, in order."""
        return [handler.declared.callback for handler in self.handlers(event, phase)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallbackGraph):
            return NotImplemented
        return not differences(self, other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # a graph is mutable, because it can get new moments

    def explain(self) -> str:
        """Return a text that lists the handlers of each moment in order, with the reason for each position."""
        return ShownText(explain(self))

    def render(
        self,
        form: str = "tree",
        *,
        event: type[Event] | None = None,
        phase: type[Phase] | None = None,
        costs: bool = False,
    ) -> str:
        """Return the graph as a picture or as text, even if it is invalid.

        Args:
            form: `tree` (text in stages, with reasons), `text` (the same for every order of the list, for snapshots),
                `mermaid`, `dot` (Graphviz), `svg` (handlers in execution order, with a line for each edge, and dashed
                lines for data that a later moment reads), or `html` (a page with the image and the details of each
                moment).
            event: Show only moments of this event.
            phase: Show only moments of this phase.
            costs: Also show what each handler of a step costs, in the forms `svg` and `html`. Only the graph of a
                Learner has costs: `learner.callbacks.graph`. See docs/how-to/costs.md.

        Raises:
            DeclarationError: The form is unknown or cannot show costs, or the graph has no costs.
        """
        from fluxcb._check.pictures import render

        if costs and self.handler_costs is None:
            raise DeclarationError(
                "This callback graph has no costs, because it does not belong to a Learner.",
                why="what a callback costs depends on the model and the batch",
                fix='write `learner.callbacks.graph.render("svg", costs=True)`',
            )
        shown = self.handler_costs() if costs and self.handler_costs is not None else None
        return render(self, form, event=event, phase=phase, costs=shown)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the representations that notebooks display."""
        forms = {"text/plain": "tree", "image/svg+xml": "svg", "text/vnd.mermaid": "mermaid"}
        return {kind: self.render(form) for kind, form in forms.items()}

    def __str__(self) -> str:
        return summary(self)

    def __repr__(self) -> str:
        return f"<CallbackGraph: {counts(self)}>"

    @property
    def digraph(self) -> nx.DiGraph:
        """The graph for networkx, which notebooks display as a picture.

        Nodes are callback labels with the attribute `callback`. Edges have the attributes `reasons` and `moments`.
        """
        from fluxcb._check.digraph import to_digraph

        return to_digraph(self)
