"""Recording of the state that callbacks use, and of declared access that remains unused."""

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

__all__ = ["Recording", "Unused", "covers", "permission_text", "recorded", "traced_handlers", "unused"]

Unused = Literal["never uses", "never reads", "only reads"]
"""How the use of a path differs from its declaration."""


class Recording:
    """The state that callbacks use on the host, for all Learners that are built during the recording."""

    def __init__(self) -> None:
        # Keep a reference to each callback, because the identity of a deleted object can be reused.
        self._by_callback: dict[int, tuple[Callback, Touched]] = {}

    def of(self, callback: Callback) -> Touched:
        """Return the state that a callback's host handlers and `init` have used."""
        from fluxcb._compile.handler_backend import Touched

        return self._by_callback.setdefault(id(callback), (callback, Touched()))[1]

    def seen(self, callback: Callback, learner: Learner) -> Touched:
        """Return the state that a callback has used, including its handlers in the Learner's traced steps."""
        from fluxcb._compile.handler_backend import Touched

        host = self.of(callback)
        seen = Touched(set(host.read), set(host.written), set(host.changeable))
        for handler, traced in traced_handlers(learner):
            if handler.declared.callback is callback:
                seen.read |= traced.read
                seen.written |= traced.written
        return seen


def traced_handlers(learner: Learner) -> Iterator[tuple[Any, Touched]]:
    """Iterate over the handlers that were traced into a Learner's steps, each with the state that it used."""
    for _, step in learner._core.engine.programs._steps.values():
        yield from step.touched.items()


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record the state that callbacks use, for all Learners that are built inside the block, also after the block."""
    from fluxcb._run.host_backend import access_watcher

    recording = Recording()
    token = access_watcher.set(lambda declared: recording.of(declared.callback))
    try:
        yield recording
    finally:
        access_watcher.reset(token)


def unused(access: Access, seen: Touched) -> Iterator[tuple[StatePath, Permission, Unused]]:
    """Yield the declarations that were not used as declared, except `control` and the declaration of all state.

    Args:
        access: The declared access.
        seen: The state that was used.
    """
    for path, permission in access.items():
        if path[0] in ("*", "control"):
            continue
        read = covers(path, seen.read)
        if writes(permission) and not covers(path, seen.written):
            if not read:
                yield path, permission, "never uses"
            elif not (isinstance(permission, Append) or covers(path, seen.changeable)):
                yield path, permission, "only reads"
        elif not writes(permission) and not read:
            yield path, permission, "never reads"


def covers(path: StatePath, paths: Iterable[StatePath]) -> bool:
    """Return whether one of the paths equals this path, is inside it, or contains it."""
    return any(path[: len(p)] == p or p[: len(path)] == path for p in paths)


def permission_text(path: StatePath, permission: Permission) -> str:
    """Return a declaration in the form that messages use: `Read() on `step.loss``."""
    return f"{type(permission).__name__}() on `{dotted(path)}`"
