"""Programs on eight simulated devices, for the tests of declared shardings. Each prints one line of JSON."""

import contextlib
import gc
import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fluxcb
from fluxcb.callbacks import Metric, Metrics, ParameterEMA, Recorder, StochasticWeightAveraging, accuracy
from fluxcb.data import ArrayLoader
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

P = PartitionSpec
TX = optax.adam(1e-2)
RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(16, 256)).astype(np.float32), RNG.normal(size=(16, 8)).astype(np.float32))] * 6
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def init(key: Any, xs: Any) -> Any:
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (256, 1024)) * 0.05, "down": jax.random.normal(down, (1024, 8)) * 0.05}


def apply(params: Any, xs: Any) -> Any:
    return jnp.tanh(xs @ params["up"]) @ params["down"]


def loss_fn(outputs: Any, ys: Any) -> Any:
    return jnp.mean((outputs - ys) ** 2)


SPECS = {
    "dp": {"up": P(), "down": P()},
    "fsdp": {"up": P(None, "data"), "down": P("data")},
    "tp": {"up": P(None, "model"), "down": P("model")},
}


def mesh_of(kind: str) -> Any:
    return fluxcb.mesh(data=-1, model=2 if kind == "tp" else 1)


def sharding_of(kind: str) -> Any:
    if kind == "dp":
        return "replicated"
    return fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=0) if kind == "fsdp" else SPECS[kind])


def learner(kind: str | None, *callbacks: Any, **options: Any) -> fluxcb.Learner:
    if kind is not None:
        options = {"mesh": mesh_of(kind), "sharding": sharding_of(kind), **options}
    given = {"data": BATCHES, "default_callbacks": False, **options}
    return fluxcb.Learner((init, apply), loss_fn, TX, callbacks=list(callbacks), **given)


def live_bytes() -> int:
    gc.collect()
    arrays = (a for a in jax.live_arrays() if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key))
    first = jax.devices()[0]
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == first)


@contextlib.contextmanager
def new_programs() -> Iterator[list[Any]]:
    """Yield a list to which all programs are added that JAX compiles meanwhile. No public function returns them."""
    compiled, found = jax._src.compiler.compile_or_get_cached, []

    def compile_and_note(*arguments: Any, **options: Any) -> Any:
        found.append(compiled(*arguments, **options))
        return found[-1]

    jax._src.compiler.compile_or_get_cached = compile_and_note
    yield found
    jax._src.compiler.compile_or_get_cached = compiled


def collectives(text: str) -> dict[str, int]:
    return {name: len(re.findall(rf"= [^=\n]*\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}


def by_hand(kind: str) -> tuple[int, dict[str, int]]:
    """Return the bytes on the first device after some steps of a loop written by hand, and its collectives."""
    mesh = mesh_of(kind)
    at = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS[kind])
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    opt_at = (optax.ScaleByAdamState(whole, at, at), optax.EmptyState())
    params = jax.jit(lambda key: init(key, None), out_shardings=at)(jax.random.key(0))
    opt_state = jax.jit(TX.init, out_shardings=opt_at)(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(apply(p, batch[0]), batch[1]))(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(at, opt_at, whole))
    run = jitted.lower(params, opt_state, jax.device_put(BATCHES[0], split)).compile()
    for batch in BATCHES:
        params, opt_state, loss = run(params, opt_state, jax.device_put(batch, split))
    jax.block_until_ready(params)
    del batch, loss
    return live_bytes(), collectives(run.as_text())


def compare(kind: str) -> dict[str, Any]:
    start = live_bytes()
    hand_bytes, hand_collectives = by_hand(kind)
    one = learner(None, Recorder())
    losses_of_one = [float(one.run_step(TrainingPhase(), batch)["loss"]) for batch in BATCHES]
    del one
    found: dict[str, Any] = {"by hand": hand_bytes - start, "hand_collectives": hand_collectives}
    made = learner(kind)
    before = made.shardings()
    losses = [float(made.run_step(TrainingPhase(), batch)["loss"]) for batch in BATCHES]
    found["error"] = float(np.max(np.abs(np.array(losses) - losses_of_one) / np.array(losses_of_one)))
    made = learner(kind)
    made.fit(2)
    found["bytes"] = live_bytes() - start
    found["same"] = made.shardings() == before
    found["compiles"] = made.compile_counts
    params = sum(row.bytes_per_device for row in made.shardings().rows if row.path.startswith("params."))
    del made
    averaged = learner(kind, ParameterEMA(0.9, validate=False))
    averaged.fit(2)
    found["of ema"] = live_bytes() - start - found["bytes"] - 4  # its counter
    found["params"] = params
    # The loop by hand averages the loss over the devices. A Learner does so if something needs the loss.
    measured = learner(kind, Metrics())
    measured.fit(1)
    found["collectives"] = [collectives(p.call.as_text()) for p in measured._core.engine.programs.compiled]
    return found


def validating(kind: str) -> dict[str, Any]:
    """Train with averages that replace the parameters for validation, and write all parts of the state by hand."""
    made = learner(
        kind, ParameterEMA(0.9, validate=False), StochasticWeightAveraging(2), Metrics(), Recorder(),
        data=(BATCHES, BATCHES),
    )  # fmt: skip
    before = made.shardings()
    made.fit(3)
    after = made.shardings()
    compiles = dict(made.compile_counts)
    made.params = jax.tree.map(np.asarray, made.params)
    made.state = made.state
    assigned = made.shardings()
    made.fit(1)
    return {
        "same": [before == table for table in (after, assigned, made.shardings())],
        "compiles": [compiles, made.compile_counts],
    }


def ragged() -> dict[str, Any]:
    xs, ys = RNG.normal(size=(77, 256)).astype(np.float32), RNG.integers(0, 8, 77)

    def masked_loss(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        mask = getattr(batch, "mask", jnp.ones(len(batch[1])))
        return jnp.sum(losses * mask) / jnp.sum(mask), {"logits": logits, "ys": batch[1]}

    def of(**options: Any) -> dict[str, Any]:
        metric = Metric(lambda aux: accuracy(aux["logits"], aux["ys"]), name="accuracy", needs=("aux",))
        each = Metric(lambda aux: aux["logits"].max(-1).mean(), "top", ("aux",))
        data = [ArrayLoader(xs, ys, batch_size=16, seed=seed) for seed in (1, 2)]
        made = fluxcb.Learner(
            (init, apply), masked_loss, TX, data=tuple(data), callbacks=[Metrics(metric, each), Recorder()],
            default_callbacks=False, **options,
        )  # fmt: skip
        made.fit(3)
        values = made.cbstate["metrics_epoch"]
        found = {
            f"{phase}/{name}": [value for _, value in values[phase][name]]
            for phase in ("training", "validation")
            for name in ("loss", "accuracy", "top")
        }
        found["evaluate"] = list(made.evaluate((xs, ys)).values())[:2]
        return {"values": found, "step": made.step, "compiles": made.compile_counts["compiles"]}

    mesh = fluxcb.mesh()
    found = {name: of(mesh=mesh, sharding=fluxcb.Sharding(ragged=name)) for name in ("pad", "drop")}
    return {"one device": of(), **found}


class Unsized:
    """Batches of sizes that are not known before they are read."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Any:
        return ((np.ones((size, 256), np.float32), np.ones((size, 8), np.float32)) for size in self.sizes)


class Counts(fluxcb.Callback):
    """Records the expected and the finished steps of each training epoch."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    @fluxcb.on(EpochEnd, TrainingPhase)
    def count(self, event: Any, phase: Any, learner: Any) -> None:
        self.counts.append([learner.progress.steps_in_epoch, learner.progress.step_in_epoch])


def dropping() -> dict[str, Any]:
    """Train on data with batches that are dropped."""
    xs, ys = np.ones((77, 256), np.float32), np.ones((77, 8), np.float32)
    sources = {
        "loader": ArrayLoader(xs, ys, batch_size=16),
        "list": [(xs[:size], ys[:size]) for size in (16, 13, 16, 3)],
        "unsized": Unsized(16, 13, 16, 3),
    }
    found = {}
    for name, data in sources.items():
        counts, shown = Counts(), io.StringIO()
        bar = fluxcb.callbacks.ProgressBar(file=shown)
        learner("dp", counts, bar, data=data, sharding=fluxcb.Sharding(ragged="drop")).fit(2)
        found[name] = [counts.counts, re.findall(r"\d+/\d+ steps", shown.getvalue())]
    return found


def centered(params: Any, xs: Any) -> Any:
    """A model that computes across the batch, so that an added example would change all outputs."""
    return apply(params, xs - xs.mean(0))


def inference() -> dict[str, Any]:
    """Compute predictions and metrics of batches of which one cannot be divided evenly."""
    return {kind: _inference(kind) for kind in ("dp", "tp")}


def _inference(kind: str) -> dict[str, Any]:
    """Return the errors of predictions and metrics, and the rows of the largest product on each device."""
    made = fluxcb.Learner(
        (init, centered), loss_fn, TX, data=BATCHES, default_callbacks=False,
        mesh=mesh_of(kind), sharding=sharding_of(kind),
    )  # fmt: skip
    made.fit(1)
    xs, ys = RNG.normal(size=(45, 256)).astype(np.float32), RNG.normal(size=(45, 8)).astype(np.float32)
    parts = [slice(0, 16), slice(16, 32), slice(32, 45)]
    up, down = (np.asarray(made.params[name], np.float64) for name in ("up", "down"))
    outputs = np.concatenate([np.tanh((xs[at] - xs[at].mean(0, np.float64)) @ up) @ down for at in parts])
    batches = [(xs[at], ys[at]) for at in parts]
    loss = float(np.mean((outputs - ys) ** 2))
    with new_programs() as programs:
        predicted = made.predict(batches)
        evaluated = made.evaluate(batches)
    texts = [module.to_string() for program in programs for module in program.hlo_modules()]
    rows = [
        [int(size) for size in re.findall(r"= f32\[(\d+),\d+\]\S* dot\(", text)] for text in texts if " dot(" in text
    ]
    arrays = made.predict(xs[:16], batch_size=13)[:13] - made.predict([xs[:13]])
    return {
        "outputs": float(np.abs(predicted - outputs).max()),
        "loss": abs(evaluated["loss"] - loss) / loss,
        "rows": rows,
        "arrays": float(np.abs(arrays).max()),
    }


def meshes() -> dict[str, Any]:
    """Train on meshes of `jax.make_mesh`, whose axes are explicit by default, also inside `jax.set_mesh`."""
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    made = learner("dp", mesh=explicit)
    made.fit(1)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        inside = learner("dp", mesh=explicit)
        inside.fit(1)

    def constrained(params: Any, xs: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(xs @ params["up"]), P("data", "model"))
        return hidden @ params["down"]

    names = fluxcb.Learner(
        (init, constrained), loss_fn, TX, data=BATCHES, default_callbacks=False, mesh=mesh_of("tp"),
        sharding=sharding_of("tp"),
    )  # fmt: skip
    names.fit(1)
    whole, split = NamedSharding(explicit, P()), NamedSharding(explicit, P("data"))
    moved = learner(None, fluxcb.callbacks.ToDevice(whole, batches=split))
    moved.fit(1)
    learners = (made, inside, names, moved)
    loss = [float(trained.run_step(TrainingPhase(), BATCHES[0])["loss"]) for trained in learners]
    return {"devices": len(made.params["up"].devices()), "loss": loss}


def annotated() -> dict[str, Any]:
    """Train Flax modules that annotate their parameters."""
    from flax import linen, nnx

    mesh = mesh_of("tp")
    initializer = nnx.initializers.lecun_normal()
    with jax.set_mesh(mesh):
        module = nnx.Linear(
            256, 8, rngs=nnx.Rngs(0), kernel_init=nnx.with_partitioning(initializer, ("model", None))
        )  # fmt: skip
    tables = {}
    partitioned = linen.with_partitioning(initializer, ("model", None))
    logical = linen.with_logical_partitioning(initializer, ("embed", "classes"))
    models = {
        "nnx": module,
        "linen": linen.Dense(8, kernel_init=partitioned),
        "logical": linen.Dense(8, kernel_init=logical),
    }
    with linen.logical_axis_rules((("embed", "model"), ("classes", None))):
        for name, model in models.items():
            made = fluxcb.Learner(model, loss_fn, TX, data=BATCHES, default_callbacks=False, mesh=mesh)
            made.fit(1)
            tables[name] = {row.path: row.spec for row in made.shardings().rows}
    return tables


def divided_before() -> dict[str, Any]:
    """Build Learners from models that are divided over the mesh already."""
    import equinox as eqx
    from flax import nnx

    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def divided(mesh: Any, array: Any) -> Any:
        spec = P(*("model" if size == 1024 else None for size in array.shape))
        return jax.device_put(array, NamedSharding(mesh, spec))

    mesh = fluxcb.mesh(data=2, model=4)
    module = nnx.Linear(256, 1024, rngs=nnx.Rngs(0))
    nnx.update(module, jax.tree.map(lambda array: divided(mesh, array), nnx.state(module)))
    arrays, static = eqx.partition(eqx.nn.Linear(256, 1024, key=jax.random.key(0)), eqx.is_array)
    linear = eqx.combine(jax.tree.map(lambda array: divided(explicit, array), arrays), static)
    data = [(BATCHES[0][0], np.ones((16, 1024), np.float32))] * 2
    options: dict[str, Any] = {"data": data, "default_callbacks": False}
    tables, largest = {}, {}
    builders = {
        "nnx": lambda **more: fluxcb.Learner(module, loss_fn, TX, mesh=mesh, **options, **more),
        "equinox": lambda **more: fluxcb.Learner(linear, loss_fn, TX, mesh=explicit, **options, **more),
        "replicated": lambda: builders["equinox"](sharding="replicated"),
    }
    for name, build in builders.items():
        with new_programs() as programs:
            made = build()
        largest[name] = max(p.get_compiled_memory_stats().output_size_in_bytes for p in programs)
        made.fit(1)
        tables[name] = {row.path: row.spec for row in made.shardings().rows}
    return {"tables": tables, "largest": largest}


def initialization() -> dict[str, Any]:
    """Record the largest array on one device while a Learner is built."""
    with new_programs() as programs:
        made = learner("fsdp")
    largest = max(program.get_compiled_memory_stats().output_size_in_bytes for program in programs)
    return {"largest output": largest, "live": live_bytes(), "table": made.shardings().bytes_per_device}


class Wide:
    """A model whose output is one number, with parameters that eight devices can divide."""

    @staticmethod
    def init(key: Any, xs: Any) -> Any:
        return {"w": jnp.ones((xs[0].size, 8)), "b": jnp.zeros(8)}

    @staticmethod
    def apply(params: Any, xs: Any) -> Any:
        return (xs.reshape(len(xs), -1) @ params["w"] + params["b"])[:, : SIZES["outputs"]]


SIZES = {"outputs": 1}
SCALAR = {"CallbackFactory"}  # they convert the parameter to a number


def every_callback(*names: str) -> dict[str, Any]:
    """Return how the shardings change in a training with each of these callbacks: a list of rows, which is empty."""
    import fluxcb.callbacks as library
    from tests.contract.every_callback import HOW, FakeGPU

    sys.modules["pynvml"] = FakeGPU  # pyright: ignore[reportArgumentType]
    sharding = fluxcb.Sharding(params={"w": P(None, "data"), "b": P("data")})
    changed: dict[str, Any] = {}
    for name in names:
        how = HOW.get(name, {})
        images = "learner" in how
        SIZES["outputs"] = 3 if images else 1
        xs = RNG.normal(size=(16, 4, 4, 1) if images else (16, 1)).astype(np.float32)
        ys = RNG.integers(0, 3, 16) if images else 3 * xs
        loss = optax.softmax_cross_entropy_with_integer_labels if images else optax.squared_error
        soft = optax.softmax_cross_entropy

        def mean_loss(outputs: Any, ys: Any, loss: Any = loss, soft: Any = soft) -> Any:
            return (soft if outputs.ndim == ys.ndim and outputs.shape[-1] == 3 else loss)(outputs, ys).mean()

        callbacks = [make() for make in (how.get("make", getattr(library, name)), *how.get("needs", ()))]
        if name in SCALAR:
            made = testlearner(*callbacks, mesh=fluxcb.mesh())
        else:
            made = fluxcb.Learner(
                (Wide.init, Wide.apply), mean_loss, fluxcb.inject(optax.adam, learning_rate=0.1),
                data=([(xs, ys)] * 6, [(xs, ys)] * 2), callbacks=callbacks,
                default_callbacks=False, mesh=fluxcb.mesh(), sharding=sharding,
            )  # fmt: skip
        before = made.shardings()
        made.fit(2)
        after = made.shardings()
        changed[name] = [row.path for row, old in zip(after.rows, before.rows, strict=True) if row != old]
        if name not in SCALAR:
            assert before.rows[0].spec == "P('data')"
    return changed


def process(index: str, address: str) -> dict[str, Any]:
    """Train in one of two processes, each with half of the rows of every batch."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(index))
    rows = slice(8 * int(index), 8 * int(index) + 8)
    made = learner("fsdp", Metrics(), Recorder(), data=[(xs[rows], ys[rows]) for xs, ys in BATCHES])
    before = made.shardings()
    made.fit(2)
    losses = [value for _, value in made.cbstate["metrics_epoch"]["training"]["loss"]]
    # The second batch has 6 rows in each process, which four devices cannot divide.
    parts = rows, slice(6 * int(index), 6 * int(index) + 6)
    batches = [tuple(array[at] for array in BATCHES[0]) for at in parts]
    return {
        "losses": losses,
        "bytes": before.bytes_per_device,
        "same": made.shardings() == before,
        "outputs": made.predict(batches).tolist(),
        "evaluated": made.evaluate(batches)["loss"],
    }


def one_process() -> dict[str, Any]:
    """Train on one device with the data of `process`."""
    made = learner(None, Metrics(), Recorder())
    made.fit(2)
    xs, ys = BATCHES[0]
    return {
        "losses": [value for _, value in made.cbstate["metrics_epoch"]["training"]["loss"]],
        "outputs": made.predict([xs]).tolist(),
        "evaluated": made.evaluate([(xs, ys), (xs[:12], ys[:12])])["loss"],
    }


def errors() -> list[str]:
    """Return the messages of errors that need several devices."""

    def from_sizes(*sizes: int, **options: Any) -> Any:
        batches = [(np.zeros((size, 256), np.float32), np.zeros((size, 8), np.float32)) for size in sizes]
        return learner("dp", data=batches, **options)

    def padded() -> None:
        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return jnp.sum((batch[0] @ params["w"]) ** 2 * batch.mask) / jnp.sum(batch.mask)

        fluxcb.Learner.from_loss(
            {"w": jnp.ones(256)},
            loss_fn,
            optax.sgd(0.1),
            data=[(np.zeros((30, 256), np.float32), np.zeros((30, 8), np.float32))] * 2,
            mesh=fluxcb.mesh(),
            sharding=fluxcb.Sharding(ragged="pad"),
            default_callbacks=False,
        ).fit(1)

    three = fluxcb.mesh(devices=jax.devices()[:3])
    programs = [
        lambda: from_sizes(16, 16, 12),
        lambda: from_sizes(16).run_step(TrainingPhase(), (np.zeros((3, 256)), np.zeros((3, 8)))),
        lambda: from_sizes(30, 30),
        lambda: from_sizes(30, 30, sharding=fluxcb.Sharding(ragged="drop")),
        lambda: from_sizes(24, 24).fit(1),
        lambda: from_sizes(32, 32).fit(1),
        padded,
        lambda: learner("dp", sharding="fsdp"),
        lambda: learner("dp", sharding=fluxcb.Sharding(params=[{"*": P()}, fluxcb.fsdp(min_bytes=0)])),
        lambda: learner("dp", sharding=fluxcb.Sharding(params=[{"up": P()}, fluxcb.fsdp()])),
        lambda: from_sizes(15, sharding=fluxcb.Sharding(params={"down": P(None, "data")}), mesh=three),
        lambda: fluxcb.mesh(data=3),
        lambda: fluxcb.mesh(data=4),
        lambda: learner("dp", fluxcb.callbacks.ToDevice(jax.devices()[1])),
    ]  # fmt: skip
    found = []
    for program in programs:
        try:
            program()
            found.append("no error")
        except fluxcb.FluxcbError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))
