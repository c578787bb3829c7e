"""`Snapshot`: the saved state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fluxcb._calls import Constructed
from fluxcb._typing import PyTree

if TYPE_CHECKING:
    import numpy as np

__all__ = ["VALIDATED", "Snapshot", "is_key", "text_of"]

VALIDATED = "validated"
"""The value of `average=` that selects the parameters that validation measured."""

_HOST = "host"
_KEY = "key:"


@dataclass(frozen=True)
class Snapshot(Constructed):
    """The whole state that a run needs to resume with identical results.

    Attributes:
        step: Number of finished training steps.
        epoch: Number of the current epoch, or of the last one.
        trees: The pytrees of arrays `params`, `model_state`, `opt_state`, and `cbstate`, which contains the entries in
            the carry.
        host: All other state as JSON: counters, position, random key, the `cbstate` entries on the host, the states of
            callbacks, and data positions.
        arrays: The arrays in `host`, keyed by the names that `host` uses for them.
        about: What the run consists of, as JSON: callbacks, data, programs, versions.
        average: Name of the `cbstate` entry with the average that validation measures, or None.
        averages: The same for each phase and each `InferenceRunner`, keyed by name.
    """

    step: int
    epoch: int
    trees: Mapping[str, PyTree]
    host: Mapping[str, Any]
    arrays: Mapping[str, Any]
    about: Mapping[str, Any]
    average: str | None = None
    averages: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def position(self) -> tuple[Any, ...]:
        """The step, the position within the epoch, and why the fit ended early: together, what the snapshot is of."""
        return self.step, self.host["at"], self.host["fit"]["ended"]

    def pack(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the snapshot as JSON and NumPy arrays, for savers with a custom format.

        Returns:
            An object for `json.dumps`, and the arrays by name for `np.savez`. Random keys and extended types such as
            bfloat16 are stored as unsigned integers.
        """
        import jax
        import numpy as np

        from fluxcb.checkpoints.naming import named

        arrays: dict[str, np.ndarray] = {}
        types: dict[str, str] = {}
        for part, tree in {**self.trees, _HOST: self.arrays}.items():
            for path, leaf in named(tree).items():
                name = f"{part}/{'.'.join(path)}"
                if is_key(leaf):
                    types[name] = f"{_KEY}{jax.random.key_impl(leaf)}"
                    leaf = jax.random.key_data(leaf)
                array = np.asarray(leaf)
                if array.dtype.isbuiltin == 2:  # a type of ml_dtypes, which `np.load` would return as raw bytes
                    types[name] = str(array.dtype)
                    array = array.view(f"u{array.dtype.itemsize}")
                arrays[name] = array
        # The names of the trees are stored separately, because a tree without arrays has no entry in `arrays`.
        fields = ("step", "epoch", "host", "about", "average")
        content = {name: getattr(self, name) for name in fields} | {"averages": dict(self.averages)}
        return {**content, "trees": list(self.trees), "types": types}, arrays

    @classmethod
    def unpack(cls, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Snapshot:
        """Return the snapshot from the result of `pack`, with dicts as containers.

        `LoadedCheckpoint` replaces them with the containers of the Learner.
        """
        import jax
        import jax.numpy as jnp

        from fluxcb.checkpoints.naming import Name, unflatten

        fields, types = dict(content), content["types"]
        parts: dict[str, dict[Name, Any]] = {part: {} for part in (*fields.pop("trees"), _HOST)}
        for name, array in arrays.items():
            part, _, path = name.partition("/")
            kind = types.get(name, "")
            if kind.startswith(_KEY):
                array = jax.random.wrap_key_data(jnp.asarray(array), impl=kind.removeprefix(_KEY))
            elif kind:
                array = array.view(jnp.dtype(kind))
            parts[part][tuple(path.split("."))] = array
        del fields["types"]
        # Containers are not stored, because a checkpoint does not refer to classes. The names of the leaves are enough.
        trees = {part: unflatten(leaves, []) for part, leaves in parts.items()}
        return cls(**fields, arrays=trees.pop(_HOST), trees=trees)


def is_key(leaf: Any) -> bool:
    """Return whether an array contains typed random keys."""
    import jax

    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def text_of(leaf: Any) -> str:
    """Return the dtype and shape of an array as text for manifests and messages, such as `float32[32, 10]`."""
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
