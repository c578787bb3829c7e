"""The notebook display of a Learner."""

from html.parser import HTMLParser
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import Callback, CancelFitting, on
from fluxcb.callbacks import CustomCallback, Metrics
from fluxcb.data import ArrayLoader
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase

XS = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


class Cells(HTMLParser):
    """Parse the rows of the table, and the callbacks in the rows of the picture."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, list[str]] = {}
        self.boxes: list[str] = []
        self._open: list[tuple[str, dict[str, Any]]] = []
        self._name = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("br", "path", "rect"):
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in ("br", "path", "rect"):
            assert self._open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self._open]
        if tags[-1:] == ["th"]:
            self._name = data
        elif tags[-1:] == ["td"]:
            self.rows.setdefault(self._name, []).append(data)
        elif tags[-1:] == ["title"] and (self._open[-2][1].get("class") or "").startswith("row"):
            self.boxes.append(data.splitlines()[0])


def shown(learner: fluxcb.Learner) -> Cells:
    bundle = learner._repr_mimebundle_()
    assert bundle["text/plain"] == repr(learner)
    return Cells(bundle["text/html"])


def apply(params, xs):
    return xs @ params["w"] + params["b"]


def init(key, xs):
    return {"w": jnp.zeros((1, 1)), "b": jnp.zeros(1)}


def loss_fn(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def linear(*callbacks: Callback, model: Any = (init, apply), **options: Any) -> fluxcb.Learner:
    return fluxcb.Learner(
        model,
        loss_fn,
        options.pop("optimizer", fluxcb.inject(optax.adam, learning_rate=1e-3)),
        callbacks=callbacks,
        default_callbacks=False,
        **{"data": (ArrayLoader((XS, XS), batch_size=16), [(XS, XS)]), **options},
    )


def test_learner_is_displayed_as_table_and_graph():
    learner = linear(CustomCallback(print, EpochEnd, access={"cbstate": {"metrics_epoch": fluxcb.Read()}}), Metrics())
    found = shown(learner)
    assert found.rows == {
        "Learner": ["not trained yet"],
        "model": ["pair of functions: init, apply"],
        "parameters": ["2 in 2 arrays, 8 bytes"],
        "optimizer": ["adam, learning_rate = 0.001"],
        "data": ["TrainingPhase: ArrayLoader, 4 batches of 16", "ValidationPhase: list, 1 batch"],
        "callbacks": ["CustomCallback(print, EpochEnd), Metrics()"],
    }
    assert list(dict.fromkeys(found.boxes)) == ["Metrics()", "CustomCallback(print, EpochEnd)"]


def test_table_shows_progress_and_stop_reason():
    class Stop(Callback):
        def stateaccess(self):
            return {"control": fluxcb.Append()}

        @on
        def stop(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 6:
                raise CancelFitting("a & b")

    learner = linear(Stop())
    learner.fit(1)
    assert shown(learner).rows["Learner"] == ["epoch 1, step 4"]
    learner.fit(3)
    assert shown(learner).rows["Learner"] == [f"epoch 2, step 6; the last fit stopped: {learner.stop_reason}"]
    assert "a & b" in shown(learner).rows["Learner"][0]


def test_model_is_named_by_class():
    learner = linear(model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optimizer=optax.sgd(0.1))
    assert shown(learner).rows["model"] == ["Linear"]
    assert shown(learner).rows["optimizer"] == ["sgd"]


def test_from_loss_learner_is_displayed():
    def squares(params, batch, key):
        return jnp.sum(params["w"] ** 2)

    weights = {"w": jnp.ones((64, 64), jnp.float16)}
    optimizer = optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9))
    learner = fluxcb.Learner.from_loss(weights, squares, optimizer, data=iter([1.0]), default_callbacks=False)
    assert shown(learner).rows == {
        "Learner": ["not trained yet"],
        "model": ["parameters, with the loss function squares"],
        "parameters": ["4,096 in 1 array, 8,192 bytes"],
        "optimizer": ["sgd, combined with other transformations"],
        "data": ["LossTrainingPhase: list_iterator", "LossValidationPhase: none"],
        "graph": ["no callback has to run before another one"],
    }


def test_learner_without_batch_is_displayed():
    learner = linear(model=(lambda key, xs: init(key, xs[:1]), apply), data=None)
    assert shown(learner).rows["parameters"] == ["unknown until the first batch"]


@pytest.mark.parametrize(
    ("count", "size"), [(2499, "9,996 bytes"), (2560, "10 KiB"), (2_500_000, "9,766 KiB"), (2_621_440, "10 MiB")]
)
def test_parameter_counts_and_sizes(count, size):
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.ones(count)}, lambda params, batch, key: jnp.sum(params["w"]), optax.sgd(0.1), data=[1.0]
    )
    assert shown(learner).rows["parameters"] == [f"{count:,} in 1 array, {size}"]
