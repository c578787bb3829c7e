"""Objects that can be neither copied nor pickled."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from fluxcb._errors import DeclarationError

__all__ = ["Uncopied"]


class Uncopied:
    """Base class of objects for which `copy.copy`, `copy.deepcopy` and `pickle` raise an error with a fix.

    Without it, a shallow copy would share the state with the original, and the other two would fail at some part, such
    as a function of the optimizer or a compiled program.

    Attributes:
        copied_instead: The fixes: what to copy or save instead.
    """

    __slots__ = ()

    copied_instead: ClassVar[tuple[str, ...]] = (
        "copy the values that you need: `params = learner.params` is a copy",
        'save the run to a directory: add `Checkpointer("runs/1")` to the callbacks',
        "for another Learner, write a function that builds it, and call the function again",
    )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise the error; `copy` and `pickle` both call this method."""
        kind = type(self).__name__
        raise DeclarationError(
            f"A {kind} can be neither copied nor pickled.",
            why="it holds compiled programs, and its callbacks belong to it alone",
            fix=self.copied_instead,
        )
