"""(8) The same training by other libraries, each against a loop written by hand in its own framework.

Every library does it in its own idiom, keeps the loss of each step where that idiom has a place for it, and ends with
the same parameters. JAX and PyTorch are not compared with each other: their floors differ.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import mlp
import numpy as np
from figures import Table
from fresh import in_fresh_process
from interleave import Variant, comparison, in_turns

TOLERANCE = 1e-2
"""Adam has its epsilon in different places, so parameters agree less closely than between loops of one framework."""

BY_HAND = "by hand, history"
WINDOW = 50

NAMES = "w1", "b1", "w2", "b2"


def measure(rounds: int) -> list[Table]:
    """Return a table per framework."""
    return [in_fresh_process(_jax_peers, rounds), in_fresh_process(_torch_peers, rounds)]


def _compared(title: str, makers: Mapping[str, Callable[[], Variant]], floors: Mapping[str, str], rounds: int) -> Table:
    variants, skipped = {}, []
    for name, make in makers.items():
        try:
            variants[name] = make()
        except ImportError as error:
            skipped.append(f"{name}: skipped, {error}.")
    if not variants:
        return Table(title, notes=skipped)
    times = in_turns(variants, rounds, tolerance=TOLERANCE)
    table = comparison(title, times, {name: floors.get(name, BY_HAND) for name in times})
    table.notes += skipped
    return table


# -- JAX ------------------------------------------------------------------------------------------


def _jax_peers(rounds: int) -> Table:
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # CLU imports TensorFlow, which would announce them
    scan = f"by hand, lax.scan of {WINDOW}, history"
    windows = [f"fluxcb, default callbacks, steps_per_call={WINDOW}", f"Keras, steps_per_execution={WINDOW}"]
    table = _compared(
        "JAX: the 64-64-10 network, the loss of each step kept",
        {
            BY_HAND: lambda: mlp.by_hand(reads="each epoch"),
            "fluxcb, default callbacks, steps_per_call=1": lambda: mlp.by_fluxcb(mlp.defaults(), steps_per_call=1),
            'fluxcb, default callbacks, "auto"': lambda: mlp.by_fluxcb(mlp.defaults(), steps_per_call="auto"),
            "Keras": lambda: _keras(1),
            "CLU in a hand-written loop": _clu,
            "Flax NNX, nnx.jit": lambda: _nnx(cached=False),
            "Flax NNX, nnx.jit, cached_partial": lambda: _nnx(cached=True),
            scan: lambda: mlp.by_hand_in_windows(WINDOW, stacks=True, keeps=True),
            windows[0]: lambda: mlp.by_fluxcb(mlp.defaults(), steps_per_call=WINDOW),
            windows[1]: lambda: _keras(WINDOW),
        },
        {scan: scan, **dict.fromkeys(windows, scan)},
        rounds,
    )
    table.notes += [
        "Keras: its callbacks see the mean loss of the epoch so far, not the loss of the step. With "
        "`steps_per_execution`, they see only the last step of each call.",
        f"The hand-written scan stacks the batches of a window in the loop. Windows of {WINDOW} are compared with the "
        "scan, and all other rows with the hand-written loop.",
    ]
    return table


def _keras(steps_per_execution: int) -> Variant:
    keras: Any = importlib.import_module("keras")
    batches = mlp.batches()

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    class Losses(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[float] = []
            self.kept: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.kept.append(logs["loss"])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.history += map(float, self.kept)
            self.kept = []

    layers = keras.layers
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    model.set_weights([mlp.first_params()[name] for name in NAMES])
    model.compile(
        optimizer=keras.optimizers.Adam(mlp.RATE, epsilon=1e-8),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
        jit_compile=True,
    )
    data, losses = Batches(), Losses()

    def run() -> None:
        model.fit(data, epochs=mlp.EPOCHS, shuffle=False, verbose=0, callbacks=[losses])
        for variable in model.variables:
            variable.value.block_until_ready()

    return Variant(run, lambda: dict(zip(NAMES, model.get_weights(), strict=True)), mlp.EPOCHS * mlp.BATCHES)


def _clu() -> Variant:
    import jax

    actions: Any = importlib.import_module("clu.periodic_actions")
    writers: Any = importlib.import_module("clu.metric_writers")
    batches = mlp.batches()
    compiled = jax.jit(mlp.hand_step, donate_argnums=(0, 1))
    state = [*mlp.hand_state(), 0]
    kept: list[Any] = []
    history: list[float] = []
    report = actions.ReportProgress(writer=writers.LoggingWriter(), every_secs=10.0)
    keep = actions.PeriodicCallback(every_steps=1, callback_fn=lambda step, t, loss: kept.append(loss))

    def run() -> None:
        params, opt_state, step = state
        for _ in range(mlp.EPOCHS):
            for batch in batches:
                step += 1
                params, opt_state, loss = compiled(params, opt_state, batch)
                report(step)
                keep(step, loss=loss)
            history.extend(map(float, map(np.asarray, kept)))
            kept.clear()
        state[:] = params, opt_state, step
        jax.block_until_ready(params)

    return Variant(run, lambda: state[0], mlp.EPOCHS * mlp.BATCHES)


def _nnx(*, cached: bool) -> Variant:
    import jax

    nnx: Any = importlib.import_module("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.hidden = nnx.Linear(64, 64, rngs=rngs)
            self.out = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, xs: Any) -> Any:
            return self.out(nnx.relu(self.hidden(xs)))

    model = Net(nnx.Rngs(0))
    places = {"w1": model.hidden.kernel, "b1": model.hidden.bias, "w2": model.out.kernel, "b2": model.out.bias}
    for name, value in mlp.first_params().items():
        places[name][...] = value
    optimizer = nnx.Optimizer(model, mlp.optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: mlp.loss_fn(m(batch[0]), batch[1]))(model)
        optimizer.update(model, grads)
        return loss

    taken: Callable[[Any], Any]
    taken = nnx.cached_partial(step, model, optimizer) if cached else lambda batch: step(model, optimizer, batch)
    batches = mlp.batches()
    history: list[Any] = []

    def run() -> None:
        for _ in range(mlp.EPOCHS):
            kept = [taken(batch) for batch in batches]
            history.extend(map(np.asarray, kept))
        jax.block_until_ready(nnx.state(model))

    return Variant(run, lambda: {name: np.asarray(places[name][...]) for name in NAMES}, mlp.EPOCHS * mlp.BATCHES)


# -- PyTorch --------------------------------------------------------------------------------------


def _torch_peers(rounds: int) -> Table:
    return _compared(
        "PyTorch (one thread): the same network, the loss of each step kept",
        {BY_HAND: _torch_by_hand, "Lightning": _lightning, "Ignite": _ignite},
        {},
        rounds,
    )


class _TorchTraining:
    """What the three loops share: network, optimizer, batches, and where losses go."""

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)  # these matrices are too small to share, and threads that wait spin
        self.torch = torch
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        first = mlp.first_params()
        with torch.no_grad():
            for layer, weight, bias in ((self.model[0], "w1", "b1"), (self.model[2], "w2", "b2")):
                layer.weight.copy_(torch.from_numpy(first[weight].T.copy()))
                layer.bias.copy_(torch.from_numpy(first[bias]))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=mlp.RATE)
        self.batches = [(torch.from_numpy(xs), torch.from_numpy(ys.astype(np.int64))) for xs, ys in mlp.batches()]
        self.kept: list[Any] = []
        self.history: list[float] = []

    def loss(self, batch: Any) -> Any:
        xs, ys = batch
        return self.torch.nn.functional.cross_entropy(self.model(xs), ys)

    def end_epoch(self) -> None:
        self.history += self.torch.stack(self.kept).tolist()
        self.kept.clear()

    def variant(self, run: Callable[[], object]) -> Variant:
        hidden, _, out = self.model

        def params() -> Any:
            found = (hidden.weight.T, hidden.bias, out.weight.T, out.bias)
            return {name: tensor.detach().numpy() for name, tensor in zip(NAMES, found, strict=True)}

        return Variant(run, params, mlp.EPOCHS * mlp.BATCHES)


def _torch_by_hand() -> Variant:
    training = _TorchTraining()
    optimizer = training.optimizer

    def run() -> None:
        for _ in range(mlp.EPOCHS):
            for batch in training.batches:
                optimizer.zero_grad()
                loss = training.loss(batch)
                loss.backward()
                optimizer.step()
                training.kept.append(loss.detach())
            training.end_epoch()

    return training.variant(run)


def _lightning() -> Variant:
    training = _TorchTraining()
    lightning: Any = importlib.import_module("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # it advises more workers for the list of batches

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Any, index: int) -> Any:
            return training.loss(batch)

        def configure_optimizers(self) -> Any:
            return training.optimizer  # the same in each fit: training goes on

    class Batches:  # Lightning would take a list for one loader per batch
        def __iter__(self) -> Any:
            return iter(training.batches)

        def __len__(self) -> int:
            return len(training.batches)

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            training.kept.append(outputs["loss"].detach())

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            training.end_epoch()

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=0,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )

    def run() -> None:
        trainer.fit_loop.max_epochs += mlp.EPOCHS
        trainer.fit(module, train_dataloaders=Batches())

    return training.variant(run)


def _ignite() -> Variant:
    training = _TorchTraining()
    engine: Any = importlib.import_module("ignite.engine")
    optimizer = training.optimizer

    def update(trainer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = training.loss(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = engine.Engine(update)
    trainer.add_event_handler(engine.Events.ITERATION_COMPLETED, lambda e: training.kept.append(e.state.output))
    trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, lambda e: training.end_epoch())
    return training.variant(lambda: trainer.run(training.batches, max_epochs=mlp.EPOCHS))
