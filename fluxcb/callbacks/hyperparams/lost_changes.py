"""Warnings about changes of a hyperparameter that another callback overwrites, so that they have no lasting effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fluxcb._declare.access import code_reading, dotted, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.learner_view import LearnerView
from fluxcb._tracebacks import warn_user

__all__ = ["LostChanges"]


@dataclass
class LostChanges:
    """The last change of a hyperparameter by a setter, to find out whether another callback overwrites the changes.

    Attributes:
        before: The value before the change, or None if there has been no change.
        after: The value that the setter assigned.
        epoch: The epoch after which it was assigned.
        last_epoch: The last epoch of the fit.
        warned: Whether the warning has been issued.
    """

    before: float | None = None
    after: float = 0.0
    epoch: int = 0
    last_epoch: int = 0
    warned: bool = False

    def can_occur(self, setter: Callback, name: str) -> bool:
        """Return whether another callback may overwrite a hyperparameter, so that its value is worth reading."""
        return not self.warned and any(_other_writers(setter, name))

    def note(self, setter: Callback, name: str, learner: LearnerView, current: float, new: float) -> None:
        """Warn if the last change was lost, and note the next one.

        Args:
            setter: The callback that changes the hyperparameter.
            name: Name of the hyperparameter.
            learner: The learner in the handler of the setter.
            current: The value before the next change.
            new: The value that the setter assigns now.
        """
        if not self.can_occur(setter, name):
            return
        epoch, last_epoch = learner.progress.epoch, learner.progress.epochs
        # Between two fits, or before it returns to an earlier state, a program may have set the value itself.
        if self.last_epoch == last_epoch and self.epoch < epoch and self._is_lost(current):
            self.warned = True
            warn_user(self._text(setter, name, current, epoch), UserWarning)
        self.before, self.after, self.epoch, self.last_epoch = current, new, epoch, last_epoch

    def _is_lost(self, current: float) -> bool:
        if self.before is None or math.isclose(self.before, self.after, rel_tol=1e-6):
            return False
        # A schedule that continues to rise has a higher value than before.
        return current >= self.before if self.after < self.before else current == self.before

    def _text(self, setter: Callback, name: str, current: float, epoch: int) -> str:
        path = ("hyperparams", name)
        others = list(_other_writers(setter, name))
        labels, one = " and ".join(other.label for other in others), others[0].label
        then = f"after epoch {self.epoch}" if self.epoch else "before the first epoch"
        keep = f"jnp.where(learner.progress.step < n, value, {code_reading(path)})"
        return (
            f"{setter!r} changed `{dotted(path)}` from {self.before:g} to {self.after:g} {then}, but the value is "
            f"{current:g} after epoch {epoch}, so the change was lost. {labels} also "
            f"{'writes' if len(others) == 1 else 'write'} `{dotted(path)}`. Remove one of these callbacks. Or, if "
            f"{one} is a warm-up of n steps, assign `{keep}` in it, which loses only changes during these steps."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the fields, or nothing if no change has been noted."""
        return {"changes": asdict(self)} if self != LostChanges() else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fields from the state of the setter, or reset them if it has none, as in older checkpoints."""
        vars(self).update(vars(LostChanges(**state.get("changes", {}))))


def _other_writers(setter: Callback, name: str) -> Iterator[Declared]:
    """Yield the user's callbacks in the Learner of a setter that may write the same hyperparameter."""
    owner = getattr(setter, "_fluxcb_owner", None)  # a weak reference, set when the setter becomes part of a Learner
    graph = getattr(owner() if owner is not None else None, "graph", None)
    for declared in graph.declared if graph is not None else ():
        # The callbacks of the library set a hyperparameter at times that the user chose, or conflict with the setter.
        of_user = not declared.is_shipped or declared.cls.access_argument is not None
        if unwrap(declared.callback) is setter or declared.disabled or not of_user:
            continue
        paths = [path for path, permission in declared.access.items() if writes(permission)]
        if any(path in (("hyperparams",), ("hyperparams", name)) for path in paths):
            yield declared
