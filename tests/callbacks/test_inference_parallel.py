"""`DataParallelInferenceRunner` computes the same statistics as `InferenceRunner`, on eight devices."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from fluxcb import DeclarationError
from fluxcb.callbacks import DataParallelInferenceRunner, ScalarStats

pytestmark = pytest.mark.long

DATA = [0]

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from fluxcb import DataError, Learner, every, inject
from fluxcb.callbacks import (
    ClassificationError, DataParallelInferenceRunner, Inferencer, InferenceRunner, Metrics, ParameterEMA, ScalarStats,
    ToDevice,
)

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **kwargs: compiled.append(kwargs) if name.endswith("backend_compile_duration") else None
)
rng = np.random.default_rng(0)


def batches(*sizes):
    made = []
    for size in sizes:
        ys = rng.integers(0, 3, size).astype(np.int32)
        made.append(((rng.normal(size=(size, 3)) + 2 * np.eye(3)[ys]).astype(np.float32), ys))
    return made


class Order(Inferencer):
    def fetches(self):
        return ("ys",)

    def before(self):
        self.ys = []

    def on_fetches(self, values, samples):
        self.ys += values["ys"].tolist()


def learner(*callbacks):
    return Learner(
        (lambda key, xs: {"w": jnp.zeros((3, 3))}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
        inject(optax.adam, learning_rate=0.01), data=TRAINING, callbacks=callbacks, default_callbacks=False,
    )


def statistics():
    return [ScalarStats("loss"), ClassificationError(), order]


def statistics_of(result, name):
    return result.cbstate["inference"][name].values


TRAINING, DATA, RAGGED = batches(8, 8), batches(16, 16, 16, 5), batches(5)
order = Order()
found = {"devices": len(jax.devices())}
both = learner(
    InferenceRunner(DATA, statistics(), name="one"),
    DataParallelInferenceRunner(DATA, statistics(), name="eight"),
    DataParallelInferenceRunner(DATA, statistics(), jax.devices()[2:6], name="four"),
    DataParallelInferenceRunner(RAGGED, statistics(), name="ragged"),
    InferenceRunner(RAGGED, statistics(), name="ragged alone"),
)
both.fit(3)
for name in ("one", "eight", "four", "ragged", "ragged alone"):
    found[name] = statistics_of(both, name)
alone = learner()
alone.fit(3)
found["same"] = bool(all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), both.state, alone.state))))

order.ys = []
sharded = learner(
    ToDevice(NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec())),
    Metrics(), ParameterEMA(0.5, validate=False),
    DataParallelInferenceRunner(DATA, statistics(), name="eight"),
    DataParallelInferenceRunner(DATA, statistics(), name="ema", average="ema"),
)
sharded.fit(1)
found["order"] = order.ys == [int(y) for _, ys in DATA for y in ys]
found["from two"] = statistics_of(sharded, "eight")
ema = sharded.cbstate["ema"]["params"]["w"]
logits = np.concatenate([xs for xs, _ in DATA]).astype(np.float64) @ np.asarray(ema, np.float64)
wrong = (logits.argmax(1) != np.concatenate([ys for _, ys in DATA])).mean()
found["ema"] = [statistics_of(sharded, "ema")["error"], [float(wrong)]]

counting = learner(every(DataParallelInferenceRunner(DATA, ScalarStats("loss")), epochs=2))
counting.fit(1)
before = len(compiled)
counting.fit(1)
found["programs"] = len(compiled) - before
before = len(compiled)
counting.fit(4)
found["programs later"] = len(compiled) - before
try:
    learner(DataParallelInferenceRunner(batches(16, 12, 16), ScalarStats("loss"))).fit(1)
except DataError as error:
    found["message"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "alone"), [("eight", "one"), ("four", "one"), ("from two", "one"), ("ragged", "ragged alone")]
)
def test_the_statistics_match_those_of_one_device(found, name, alone):
    assert found["devices"] == 8
    epochs = len(found[name]["loss"])
    assert found[name]["error"] == found[alone]["error"][:epochs]  # counted
    assert found[name]["loss"] == pytest.approx(found[alone]["loss"][:epochs], rel=1e-5)  # sums in another order


def test_training_stays_on_its_device_to_the_last_bit(found):
    assert found["same"]


def test_inferencers_get_batches_in_the_order_of_the_data(found):
    assert found["order"]


def test_an_average_is_evaluated_on_all_devices(found):
    assert found["ema"][0] == found["ema"][1]


def test_full_and_smaller_batches_need_two_programs(found):
    assert found["programs"] == 2
    assert found["programs later"] == 0


def test_only_the_last_batch_can_be_uneven(found):
    assert found["message"] == (
        "A batch of the data of DataParallelInferenceRunner('inference') has 12 samples, which cannot be "
        "divided equally "
        "among 8 devices, and it is not the last batch.\n"
        "  why:   only the last batch is computed on a single device, because the other devices are idle meanwhile\n"
        "  fix:   make the batch size a multiple of 8\n"
        "     or: use `InferenceRunner`"
    )


@pytest.mark.parametrize("devices", [(), ("one", "one")])
def test_devices_must_be_different(devices):
    with pytest.raises(DeclarationError) as caught:
        DataParallelInferenceRunner(DATA, ScalarStats("loss"), devices)
    assert str(caught.value) == (
        f"`devices` of `DataParallelInferenceRunner` must be different devices, not {devices!r}.\n"
        "  fix:   write e.g. `jax.devices()[:4]`"
    )
