"""callbacks_as_hook with `state=` and `set_state=`: callbacks read, save, restore and change the state of a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CheckpointError,
    DeclarationError,
    Read,
    RewindFitting,
    Write,
    callbacks_as_hook,
    on,
)
from fluxcb.callbacks import (
    Checkpointer,
    ClipGradients,
    CustomCallback,
    HyperParamSetterWithFunc,
    LearningRate,
    LossSpikeGuard,
    Metrics,
    MinSaver,
    ParameterEMA,
    Profiler,
    Scheduler,
    StopOnNaNLoss,
)
from fluxcb.checkpoints import ResumeWarning, load_params
from fluxcb.events import EpochEnd, ForwardBegin, StepBegin, StepEnd, UpdateEnd
from fluxcb.phases import TrainingPhase

RATE = 0.25  # halves the distance to the target of (w - target)**2
OPTIMIZER = fluxcb.inject(optax.sgd, learning_rate=RATE)


def plain_step(params, opt_state, target):
    loss, grads = jax.value_and_grad(lambda params: (params["w"] - target) ** 2)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


sgd_step: Any = jax.jit(plain_step)


class Loop:
    """A hand-written loop that moves `w` from 8 towards zero."""

    def __init__(self, callbacks, *, resume=False, step=sgd_step, put=True, key=0):
        self.params, self.step = {"w": jnp.float32(8)}, step
        self.opt_state = OPTIMIZER.init(self.params)
        self.puts = 0
        access = {"state": lambda: (self.params, self.opt_state), "set_state": self.put if put else None}
        self.hook = callbacks_as_hook(callbacks, {"loss": 0.0}, resume=resume, key=key, **access)

    def put(self, state):
        self.params, self.opt_state = state
        self.puts += 1

    def train(self, epochs, targets=(0.0, 0.0), *, kill=None):
        """Train, and raise KeyboardInterrupt after the step with this number."""
        hook = self.hook
        with hook:
            while hook.epoch < epochs:
                for target in targets[hook.step_in_epoch :]:
                    hook.before_step()
                    self.params, self.opt_state, loss = self.step(self.params, self.opt_state, target)
                    hook.after_step(hook.step + 1, {"loss": loss})
                    if hook.step == kill:
                        raise KeyboardInterrupt
                hook.after_epoch()
        return self

    @property
    def w(self):
        return float(self.params["w"])


@pytest.mark.parametrize("kill", [2, 4, 5])
def test_killed_loop_resumes_bit_for_bit(tmp_path, kill):
    targets = (0.0, 1.0, 0.3)

    def loop(folder, *, resume):
        schedule = Scheduler({LearningRate: lambda step: 0.3 / (1 + step)})
        average = ParameterEMA(0.9, validate=False)
        return Loop([Checkpointer(tmp_path / folder, steps=2), Metrics(), schedule, average], resume=resume)

    whole = loop("whole", resume=False).train(3, targets)
    with pytest.raises(KeyboardInterrupt):
        loop("killed", resume=False).train(3, targets, kill=kill)
    again = loop("killed", resume=True).train(3, targets)
    assert again.hook.step == whole.hook.step == 9
    np.testing.assert_array_equal(again.params["w"], whole.params["w"])
    for name, entry in whole.hook.cbstate.items():
        if name in ("ema", "metrics_epoch"):
            assert str(again.hook.cbstate[name]) == str(entry)


def test_another_key_is_reported_without_an_argument_that_hooks_lack(tmp_path):
    Loop([Checkpointer(tmp_path, steps=1)]).train(1)
    with pytest.warns(ResumeWarning) as caught:
        Loop([Checkpointer(tmp_path, steps=1)], resume=True, key=1).train(2)
    (text,) = [str(warning.message) for warning in caught]
    assert text.endswith("differences:\n  path  saved  program  used\n  key   0      1        saved")


def test_resumed_hook_knows_position(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Loop([Checkpointer(tmp_path, steps=3)]).train(4, kill=3)
    loop = Loop([Checkpointer(tmp_path, steps=3)])
    hook = loop.hook
    assert (hook.step, hook.epoch, hook.step_in_epoch, loop.w) == (0, 0, 0, 8.0)
    assert hook.resume()
    assert (hook.step, hook.epoch, hook.step_in_epoch, loop.w) == (3, 1, 1, 1.0)
    assert loop.puts == 1


def test_run_starts_without_checkpoint(tmp_path):
    loop = Loop([Checkpointer(tmp_path)])
    assert not loop.hook.resume()
    assert loop.puts == 0


def test_checkpoint_of_loop_contains_parameters(tmp_path):
    Loop([Checkpointer(tmp_path / "all"), Metrics(), MinSaver(tmp_path, "training/loss", name="best")]).train(2)
    assert fluxcb.checkpoints.load_params(tmp_path / "all")["w"] == 0.5
    assert fluxcb.checkpoints.load_params(tmp_path / "best")["w"] == 0.5


def test_average_of_loop_parameters():
    average = Loop([ParameterEMA(0.5, validate=False)]).train(1).hook.cbstate["ema"]["params"]["w"]
    assert float(average) == ((8 + 4) / 2 + 2) / 2


def test_schedule_sets_rate_of_each_step():
    rates = []
    schedule = Scheduler({LearningRate: lambda step: 0.5 / (1 + step)})

    def step(params, opt_state, target):
        rates.append(float(opt_state.hyperparams["learning_rate"]))
        return sgd_step(params, opt_state, target)

    loop = Loop([schedule], step=step).train(2)
    assert rates == [0.5, 0.25, float(np.float32(0.5) / np.float32(3)), 0.125]
    assert loop.puts == 4


def test_setter_changes_rate_between_epochs():
    setter = HyperParamSetterWithFunc("learning_rate", lambda epoch, value: 0.0 if epoch else value)
    loop = Loop([setter]).train(2)
    assert loop.w == 2.0  # the second epoch changes nothing
    assert loop.puts >= 1


def test_nan_ends_loop_with_previous_state():
    loop = Loop([StopOnNaNLoss(), Metrics()])
    with pytest.warns(RuntimeWarning, match="the loss was nan at step 3"):
        loop.train(9, (0.0, 0.0, np.nan))
    assert loop.hook.stop_reason == "the loss was nan at step 3"
    assert loop.w == 2.0
    assert loop.hook.step == 3


@pytest.mark.parametrize("average", [False, True])
def test_nan_restores_state_changed_in_place(average):
    params = {"w": jnp.float32(8)}
    state = {"params": params, "opt_state": OPTIMIZER.init(params)}
    callbacks = [StopOnNaNLoss(), *([ParameterEMA(0.5, validate=False)] if average else [])]
    hook = callbacks_as_hook(callbacks, {"loss": 0.0}, state=lambda: state, set_state=state.update)

    def train():
        with hook:
            for number, target in enumerate((0.0, np.nan), start=1):
                params, opt_state, loss = sgd_step(**state, target=target)
                state.update(params=params, opt_state=opt_state)
                hook.after_step(number, {"loss": loss})

    with pytest.warns(RuntimeWarning, match="the loss was nan at step 2"):
        train()
    assert float(state["params"]["w"]) == 4.0
    if average:
        assert float(hook.cbstate["ema"]["params"]["w"]) == (8 + 4) / 2


def test_set_state_that_changes_nothing_raises(refused):
    class Forgetful(Loop):
        def put(self, state):
            params, opt_state = state  # local variables
            self.puts += len(params) - len(opt_state)

    loop = Forgetful([Scheduler({LearningRate: lambda step: 0.0})])
    with refused(
        DeclarationError,
        "`set_state` was called, and `state` still returns the previous arrays.\n"
        "  why:   the loop continues with its previous state, so a restored checkpoint, for example, has no effect\n"
        "  fix:   if `set_state` assigns variables of the function around it, begin it with a line such as "
        "`nonlocal params, opt_state`\n"
        "     or: if it assigns variables of a module, begin it with `global params, opt_state`",
    ):
        loop.train(1)


@pytest.mark.parametrize("ends_epochs", [True, False])
def test_state_from_before_the_training_is_a_warning(tmp_path, ends_epochs):
    params = {"w": jnp.float32(8)}
    opt_state = OPTIMIZER.init(params)
    kept = {"params": params, "opt_state": opt_state}

    def train(state, set_state, folder):
        nonlocal params, opt_state
        with callbacks_as_hook([Checkpointer(folder)], {"loss": 0.0}, state=state, set_state=set_state) as hook:
            for _ in range(3):
                params, opt_state, loss = sgd_step(params, opt_state, 0.0)
                hook.after_step(hook.step + 1, {"loss": loss})
            if ends_epochs:
                hook.after_epoch()

    text = "`state` of `callbacks_as_hook` still returns the parameters from before the training, after 3 steps. "
    with pytest.warns(UserWarning, match="parameters from before") as record:
        train(lambda: kept, kept.update, tmp_path / "stale")
    assert [str(warning.message).startswith(text) for warning in record] == [True]
    assert load_params(tmp_path / "stale")["w"] == 8

    def put(state):
        nonlocal params, opt_state
        params, opt_state = state

    train(lambda: (params, opt_state), put, tmp_path / "current")  # what the warning suggests
    assert load_params(tmp_path / "current")["w"] == params["w"] == 8 / 2**6


def test_numpy_parameters_that_change_in_place_are_no_warning():
    params = {"w": np.ones(2)}
    with callbacks_as_hook([], {"loss": 0.0}, state=lambda: params) as hook:
        for _ in range(3):
            params["w"] *= 0.5
            hook.after_step(hook.step + 1, {"loss": 0.0})


def test_donating_loop_cannot_restore_state(refused):
    donating = jax.jit(plain_step, donate_argnums=(0, 1))
    loop = Loop([StopOnNaNLoss()], step=donating)
    loop.hook.before_training()
    loop.params, loop.opt_state, loss = donating(loop.params, loop.opt_state, 0.0)
    with refused(
        DeclarationError,
        "A callback can skip the update of a step, but the loop has donated the state before the update.\n"
        "  why:   the hook returns the previous state to the loop when `step.skip` is true\n"
        "  fix:   compile the step without `donate_argnums` and `donate_argnames`, or leave the callback out",
    ):
        loop.hook.after_step(1, {"loss": loss})


def test_update_of_loss_spike_is_undone():
    loop = Loop([LossSpikeGuard(window=4)])
    before = loop.w
    with loop.hook as hook:
        for number in range(1, 8):
            before = loop.w
            loop.params, loop.opt_state, _ = sgd_step(loop.params, loop.opt_state, 0.0)
            hook.after_step(number, {"loss": 1e6 if number == 7 else 1.0 + number % 2})
    assert loop.w == before == 8 / 2**6


class GoesBack(Callback):
    """Rewind to a checkpoint once, at a given step."""

    def __init__(self, step):
        self.step, self.done = step, False

    def stateaccess(self):
        return {"control": Append()}

    @on
    def go_back(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == self.step and not self.done:
            self.done = True
            raise RewindFitting("enough", self.step, 1)


@pytest.mark.filterwarnings("ignore:The run goes back")
def test_loop_rewinds_to_checkpoint(tmp_path):
    loop = Loop([Checkpointer(tmp_path, steps=2), GoesBack(3)])
    seen = []
    with loop.hook as hook:
        while hook.step < 4:
            loop.params, loop.opt_state, loss = sgd_step(loop.params, loop.opt_state, 0.0)
            try:
                hook.after_step(hook.step + 1, {"loss": loss})
            except RewindFitting as asked:
                seen.append((str(asked), hook.step, loop.w))
    assert seen == [("enough", 2, 2.0)]
    assert loop.w == 0.5
    assert hook.stop_reason is None


def test_rewind_without_checkpoint_ends_training():
    loop = Loop([GoesBack(3)]).train(9)
    assert loop.hook.step == 3
    assert loop.hook.stop_reason == "enough (there is not exactly one Checkpointer to go back with)"


def test_host_handlers_read_and_replace_state():
    seen = []

    def look(learner):
        seen.append(float(learner.params["w"]))
        learner.params = {"w": 16.0}

    loop = Loop([CustomCallback(look, EpochEnd, phase=TrainingPhase, access={"params": Write()})]).train(2)
    assert seen == [2.0, 4.0]
    assert loop.w == 16.0
    assert loop.puts == 2


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"params": 1.0, "opt_state": 2.0, "model_state": 3.0}, (1.0, 2.0, 3.0)),
        ((1.0, 2.0, 3.0), (1.0, 2.0, {"2": 3.0})),
        ({"params": 1.0, "target": 2.0}, (1.0, {}, {"target": 2.0})),
        ({"w": 1.0}, ({"w": 1.0}, {}, {})),
    ],
)
def test_params_and_opt_state_are_found_in_pytree(tree, paths):
    seen, held = [], [tree]

    def look(learner):
        seen.append(jax.tree.map(float, (learner.params, learner.opt_state, learner.model_state)))
        learner.params = jax.tree.map(lambda x: x + 1, learner.params)

    access = {"params": Write(), "opt_state": Read(), "model_state": Read()}
    callback = CustomCallback(look, StepEnd, phase=TrainingPhase, access=access)
    put = lambda new: held.__setitem__(0, new)  # noqa: E731
    with callbacks_as_hook([callback], {}, state=lambda: held[0], set_state=put) as hook:
        hook.after_step(1, {})
    assert seen == [paths]
    assert jax.tree.structure(held[0]) == jax.tree.structure(tree)
    assert sum(map(float, jax.tree.leaves(held[0]))) == sum(map(float, jax.tree.leaves(tree))) + 1


def test_profile_of_some_steps(tmp_path):
    Loop([Profiler(tmp_path, steps=(2, 3))]).train(2)
    assert list(tmp_path.rglob("*.xplane.pb"))


# --- cost -------------------------------------------------------------------------------------------------------------


def test_hook_without_callbacks_runs_no_program():
    loop = Loop([]).train(2)
    assert loop.hook._learner.compile_counts["compiles"] == 0
    assert loop.puts == 0


def test_unread_values_are_not_fetched():
    loop = Loop([Metrics(), ParameterEMA(0.9, validate=False), CustomCallback(lambda learner: None, StepEnd)])
    with loop.hook as hook:
        reads = hook._core.state.meter.reads
        for number in range(1, 6):
            loop.params, loop.opt_state, loss = sgd_step(loop.params, loop.opt_state, 0.0)
            hook.after_step(number, {"loss": loss})
        assert hook._core.state.meter.reads == reads


# --- what cannot be supported -----------------------------------------------------------------------------------------


def refusal(callbacks, **access: Any):
    with pytest.raises(DeclarationError) as caught:
        callbacks_as_hook(callbacks, {"loss": 0.0}, **access)
    lines = str(caught.value).splitlines()
    return [line for line in lines if not line.startswith("  where:")]


STATE: dict[str, Any] = {"state": lambda: {"params": {"w": jnp.zeros(())}}}
BOTH = {**STATE, "set_state": lambda new: None}
INSTEAD = "  fix:   train with a `Learner`, or implement this callback in the loop"


def test_writing_requires_set_state():
    assert refusal([CustomCallback(print, StepEnd, access={"params": Write()})], **STATE) == [
        "CustomCallback(print, StepEnd) writes `params`, and `callbacks_as_hook` has no `set_state`.",
        "  why:   the train state belongs to the loop, which has to receive the new one",
        "  fix:   write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`",
    ]
    callbacks_as_hook([CustomCallback(print, StepEnd, access={"params": Write()})], {"loss": 0.0}, **BOTH)


class Inside(Callback):
    @on
    def inside(self, event: ForwardBegin, phase: TrainingPhase, learner): ...

    def stateaccess(self):
        return {"params": Read()}


class Rewrites(Callback):
    @on
    def rewrite(self, event: UpdateEnd, phase: TrainingPhase, learner): ...

    def stateaccess(self):
        return {"params": Write()}


def test_callback_inside_step_raises():
    assert refusal([Inside()], **BOTH) == [
        "Inside() has a handler of ForwardBegin, which a hand-written loop does not emit.",
        "  why:   the loop reports a step after it has finished; it emits StepBegin and StepEnd and, "
        "traced, BackwardEnd, "
        "UpdateEnd and ComputeEnd; at ForwardBegin, handlers can only set hyperparameters",
        INSTEAD,
    ]
    assert refusal([Rewrites()], **BOTH) == [
        "Rewrites() writes `params` in a traced handler, but the loop's step is not traced.",
        "  why:   traced handlers can read the state after the loop's step, but cannot replace it",
        "  fix:   write it in a host handler, for example of StepEnd, or train with a `Learner`",
    ]
    with pytest.raises(fluxcb.FluxcbError, match="grads"):
        callbacks_as_hook([ClipGradients(1.0)], {"loss": 0.0}, **BOTH)


def test_callback_before_step_requires_before_step(refused):
    class Begins(Callback):
        @on
        def begin(self, event: StepBegin, phase: TrainingPhase, learner): ...

    hook = callbacks_as_hook([Begins()], {"loss": 0.0}, **STATE)
    hook.before_training()
    with refused(
        DeclarationError,
        "Begins() acts before each step, and the loop has not called `hook.before_step()`.\n"
        "  why:   the loop reports a step only after it has finished\n"
        "  fix:   call `hook.before_step()` before the loop's step function",
    ):
        hook.after_step(1, {"loss": 0.0})
    hook.before_step()
    hook.after_step(1, {"loss": 0.0})


def test_invalid_state_functions_raise():
    tree = {"params": {"w": jnp.zeros(())}}
    assert refusal([], state=tree) == [
        "`state` of `callbacks_as_hook` must be a function, not dict.",
        "  why:   the loop replaces its state at each step, so the hook has to get the current one",
        "  fix:   write e.g. `state=lambda: (params, opt_state)`",
    ]
    assert refusal([], set_state=print) == [
        "`callbacks_as_hook` was given `set_state` without `state`.",
        "  fix:   pass both: `callbacks_as_hook(callbacks, values, state=get, set_state=put)`",
    ]
    assert refusal([], resume=True, **STATE) == [
        "`resume=True` of `callbacks_as_hook` needs `state` and `set_state`.",
        "  why:   a checkpoint holds the train state, which belongs to the loop",
        "  fix:   write `callbacks_as_hook(callbacks, values, state=get, set_state=put, resume=True)`",
    ]


def test_resume_requires_set_state(refused):
    hook = callbacks_as_hook([], {"loss": 0.0}, **STATE)
    with refused(
        DeclarationError,
        "`hook.resume()` needs a `set_state` function, and the hook has none.\n"
        "  why:   a checkpoint holds the train state, which belongs to the loop\n"
        "  fix:   write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`",
    ):
        hook.resume()


def test_resume_requires_one_checkpointer(tmp_path, refused):
    text = "A hook resumes the run of a Checkpointer, and the callbacks of this hook contain "
    with refused(CheckpointError, f'{text}none.\n  fix:   add `Checkpointer("runs/1")` to the callbacks'):
        Loop([], resume=True).train(1)
    two = [Checkpointer(tmp_path / "a"), Checkpointer(tmp_path / "b")]
    with refused(CheckpointError, f"{text}2.\n  fix:   keep one Checkpointer in the callbacks"):
        Loop(two, resume=True).train(1)
    assert Loop(two[:1], resume=True).train(1).hook.epoch == 1


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
def test_nan_guard_with_average():
    held = {"params": {"v": jnp.float32(1), "w": jnp.float32(8)}}
    average = ParameterEMA(0.5, validate=False)
    hook = callbacks_as_hook(
        [StopOnNaNLoss(), average],
        {"loss": 0.0},
        state=lambda: held["params"],
        set_state=lambda new: held.update(params=new),
    )
    with hook:
        for number, loss in enumerate((1.0, float("nan")), 1):
            held["params"] = {"v": held["params"]["v"] + 1, "w": held["params"]["w"] / 2}
            hook.after_step(number, {"loss": loss})
    assert hook.stop_reason == "the loss was nan at step 2"
    assert {name: float(value) for name, value in held["params"].items()} == {"v": 2.0, "w": 4.0}
    assert {name: float(value) for name, value in hook.cbstate["ema"]["params"].items()} == {"v": 1.5, "w": 6.0}
