"""`PopulationCallback`: the base class of callbacks that compare the members of a population."""

from __future__ import annotations

import copy
from typing import Any, Self

from fluxcb._declare.callback import Callback
from fluxcb._declare.learner_view import LearnerView
from fluxcb._errors import DeclarationError
from fluxcb.populations.meeting import Meeting

__all__ = ["PopulationCallback"]


class PopulationCallback(Callback):
    """Base class of callbacks that compare the members of a population.

    A `Population` adds a copy of the callback to each member. The copies are ordinary callbacks: each declares what it
    reads and writes of its own member, and its `state_dict` is saved with its member. In a handler, `share` exchanges
    values with the copies of the other members. Because every copy gets the same values, all copies can come to the
    same decision, and each applies its own part.

    Every copy must call `share` equally often, so the decision whether to call it must not depend on the member.

    Attributes:
        member: The number of the member that has this copy.
        members: The number of members of the population.

    Example:
        >>> import fluxcb
        >>> from fluxcb import on
        >>> from fluxcb.events import Trigger
        >>> from fluxcb.populations import PopulationCallback
        >>> from fluxcb.testing import testlearner
        >>> class Progress(PopulationCallback):
        ...     @on(Trigger)
        ...     def show(self, event, phase, learner):
        ...         steps = self.share(learner.progress.step)
        ...         if self.member == 0:
        ...             print(steps)
        ...
        ...     def stateaccess(self):
        ...         return {"progress": fluxcb.Read()}
        >>> population = fluxcb.Population(
        ...     lambda key: testlearner(key=key), key=range(2), callbacks=[Progress()], default_callbacks=False
        ... )
        >>> histories = population.fit(1)
        {0: 4, 1: 4}
    """

    member: int = 0
    members: int = 1
    _meeting: Meeting | None = None

    def for_member(self, member: int, members: int, meeting: Meeting) -> Self:
        """Return the copy of a member; `Population` calls this.

        Args:
            member: The number of the member.
            members: The number of members.
            meeting: Connects the copies.
        """
        own = copy.copy(self)
        # Otherwise, all copies would collect their records in the same list.
        vars(own).update({name: copy.copy(of) for name, of in vars(self).items() if isinstance(of, list | dict)})
        own.member, own.members, own._meeting = member, members, meeting
        return own

    def init(self, learner: LearnerView) -> None:
        """Check that the callback belongs to a population.

        Raises:
            DeclarationError: It is in the list of a Learner.
        """
        if self._meeting is None:
            name = type(self).__name__
            raise DeclarationError(
                f"{self!r} is in the callbacks of a Learner, but it compares the members of a population.",
                fix=f"pass it to the population: `Population(make_learner, callbacks=[{name}(...)], ...)`",
            )

    def share(self, value: Any) -> dict[int, Any]:
        """Share a value with the other members, and wait for theirs.

        Args:
            value: Any object. Arrays are not copied.

        Returns:
            The values of all members that have not ended, by member, in the order of the members. If the member is
            trained alone, with its own `fit`, only its own value.
        """
        if self._meeting is None:
            return {self.member: value}
        return self._meeting.share(type(self).__name__, self.member, value)

    def share_in_epoch(self, epoch: int, value: Any) -> dict[int, Any]:
        """Share a value that belongs to an epoch; see `share`.

        Args:
            epoch: The number of the epoch, the same for all members.
            value: The value.

        Raises:
            DeclarationError: The members are in different epochs, for example after one of them was restored.
        """
        shared = self.share((epoch, value))
        epochs = {member: of for member, (of, _) in shared.items()}
        if len(set(epochs.values())) > 1:
            shown = ", ".join(f"member {member} in epoch {of}" for member, of in epochs.items())
            raise DeclarationError(
                f"{type(self).__name__} compares members that are in different epochs: {shown}.",
                why="their metrics belong to different amounts of training",
                fix="train or restore all members to the same epoch, or use `population.fit(..., resume=True)`",
            )
        return {member: of for member, (_, of) in shared.items()}
