"""Checkpoints with changes and matching checksums, and the Learner that restores them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore as ts

import fluxcb
from fluxcb import Callback, on
from fluxcb.callbacks import Checkpointer, EarlyStopping, Metrics, ParameterEMA, Recorder
from fluxcb.checkpoints.manifest import MANIFEST, sums_of
from fluxcb.data import ArrayLoader
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase


class Keeps(Callback):
    """Have state of every kind that a checkpoint can hold."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {
            "number": 1.5,
            "text": "x",
            "list": [1, 2],
            "long": list(range(100)),
            "array": np.arange(6.0).reshape(2, 3),
            "empty": np.zeros((0, 3), np.float32),
            "jax": jnp.arange(3),
            "key": jax.random.key(1),
            "tuple": (1, (2, 3)),
            "set": {1, 2},
            "pairs": {1: "a", (1, 2): "b"},
            "bytes": b"xyz",
            "complex": 1 + 2j,
        }

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        self.kept["number"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = Keeps().kept.keys() - state.keys()
        if missing:
            raise KeyError(min(missing))
        self.kept = dict(state)


def learner(folder: Path) -> fluxcb.Learner:
    def loss(outputs: Any, ys: Any) -> Any:
        return jnp.mean((outputs - ys) ** 2)

    xs, ys = np.arange(24, dtype=np.float32).reshape(12, 2) / 24, np.ones((12, 3), np.float32)
    return fluxcb.Learner(
        (
            lambda key, xs: {"w": jax.random.normal(key, (2, 3)), "b": jnp.zeros(3)},
            lambda params, xs: xs @ params["w"] + params["b"],
        ),
        loss,
        optax.adam(0.1),
        data=(ArrayLoader((xs, ys), 4), [(xs[:4], ys[:4])]),
        callbacks=[
            Checkpointer(folder, steps=2), Metrics(), Recorder(), Keeps(), ParameterEMA(0.9), EarlyStopping(50),
        ],
        default_callbacks=False,
    )  # fmt: skip


# -- what a Learner and a checkpoint are, in a form that can be compared ------------------------------


def plain(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return the JSON of `Encoder` with arrays instead of their names."""
    if isinstance(value, list):
        return [plain(item, arrays) for item in value]
    if not isinstance(value, dict):
        return repr(value)
    if value.get("$") in ("set", "frozenset"):
        return [value["$"], sorted(map(repr, plain(value["of"], arrays)))]
    if "at" in value and "$" in value:
        array = arrays[value["at"]]
        if value["$"] != "key" and value.get("as") is not None:
            array = array.view(jnp.dtype(value["as"]))
        return [value["$"], as_bytes(array)]
    return {key: plain(item, arrays) for key, item in value.items()}


def as_bytes(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the type, the shape and the bytes of an array."""
    return str(array.dtype), array.shape, np.asarray(array).tobytes()


def told(learner: fluxcb.Learner) -> dict[str, Any]:
    """Return everything that the Learner would save."""
    snapshot = learner._core.snapshots.take(None)
    leaves = jax.tree_util.tree_leaves_with_path(dict(snapshot.trees))
    trees = {jax.tree_util.keystr(path, simple=True, separator="."): as_bytes(leaf) for path, leaf in leaves}
    return {"trees": trees, "host": comparable(dict(snapshot.host), dict(snapshot.arrays))}


def comparable(host: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """Return the host state with its arrays, without the position in a finished pass, which is not restored."""
    content = plain(host, arrays)
    for position in content["data"].values():
        if position["open"] == "False":
            for name in ("consumed", "total", "state", "ahead"):
                del position[name]
    return content


# -- forging ------------------------------------------------------------------------------------------


def sign(folder: Path) -> None:
    """Write a manifest with the current checksums of the files of a checkpoint."""
    files = {name: entry for name, entry in sums_of(folder).items() if name != MANIFEST}
    set_manifest(folder, json.dumps({**manifest_of(folder), "files": files}))


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return a manifest without its own checksum."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    return content


def set_manifest(folder: Path, text: str) -> None:
    """Write a manifest (a JSON object as text) with its own checksum."""
    try:
        content = json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):  # no reader gets to its checksum
        content = ""
    digest = hashlib.sha256(content.encode()).hexdigest()
    (folder / MANIFEST).write_text(f'{{"sha256": "{digest}"{", " if text != "{}" else ""}{text[1:]}')


def store_of(folder: Path, part: str) -> Any:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder / part}/"}).result()


def header_of(folder: Path, part: str, name: str) -> dict[str, Any]:
    return json.loads(store_of(folder, part).read(f"{name}/.zarray").result().value)


def set_header(folder: Path, part: str, name: str, header: Any) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    store_of(folder, part).write(f"{name}/.zarray", text.encode()).result()
    sign(folder)


def set_host(folder: Path, host: Any) -> None:
    (folder / "host.json").write_text(host if isinstance(host, str) else json.dumps(host))
    sign(folder)


def host_of(folder: Path) -> Any:
    return json.loads((folder / "host.json").read_text())
