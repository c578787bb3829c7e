"""The laws for all callbacks, checked for one callback."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Append, dotted
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._tools.comparing import differing, leaves, same, short, snapshot
from fluxcb._tools.recording import Recording, permission_text, recorded, unused
from fluxcb._tools.restoring import changed, fields, restored

__all__ = ["Laws", "MayCancel"]


class Laws:
    """One check of one callback. `fluxcb.testing.check_callback` lists the laws.

    Args:
        make: Returns a new instance of the callback.
        needs: Functions that make the callbacks that it requires.
        companion: Makes a callback that uses no state, so that there are at least two callbacks to reorder.
        learner: Builds the Learner.
        epochs: Length of the training (epochs).
        unused: Declared paths that may remain unused.
        handles: Fields that need not be restored.

    Attributes:
        label: The name of the callback in messages.
        broken: One text per violated law.
        cause: The first exception that was raised.
    """

    def __init__(
        self,
        make: Callable[[], Callback],
        *,
        needs: tuple[Callable[[], Callback], ...],
        companion: Callable[[], Callback],
        learner: Callable[..., Any],
        epochs: int,
        unused: frozenset[str],
        handles: frozenset[str],
    ) -> None:
        self.make, self.needs, self.companion = make, needs, companion
        self.learner, self.epochs = learner, epochs
        self.unused, self.handles = unused, handles
        self.label = repr(make())
        self.broken: list[str] = []
        self.cause: BaseException | None = None

    def check(self) -> None:
        """Check the laws. If the first law is violated, the other laws cannot be checked."""
        reference = self._alone()
        if reference is None:
            return
        self._with_defaults()
        others: list[Callable[[], Callback]] = [self.companion]
        for law, makers, reorder in (
            ("when the callbacks list is reversed", others, lambda items: items[::-1]),
            ("when the callbacks list is rotated", others, lambda items: items[1:] + items[:1]),
            ("when every step is a window of its own", [MayCancel], lambda items: items),
        ):
            self._same_state(reference, law, makers, reorder)
        self._same_state(reference, "when three steps run in one call", [], lambda items: items, steps_per_call=3)

    def _fresh(self) -> tuple[Callback, list[Callback]]:
        callback = self.make()
        return callback, [callback, *(make() for make in self.needs)]

    def _alone(self) -> Any:
        callback, items = self._fresh()
        with quiet(), recorded() as recording:
            try:
                learner = self.learner(*items, default_callbacks=False)
                created, before = snapshot(learner.cbstate), fields(callback)
                call_init_again(learner, items)
                self._init_again(created, learner.cbstate, "")
                learner.fit(1)
                counts = learner.compile_counts
                if self.epochs > 1:
                    learner.fit(self.epochs - 1)
            except Exception as error:
                self._fails("without the default callbacks", error)
                return None
            if learner.compile_counts != counts:
                self.broken.append(
                    f"The step is traced or compiled again after the first epoch: {counts} became "
                    f"{learner.compile_counts}. Traced handlers must not depend on Python values that change."
                )
            trained = snapshot(learner.cbstate)
            state, after = leaves(learner.state), fields(callback)
            call_init_again(learner, items)
            self._init_again(trained, learner.cbstate, " after training")
            self._access(callback, learner, recording)
            self._state_dict(callback, before, after)
        return state

    def _fails(self, how: str, error: Exception) -> None:
        self.broken.append(f"Training fails {how}. {type(error).__name__}: {error}".replace("\n", "\n  "))
        self.cause = self.cause or error

    def _with_defaults(self) -> None:
        _, items = self._fresh()
        with quiet():
            try:
                self.learner(*items, default_callbacks=True).fit(self.epochs)
            except Exception as error:
                self._fails("with the default callbacks", error)

    def _same_state(
        self,
        reference: list[Any],
        law: str,
        others: Sequence[Callable[[], Callback]],
        reorder: Callable[[list[Any]], Any],
        *,
        steps_per_call: int | None = None,
    ) -> None:
        _, items = self._fresh()
        with quiet():
            try:
                learner = self.learner(*reorder([*items, *(make() for make in others)]), default_callbacks=False)
                if steps_per_call is not None:  # assigned, because the function that builds the Learner may not take it
                    learner._core.engine.programs.steps_per_call = steps_per_call
                learner.fit(1)
                if self.epochs > 1:
                    learner.fit(self.epochs - 1)
            except Exception as error:
                self._fails(law, error)
                return
            found = leaves(learner.state)
        wrong = differing(reference, found)
        if wrong is None or wrong:
            self.broken.append(
                f"The train state differs {law}: {', '.join(wrong[:5]) if wrong else 'in its structure'}."
            )

    # -- access -----------------------------------------------------------------------------

    def _access(self, callback: Callback, learner: Any, recording: Recording) -> None:
        declared = next(d for d in learner._core.graph.declared if d.callback is callback)
        for path, permission, how in unused(declared.access, recording.seen(callback, learner)):
            if dotted(path) in self.unused:
                continue
            rest = "; declare Read()." if how == "only reads" else f" in {self.epochs} epochs."
            self.broken.append(f"It declares {permission_text(path, permission)}, but {how} it{rest}")

    # -- init and saved state -----------------------------------------------------------------

    def _init_again(self, before: Any, now: Any, when: str) -> None:
        names = {**before, **now}
        wrong = [n for n in names if n not in before or n not in now or not same(before[n], now[n])]
        if wrong:
            self.broken.append(
                f"A second call of `init`{when} changes `cbstate.{wrong[0]}`; create it only "
                f'`if "{wrong[0]}" not in learner.cbstate`.'
            )

    def _state_dict(self, callback: Callback, before: dict[str, Any], after: dict[str, Any]) -> None:
        first = changed(callback, before, after)
        found = restored(callback, self.make(), first, after)
        if found.error is not None:
            self._fails("after `load_state_dict(state_dict())`", found.error)
            return
        if not found.faithful:
            self.broken.append("`load_state_dict(state_dict())` does not restore the values that `state_dict` returns.")
        for name in found.lost:
            if name not in self.handles:
                self.broken.append(
                    f"Its field `{name}` changes during training (from {short(first[name])} to {short(after[name])}), "
                    "and `load_state_dict` does not restore it. Save it in `state_dict`, or store it in "
                    "`learner.cbstate`."
                )


class MayCancel(Callback):
    """Limits every window to one step, and does nothing else."""

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare that it may cancel."""
        return {"control": Append()}

    @on(StepBegin)
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what callbacks print."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def call_init_again(learner: Any, items: list[Any]) -> None:
    """Set the same callbacks again, which calls their `init`. The laws report replaced entries instead of a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The callbacks list has changed, and the `init` of", UserWarning)
        learner.callbacks.set(items)
