"""With `exact_observers=True`, callbacks that only read leave the training the same, bit for bit (on CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb.callbacks as library
from fluxcb import Callback, DeclarationError, Learner, Read, inject, on
from fluxcb._declare.access import writes
from fluxcb._declare.declared import declare
from fluxcb._declare.state import ENGINE_STEP_NAMES, step_names
from fluxcb._run.train_state import TrainState
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from tests.contract.every_callback import HOW, SkipsSteps, found


def network():
    def init(key, xs):
        keys = jax.random.split(key, 3)
        sizes = (1, 16, 16, 1)
        weights = {f"w{n}": jax.random.normal(keys[n], sizes[n : n + 2]) / sizes[n] for n in range(3)}
        return weights | {f"b{n}": jnp.zeros(size) for n, size in enumerate(sizes[1:])} | {"w": jnp.ones(())}

    def apply(params, xs):
        for n in range(2):
            xs = jax.nn.gelu(xs @ params[f"w{n}"] + params[f"b{n}"])
        return params["w"] * (xs @ params["w2"] + params["b2"])

    return init, apply


def batches(seed):
    xs = np.random.default_rng(seed).normal(size=(6, 8, 1)).astype(np.float32)
    return list(zip(xs, np.sin(3 * xs), strict=True))


def train(*callbacks, exact=True):
    with jax.default_device(jax.devices("cpu")[0]):
        learner = Learner(
            network(),
            lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
            inject(optax.adamw, learning_rate=1e-2),
            data=(batches(0), batches(1)),
            callbacks=callbacks,
            default_callbacks=False,
            exact_observers=exact,
        )
        learner.fit(2)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((learner.params, learner.state["opt_state"]))]


def observes_step(callback):
    """Return whether a callback reads the step or the train state, and writes nothing but values of its own."""
    [declared], _ = declare([callback])
    accesses = [(path, permission) for path, permission, _ in declared.accesses()]
    written = {path for path, permission in accesses if writes(permission) and path[0] != "cbstate"}
    engine = {*step_names((TrainingPhase,)), *ENGINE_STEP_NAMES}
    only_reads = all(path[0] == "step" and path[1] not in engine for path in written)
    return only_reads and any(path[0] in ("*", "step", "params", "opt_state") for path, _ in accesses)


class ReadsGradients(Callback):
    def stateaccess(self):
        return {"step": {"grads": Read(), "updates": Read()}, "params": Read(), "opt_state": Read()}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        jax.tree.map(np.asarray, learner.step.grads)


@pytest.fixture(scope="module")
def alone():
    return train()


def test_host_handler_that_reads_everything_changes_no_bit(alone):
    assert train(ReadsGradients()) == alone


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_observers_of_the_library_change_no_bit(alone, part):
    changed, seen = [], []
    for name in found()[part::6]:
        how = HOW.get(name, {})
        make = how.get("make", getattr(library, name))
        # These write the parameters only while validation uses their average.
        averages = name in ("ParameterEMA", "StochasticWeightAveraging")
        if "learner" in how or not (averages or observes_step(make())):
            continue
        seen.append(name)
        needs = how.get("needs", ())
        without = train(SkipsSteps()) if SkipsSteps in needs else alone  # all other callbacks in `needs` only read
        if train(make(), *(need() for need in needs)) != without:
            changed.append(name)
    assert changed == []
    assert len(seen) > 3


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(TrainState, "platform", "gpu")
    with pytest.raises(DeclarationError) as raised:
        train()
    assert str(raised.value) == (
        "`exact_observers=True` needs the CPU, and this Learner trains on 'gpu'.\n"
        "  why:   on accelerators, XLA always fuses operations, and chooses them by all readers of a value\n"
        "  fix:   leave it out; `learner.callbacks.disable` switches callbacks off without changing bits"
    )
    train(exact=False)
