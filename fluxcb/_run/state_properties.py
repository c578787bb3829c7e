"""The properties of a Learner that return and set its state: `params`, `state`, `cbstate`, `hyperparams`, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fluxcb._calls import entry_point
from fluxcb._compile.arrays import own_copy
from fluxcb._errors import AccessError, did_you_mean
from fluxcb._run.arguments import as_key
from fluxcb._run.averages import restart_averages
from fluxcb._run.data_sources import data_sources
from fluxcb._run.history import History
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.returned_copies import warn_of_source
from fluxcb._run.state import HostState
from fluxcb._run.state_assignment import refuse_scheduled, set_hyperparam, set_key, set_part, set_state
from fluxcb._run.state_view import StateView
from fluxcb._typing import PyTree

__all__ = ["StateProperties"]

_NEW_LEARNER = "build a new Learner with it, and then assign the parameters: `new.params = learner.params`"
_COUNTERS = "to continue from a checkpoint, call `learner.restore(path)`; counters are also part of `learner.state`"

_INSTEAD = {
    "callbacks": "write `learner.callbacks.set([...])`, or `add`, `replace` or `remove`",
    "cbstate": "assign an entry in a handler of a callback that declares it, or assign `learner.state`",
    "compile_counts": "build a new Learner to count from zero",
    "epoch": _COUNTERS,
    "graph": "write `learner.callbacks.set([...])`; the graph follows from the callbacks",
    "history": "build a new Learner to start with an empty history",
    "hyperparams": "assign one of them: `learner.hyperparams[name] = value`",
    "loss_fn": _NEW_LEARNER,
    "optimizer": f"{_NEW_LEARNER}; to change a hyperparameter: `learner.hyperparams[name] = value`",
    "phases": _NEW_LEARNER,
    "step": _COUNTERS,
}
"""What to do instead of assigning an attribute that cannot be assigned."""

_STOP = (
    '`raise CancelFitting("reason")` in a handler of a host event; its callback declares `control`: '
    '`def stateaccess(self): return {"control": Append()}`'
)
_LEARNING_RATE = 'write `learner.hyperparams["learning_rate"] = value`'

_ELSEWHERE = {
    "stop_training": _STOP,
    "should_stop": _STOP,
    "lr": _LEARNING_RATE,
    "learning_rate": _LEARNING_RATE,
}
"""Attributes that users of other libraries assign, each with what to do instead."""

_METRICS = 'add `Metrics()` to the callbacks before `fit`, and read e.g. `learner.history["training/loss"]`'
_OPTIMIZER = "read `learner.opt_state`; the optimizer itself is what you passed to `Learner`"

_CALLS = {
    "save": 'add `Checkpointer("runs/1")` to the callbacks before `fit`; it saves the state at the end of each epoch',
    "save_weights": 'add `Checkpointer("runs/1")` to the callbacks before `fit`, which also saves the parameters',
    "load_weights": 'write `learner.params = fluxcb.checkpoints.load_params("runs/1")`',
    "parameters": "read `learner.params`",
    "load": 'call `learner.restore("runs/1")` with the folder of a `Checkpointer`',
    "compile": "leave the call out; pass the optimizer and the loss function to `Learner`, which compiles the step",
    "summary": "add `ModelSummary()` to the callbacks; it prints the parameters when the fit begins",
    "validate": "call `learner.evaluate()`",
    "train": "call `learner.fit(10)`",
    "state_dict": "read `learner.state`",
    "load_state_dict": "write `learner.state = state`",
    "save_checkpoint": 'add `Checkpointer("runs/1")` to the callbacks before `fit`',
    "load_checkpoint": 'call `learner.restore("runs/1")` with the folder of a `Checkpointer`',
    "resume": 'add `Checkpointer("runs/1")` to the callbacks, and call `learner.fit(10, resume=True)`',
    "train_step": "call `learner.run_step(TrainingPhase(), batch)`",
    "train_epoch": "call `learner.run_epoch(TrainingPhase())`",
    "test": "call `learner.evaluate(batches)`",
    "eval": "call `learner.evaluate()`",
    "apply_fn": "call `learner.predict(xs)`",
    "apply_gradients": "call `learner.run_step(TrainingPhase(), batch)`, which computes and applies the gradients",
    "train_state": "read `learner.state`",
    "variables": "read `learner.params` and `learner.model_state`",
    "weights": "read `learner.params`",
    "batch_stats": "read `learner.model_state`",
    "tx": _OPTIMIZER,
    "optim": _OPTIMIZER,
    "opt": _OPTIMIZER,
    "optimizers": _OPTIMIZER,
    "rng": "read `learner.key`",
    "lr": 'read `learner.hyperparams["learning_rate"]`',
    "learning_rate": 'read `learner.hyperparams["learning_rate"]`',
    "progress": "read `learner.step` and `learner.epoch`",
    "global_step": "read `learner.step`",
    "current_epoch": "read `learner.epoch`",
    "loss": 'add `Metrics()` to the callbacks before `fit`, and read `learner.history["training/loss"]`',
    "metrics": _METRICS,
    "callback_metrics": _METRICS,
    "grads": "read `learner.step.grads` in a handler of StepEnd, and declare it: "
    '`def stateaccess(self): return {"step": {"grads": Read()}}`',
    "log": 'write `learner.cbstate.monitors.put_scalar("name", value)` in a handler, and declare it: '
    '`def stateaccess(self): return {"cbstate": {"monitors": Append()}}`',
    "add_callback": "call `learner.callbacks.add(callback)`",
    "stop_training": f"to end the fit, write {_STOP}",
}
"""Attributes of other libraries that a Learner does not have, each with what to do instead."""

_SETTABLE = ("params", "model_state", "opt_state", "state", "data", "key", "model")


class StateProperties:
    """Base class of `Learner`: its state as properties.

    The properties return copies. Some of them can be assigned between two calls of `fit`. An assignment to any other
    attribute is an error, because the training would silently not use it.

    Attributes:
        stop_reason: The reason that the last fit ended early, or None.
    """

    _core: LearnerCore
    _state: HostState
    stop_reason: str | None

    if not TYPE_CHECKING:  # type checkers must report unknown attributes

        @entry_point
        def __getattr__(self, name: str) -> Any:
            if name not in _CALLS:
                if hasattr(type(self), name):
                    return object.__getattribute__(self, name)  # raises the error of a property
                # The usual error, raised by a statement, so that its traceback shows only the user's line.
                usual = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(usual, name=name, obj=self)
            what = f"A Learner has no attribute `{name}`."
            # Without `obj`, with which Python would add its own suggestion.
            raise AttributeError(str(AccessError(what, fix=_CALLS[name])), name=name)

    def _check_assigned(self, name: str, *, in_subclass: bool) -> None:
        """Check that an attribute can be assigned.

        Args:
            name: Its name.
            in_subclass: Whether this is a subclass of `Learner`, which may have additional attributes.

        Raises:
            AccessError: The attribute cannot be assigned.
        """
        # Names with an underscore are those of the Learner itself.
        if name.startswith("_") or name in _SETTABLE or name == "stop_reason":
            return
        # A user's subclass may have attributes of its own, but not replace those of the Learner.
        if name in _INSTEAD or not in_subclass:
            raise self._unknown(name)

    def _unknown(self, name: str) -> AccessError:
        if name in _INSTEAD:
            fix = _INSTEAD[name]
            if self._core.state.train.built and self._core.state.train.live(("model_state",)):
                # Batch statistics that do not belong to the parameters would make another model of them.
                fix = fix.replace(_NEW_LEARNER, f"{_NEW_LEARNER}, and `new.model_state = learner.model_state`")
            return AccessError(f"`learner.{name}` cannot be assigned.", fix=fix)
        if name in _ELSEWHERE:
            return AccessError(
                f"A Learner has no attribute `{name}` that could be assigned.",
                why="the training would not use it",
                fix=_ELSEWHERE[name],
            )
        hint = did_you_mean(name, [*_SETTABLE, *_INSTEAD])
        return AccessError(
            f"A Learner has no attribute `{name}` that could be assigned.{hint}",
            why="the training would not use it",
            fix=f"assign one of {', '.join(f'`{settable}`' for settable in _SETTABLE)}",
        )

    @property
    @entry_point
    def params(self) -> PyTree:
        """A copy of the trained parameters; can be assigned. Averages of the parameters are in `cbstate`.

        An assignment replaces the parameters by copies of the assigned ones, which must have the same structure, shapes
        and dtypes. The optimizer state stays as it is: an optimizer with momentum continues with the momentum of the
        old parameters. To start without it, build a new Learner. Averages of the parameters, such as that of
        `ParameterEMA`, restart at the assigned ones.
        """
        return self._copy_of("params")

    @params.setter
    @entry_point
    def params(self, params: PyTree) -> None:
        self._replace("params", params)
        # After the assignment, because the averages restart at the current parameters.
        restart_averages(self._core.graph, self._state)

    @property
    @entry_point
    def model_state(self) -> PyTree:
        """A copy of the state that the model updates, such as batch statistics; can be assigned like `params`."""
        return self._copy_of("model_state")

    @model_state.setter
    @entry_point
    def model_state(self, model_state: PyTree) -> None:
        self._replace("model_state", model_state)

    @property
    @entry_point
    def opt_state(self) -> PyTree:
        """A copy of the optimizer's state; can be assigned like `params`."""
        return self._copy_of("opt_state")

    @opt_state.setter
    @entry_point
    def opt_state(self, opt_state: PyTree) -> None:
        self._replace("opt_state", opt_state)

    @property
    @entry_point
    def state(self) -> PyTree:
        """The whole train state as one pytree (a copy): params, model_state, opt_state, key, cbstate, counters."""
        self._core.refuse_ahead("state")
        return self._core.returned_copy("state", self._state.train.as_pytree())

    @state.setter
    @entry_point
    def state(self, state: PyTree) -> None:
        self._core.refuse_while_running("state = ...")
        self._core.returned.forget()  # first, because a refused assignment already reports an error
        set_state(self._state, state)

    def _copy_of(self, name: str) -> PyTree:
        self._core.refuse_ahead(name)
        # The live arrays would be deleted by the next step, which donates them.
        return self._core.returned_copy(name, own_copy(self._state.train.live((name,))))

    def _replace(self, name: str, value: PyTree) -> None:
        self._core.refuse_while_running(f"{name} = ...")
        # The assigned value may be a returned copy that the user has changed, as the error about such copies suggests.
        self._core.returned.forget()
        set_part(self._state, name, value)

    @property
    def key(self) -> jax.Array:
        """A copy of the random key of the run (typed); an int or a key can be assigned.

        The following steps use the assigned key. The parameters stay as they are.
        """
        # No `refuse_ahead`, because all steps of a run have the same key, from which theirs are folded.
        return jnp.copy(self._state.train.run_key)

    @key.setter
    @entry_point
    def key(self, key: Any) -> None:
        self._core.refuse_while_running("key = ...")
        set_key(self._state, as_key(key))

    @property
    def data(self) -> StateView:
        """The data sources by the name of their phase; can be assigned.

        An assignment accepts the same forms as the argument `data` of the Learner, and takes effect with the next
        epoch. Phases that it does not name keep their data. `learner.data["validation"] = batches` replaces one data
        source.
        """
        return StateView("data", self._state.data, self._set_data)

    @data.setter
    @entry_point
    def data(self, data: Any) -> None:
        self._core.refuse_while_running("data = ...")
        for name, source in data_sources(data, self._core.phases).items():
            self._core.set_data(name, source)

    @entry_point
    def _set_data(self, name: str, source: Any) -> Any:
        # Through the property, which refuses the change during a fit and checks the name.
        self.data = {name: source}
        return source

    @property
    @entry_point
    def cbstate(self) -> StateView:
        """The state that callbacks share, as a read-only mapping whose entries are also attributes."""
        state = self._state
        # Entries on the host never run ahead, so a handler may read them if the carry has none.
        if state.train.built and state.train.carry["cbstate"]:
            self._core.refuse_ahead("cbstate")
        carried_entries = own_copy(state.train.carry["cbstate"]) if state.train.built else {}  # steps donate these
        return StateView("cbstate", {**state.cbstate, **carried_entries})

    @property
    def history(self) -> History:
        """A copy of the metrics of the training run so far, and the reason the last fit ended."""
        state = self._state
        return History.of(
            state.cbstate, epoch=state.progress.epoch, step=state.progress.step, stop_reason=self.stop_reason
        )

    @property
    def step(self) -> int:
        """Finished training steps."""
        if any(stream.reading_ahead for stream in self._core.streams.values()):
            warn_of_source("step")
        return self._state.progress.step

    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the last one; 0 before the first."""
        return self._state.progress.epoch

    @property
    @entry_point
    def hyperparams(self) -> StateView:
        """The values of the injected hyperparameters, as a mapping whose entries are also attributes.

        `learner.hyperparams["learning_rate"] = 1e-4` sets one between two calls of `fit`, without a recompilation. It
        is an error if a `Scheduler` sets this hyperparameter. A callback that sets it only sometimes, such as
        `ReduceLROnPlateau`, replaces the value then.
        """
        state = self._state
        self._core.refuse_ahead("hyperparams")
        opt_state = state.train.live(("opt_state",))
        values = {name: float(state.train.hyperparams.get(opt_state, name)) for name in state.train.hyperparams.names}
        return StateView("hyperparams", values, self._set_hyperparam)

    @entry_point
    def _set_hyperparam(self, name: str, value: Any) -> float:
        self._core.refuse_while_running(f"hyperparams.{name} = ...")
        refuse_scheduled(self._core.graph, name)
        return set_hyperparam(self._state, name, value)
