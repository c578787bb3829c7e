"""Recording: what callbacks really touch, and what of their declared access that leaves unused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from fluxcb._declare.access import Access, Append, Permission, dotted, writes
from fluxcb._declare.callback import Callback
from fluxcb._typing import StatePath

if TYPE_CHECKING:
    from fluxcb._compile.handler_backend import Touched
    from fluxcb._run.learner import Learner

__all__ = ["Recording", "Unused", "covers", "recorded", "told", "traced_handlers", "unused"]

Unused = Literal["never touches", "never reads", "only reads"]
"""How the use of a path falls short of what is declared."""


class Recording:
    """What the callbacks of the Learners that were built meanwhile have touched on the host."""

    def __init__(self) -> None:
        # The callback is kept beside what it touched: the identity of one that is gone would be another's.
        self._by_callback: dict[int, tuple[Callback, Touched]] = {}

    def of(self, callback: Callback) -> Touched:
        """Return what a callback's host handlers and its `init` have touched."""
        from fluxcb._compile.handler_backend import Touched

        return self._by_callback.setdefault(id(callback), (callback, Touched()))[1]

    def seen(self, callback: Callback, learner: Learner) -> Touched:
        """Return what a callback has touched, its handlers in the Learner's traced steps included."""
        from fluxcb._compile.handler_backend import Touched

        host = self.of(callback)
        seen = Touched(set(host.read), set(host.written), set(host.changeable))
        for handler, traced in traced_handlers(learner):
            if handler.declared.callback is callback:
                seen.read |= traced.read
                seen.written |= traced.written
        return seen


def traced_handlers(learner: Learner) -> Iterator[tuple[Any, Touched]]:
    """Iterate over the handlers that were traced into a Learner's steps, each with what it touched."""
    for _, step in learner._parts.engine.programs._steps.values():
        yield from step.touched.items()


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record what the callbacks of Learners that are built inside the block touch, then and later."""
    from fluxcb._run.host_backend import watching

    recording = Recording()
    token = watching.set(lambda declared: recording.of(declared.callback))
    try:
        yield recording
    finally:
        watching.reset(token)


def unused(access: Access, seen: Touched) -> Iterator[tuple[StatePath, Permission, Unused]]:
    """Yield what is declared and was not used as declared; `control` and the declaration of everything are passed over.

    Args:
        access: What is declared.
        seen: What was touched.
    """
    for path, permission in access.items():
        if path[0] in ("*", "control"):
            continue
        read = covers(path, seen.read)
        if writes(permission) and not covers(path, seen.written):
            if not read:
                yield path, permission, "never touches"
            elif not (isinstance(permission, Append) or covers(path, seen.changeable)):
                yield path, permission, "only reads"
        elif not writes(permission) and not read:
            yield path, permission, "never reads"


def covers(path: StatePath, paths: Iterable[StatePath]) -> bool:
    """Tell whether one of the paths is this one, lies in it, or holds it."""
    return any(path[: len(p)] == p or p[: len(path)] == path for p in paths)


def told(path: StatePath, permission: Permission) -> str:
    """Return a declaration as messages say it: `Read() on `step.loss``."""
    return f"{type(permission).__name__}() on `{dotted(path)}`"
