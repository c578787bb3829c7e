"""Values that are fetched with a window: every dtype and size, every kind of batch, and limited memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Write, on
from fluxcb.events import ComputeEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import testlearner

DTYPES = [
    ["bool", "int8", "uint8", "bfloat16", "float16"],
    ["int32", "uint32", "float32", "complex64", "int16"],
    ["uint16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"],
]


def shapes(dtype):
    """Return shapes. The last two are the largest one that is packed into the row of a step, and a larger one."""
    most = 256 // np.dtype(dtype).itemsize
    return {"scalar": (), "some": (3, 2), "none": (0, 3), "most": (most,), "beside": (most + 1,)}


def pattern(number, shape, dtype):
    """Return values that depend on the number of the step (int or int32[])."""
    xp = np if isinstance(number, int) else jnp
    whole = (xp.arange(int(np.prod(shape)), dtype=np.int32) * 7 + number * 5) % 13 - (0 if "u" in dtype else 6)
    if dtype == "bool":
        return (whole % 3 == 0).reshape(shape)
    if dtype == "complex64":
        return (whole.astype(np.float32) + np.complex64(1j) * (whole % 5).astype(np.float32)).reshape(shape)
    limit = {"int4": 7, "uint4": 15}.get(dtype)
    whole = whole % (limit + 1) if limit else whole
    return whole.astype(np.float32).astype(jnp.dtype(dtype)).reshape(shape)


def odd_bits(number, dtype):
    """Return NaNs with payloads, negative zeros, subnormals and infinities as a float dtype."""
    size = jnp.dtype(dtype).itemsize
    one = {2: np.uint16, 4: np.uint32}[size]
    bits = {"float16": [0x7E01, 0xFE77, 0x8000, 0x0001, 0x7C00], "bfloat16": [0x7FC1, 0xFFE7, 0x8000, 0x0001, 0x7F80]}
    words = bits.get(dtype, [0x7FC00001, 0xFFE01234, 0x80000000, 0x00000001, 0x7F800000])
    if isinstance(number, int):
        return np.roll(np.array(words, one), number).view(jnp.dtype(dtype))
    return jax.lax.bitcast_convert_type(jnp.roll(jnp.array(words, one), number), jnp.dtype(dtype))


class Writes(Callback):
    """Compute step values from the number of the step."""

    def __init__(self, **made):
        self.made = made

    def stateaccess(self):
        return {"step": {name: Write() for name in self.made}}

    @on
    def write(self, event: ComputeEnd, phase: TrainingPhase, learner):
        for name, make in self.made.items():
            setattr(learner.step, name, make(learner.progress.step))


def assert_fetched(made, same, tell, keep, bits, steps=19):
    def run(length):
        kept = keep(*(f"step.{name}" for name in made), phase=AbstractTrainingPhase)
        learner = testlearner(Writes(**made), kept, batches=steps, validation_batches=0, steps_per_call=length)
        learner.fit(1)
        for step in range(steps):
            expected = {name: bits(make(step)) for name, make in made.items()}
            assert dict(zip(made, kept.seen[step][5:], strict=True)) == expected
        return tell(learner, kept)

    same(run, (2, 50))  # where a value lies does not depend on the length


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(dtypes))
def test_values_of_every_dtype_and_size(dtypes, same, tell, keep, bits):
    made = {
        f"{dtype}_{name}": lambda n, shape=shape, dtype=dtype: pattern(n, shape, dtype)
        for dtype in dtypes
        for name, shape in shapes(dtype).items()
    }
    assert_fetched(made, same, tell, keep, bits)


def test_all_float_bits_are_preserved(same, tell, keep, bits):
    made = {dtype: lambda n, dtype=dtype: odd_bits(n, dtype) for dtype in ("float16", "bfloat16", "float32")}
    assert_fetched(made, same, tell, keep, bits)


def test_values_of_64_bits(same, tell, keep, bits):
    made = {
        f"{dtype}_{name}": lambda n, dtype=dtype, shape=shape: pattern(n, shape, "float32").astype(dtype) + 2.0**-40
        for dtype in ("float64", "complex128")
        for name, shape in shapes(dtype).items()
    }
    made["int64"] = lambda n: (n + np.arange(3)).astype("int64") * 2**40 + 1
    with jax.enable_x64(True):
        assert_fetched(made, same, tell, keep, bits)


def test_nested_values_of_mixed_sizes(same, tell, keep, bits):
    def nested(n):
        return {
            "small": pattern(n, (3,), "float32"),
            "deep": {
                "large": pattern(n, (90,), "float32"),
                "flags": (pattern(n, (2,), "bool"), pattern(n, (), "int8")),
            },
            "list": [pattern(n, (70,), "bfloat16"), pattern(n, (200,), "bfloat16")],
        }

    assert_fetched({"nested": nested, "alone": lambda n: pattern(n, (), "int32")}, same, tell, keep, bits)


@pytest.mark.parametrize("path", ["step.nested.a", "step.nested.b.c", "step.nested.b"])
def test_part_of_nested_value(path, same, tell, keep, bits):
    def nested(n):
        return {"a": pattern(n, (), "int32"), "b": {"c": pattern(n, (80,), "float32"), "d": pattern(n, (2,), "int8")}}

    def run(length):
        part, whole = keep(path), keep("step.nested", phase=AbstractTrainingPhase)
        part = keep(path, phase=AbstractTrainingPhase)
        callbacks = [part, whole] if path != "step.nested.b" else [part]
        learner = testlearner(Writes(nested=nested), *callbacks, batches=9, validation_batches=0, steps_per_call=length)
        learner.fit(1)
        for step in range(9):
            expected = nested(step)
            for name in path.split(".")[2:]:
                expected = expected[name]
            assert part.seen[step][5] == bits(expected)
        return tell(learner, *callbacks)

    same(run, (2, 50))


# -- little memory -----------------------------------------------------------------------------------------------------

BATCH_BYTES = 2 * 8 * 4


@pytest.mark.parametrize("room", [0, 1, 2, 3, 20])
def test_window_bytes_shorten_windows(room, same, tell, keep, windows):
    """Batches and fetched values of `room` steps fit. The engine needs two words per step."""
    each = BATCH_BYTES + 4 * (2 + 1)

    def run(length):
        kept = keep("step.loss", phase=AbstractTrainingPhase)
        learner = testlearner(
            kept, batches=30, validation_batches=0, steps_per_call=length, window_bytes=max(1, room * each + each - 1)
        )
        learner.fit(2)
        assert len(kept.seen) == 60
        if length != 1:
            most = min(room, 128 if length == "auto" else length)
            assert max(steps for _, steps in windows) == max(1, most)
        return tell(learner, kept)

    same(run, windows_used=room > 1)


# -- batches -----------------------------------------------------------------------------------------------------------


def drawn(count):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(4, 3)), rng.integers(-9, 9, (4, 3)), float(rng.normal())) for _ in range(count)]


BATCHES = {
    "dicts": lambda f, i, x: {"b": f.astype(np.float32), "a": i.astype(np.int32)},
    "float64 and int64": lambda f, i, x: {"f": f, "i": i + 2**31},
    "jax arrays": lambda f, i, x: (jnp.asarray(f, jnp.float32), jnp.asarray(i, jnp.int32)),
    "jax beside numpy": lambda f, i, x: (jnp.asarray(f, jnp.float32), i.astype(np.int8)),
    "numbers": lambda f, i, x: {"f": f.astype(np.float32), "x": x, "n": int(i[0, 0]), "flag": bool(i[0, 0] > 0)},
    "numpy scalars": lambda f, i, x: {"f": f.astype(np.float32), "x": np.float64(x), "n": np.int64(i[0, 0])},
    "arrays without axes": lambda f, i, x: {"f": f.astype(np.float32), "x": np.array(x), "n": jnp.int32(int(i[0, 0]))},
    "bfloat16": lambda f, i, x: [f.astype(jnp.bfloat16), jnp.asarray(i, jnp.bfloat16), f.astype(np.float16)],
    "small ints and bools": lambda f, i, x: (i > 0, i.astype(np.uint8), f.astype(np.float32)),
    "one array": lambda f, i, x: f.astype(np.float32),
    "nothing beside": lambda f, i, x: {"f": f.astype(np.float32), "none": None, "empty": np.zeros((4, 0), np.float32)},
    "not contiguous": lambda f, i, x: (f.astype(np.float32).T, f[::-1], np.broadcast_to(np.float32(x), (4, 3))),
    "keys": lambda f, i, x: {"f": f.astype(np.float32), "key": jax.random.key(int(i[0, 0]) + 9)},
    "read-only": lambda f, i, x: np.frombuffer(f.astype(np.float32).tobytes(), np.float32),
}


def total(params, batch, key):
    """Return a loss that depends on every leaf."""
    values = []
    for leaf in jax.tree.leaves(batch):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.uniform(leaf, (3,))
        values.append(jnp.tanh(jnp.sum(leaf.astype(jnp.float32) * 0.1)))
    return jnp.sum(jnp.stack(values) * params["w"][: len(values)] ** 2)


@pytest.mark.filterwarnings("ignore:Integers in `data.training` do not fit")  # the conversion itself is tested
@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_kind(kind, same, tell, keep):
    def run(length):
        kept = keep("step.loss", *([] if kind == "keys" else ["step.batch"]), phase=AbstractTrainingPhase)
        learner = fluxcb.Learner.from_loss(
            {"w": jnp.arange(1.0, 6.0)},
            total,
            optax.sgd(0.1),
            data=[BATCHES[kind](*values) for values in drawn(17)],
            callbacks=[kept],
            default_callbacks=False,
            steps_per_call=length,
        )
        learner.fit(2)
        assert len({entry[5] for entry in kept.seen}) == 34  # each batch has its own loss
        return tell(learner, kept)

    same(run, (2, "auto"))
