"""The train state: the carry of the compiled steps, the run's random key, and copies of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import copy_tree, differences, own_copy, signature_of
from fluxcb._compile.carry_layout import CarryLayout
from fluxcb._compile.carry_paths import part_of
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.placement import Placement
from fluxcb._compile.traced import COUNTERS
from fluxcb._errors import DeclarationError, MissingStateError, StateLostError
from fluxcb._run.progress import Progress
from fluxcb._typing import PyTree, StatePath

__all__ = ["TrainState"]


def key_text(key: Any) -> str:
    """Return a typed random key as a short text: its seed if it is that of a seed of 32 bits, otherwise its words."""
    words, impl = np.asarray(jax.random.key_data(key)).tolist(), str(jax.random.key_impl(key))
    # `jax.random.key(seed)` has the words 0 and `seed`, which some implementations repeat.
    of_seed = len(words) % 2 == 0 and words == [0, words[1]] * (len(words) // 2)
    text = str(words[1] if of_seed else words)
    return text if impl == "threefry2x32" else f"{text} ({impl})"


class TrainState:
    """The train state: parameters, model state, optimizer state, carried `cbstate` entries, counters and random key.

    `LearnerCore` builds it. `ProgramRunner` lends it to programs, which donate it, and takes their result back.
    Handlers (`HostBackend`), assignments (`state_assignment.py`), and restored checkpoints replace parts of it.

    Programs take the carry as a few arrays (`CarryLayout`), because each array in a call takes time. The carry
    therefore has two forms, of which at least one exists: a mapping by name, and the arrays with their layout. The
    mapping is created when a part of it is read.

    Args:
        key: The run's random key (typed).

    Attributes:
        hyperparams: The places of the injected hyperparameters in the optimizer state.
        given_key: The key with which the program began (typed).
        given_key_text: The key with which the run began, which a resumed run keeps; see `key_text`.
        given_hyperparams: The values with which the program began, by name; see `HyperparamIndex.numbers`.
        copies: Copies of parts of the carry, shared by the handlers of a moment.
        placement: The shardings of the carry, or None without a mesh.
        switches: For each callback that can be switched off, whether it is enabled (0 or 1). They become part of the
            carry with the next `set_counters`.
    """

    def __init__(self, key: Any) -> None:
        self.placement: Placement | None = None
        self.run_key = key
        self.give_key(key)
        self.switches: tuple[int, ...] = ()
        self.hyperparams = HyperparamIndex({})
        self.given_hyperparams: dict[str, list[Any]] = {}
        self.copies: dict[Any, Any] = {}
        self._copies_from: Any = None  # the carry or the arrays that `copies` were made of
        self._carry: dict[str, Any] | None = None
        self._arrays: list[Any] | None = None
        self._layout: CarryLayout | None = None
        self._new_counters: np.ndarray | None = None  # not yet in `_carry`; see `set_counters`
        self._borrowed: dict[StatePath, tuple[PyTree, PyTree]] = {}  # parts sliced from `_arrays`, with their indices
        self._carried_entries: frozenset[str] = frozenset()
        self._lost: BaseException | None = None

    # -- the carry and its two forms --------------------------------------------------------

    @property
    def carry(self) -> dict[str, Any]:
        """The carry: live arrays, donated to the next step.

        Raises:
            MissingStateError: It is not built yet.
            StateLostError: It was donated to a call that failed.
        """
        if self._carry is not None:
            if self._new_counters is not None:
                self._carry = {**self._carry, "counters": jax.device_put(self._new_counters)}
                self._new_counters = None
            return self._carry
        if self._arrays is None or self._layout is None:
            if self._lost is None:
                raise MissingStateError(
                    "The train state does not exist yet, because the shape of a batch is unknown.",
                    fix="pass `data=` or `example_batch=` to the Learner, or run the first step",
                )
            raise StateLostError(
                f"The train state is lost: the call that it was donated to failed ({type(self._lost).__name__}).",
                why="a program may overwrite a donated array, even if the program fails",
                fix="build a new Learner, and restore a checkpoint",
            ) from self._lost
        carry = self._layout.unpack(self._arrays)
        # Parts that were sliced before are kept, because a handler may hold references to their arrays.
        for root, (part, _) in self._borrowed.items():
            carry = _with_part(carry, root, part)
        self._carry, self._borrowed = carry, {}
        return carry

    @carry.setter
    def carry(self, carry: dict[str, Any]) -> None:
        if self.placement is not None:
            carry = self.placement.with_places(carry)
        self._carry, self._arrays, self._layout, self._new_counters = carry, None, None, None
        self._borrowed = {}
        self._carried_entries = frozenset(carry["cbstate"])

    @property
    def layout(self) -> CarryLayout | None:
        """The layout in which programs take the carry, or None if they take it as it is."""
        return self._layout or CarryLayout.of(self.carry)

    @property
    def signature(self) -> Any:
        """Structure, shapes and dtypes of the carry, hashable."""
        return self._layout.signature if self._layout is not None else signature_of(self.carry)

    def lend(self, layout: CarryLayout | None) -> Any:
        """Return the carry in the form that a program takes; the program may donate it.

        Raises:
            TypeError: The carry does not have this layout.
        """
        if layout is None:  # a straight program takes the mapping
            carry = self._carry if self._carry is not None else self.carry
            self._arrays = self._layout = None  # otherwise stale arrays would remain after a call that fails
            return carry if self._new_counters is None else {**carry, "counters": self._new_counters}
        # Identity first, because an equality test of two layouts compares the shapes of all arrays.
        if self._arrays is None or (self._layout is not layout and self._layout != layout):
            self._arrays, self._layout = layout.pack(self.carry), layout
        return self._arrays

    def take_back(self, arrays: Any, layout: CarryLayout | None) -> None:
        """Store the carry that a program returned."""
        if layout is None:
            self._carry, self._arrays, self._layout, self._new_counters = arrays, None, None, None
            return
        # The program has donated the old arrays. Parts sliced from them are separate arrays and are deleted here, so
        # that a stale reference raises the error of a donated array instead of returning values of an earlier step.
        if arrays is not self._arrays:
            if self._carry is not None:
                layout.discard(self._carry, layout.indices)
                self._carry = None
            for part, indices in self._borrowed.values():
                layout.discard(part, indices)
            self._borrowed = {}
        self._arrays, self._layout = arrays, layout

    def as_pytree(self) -> PyTree:
        """Return a copy of the whole train state as one pytree; see `Learner.state`."""
        counters = self.carry["counters"][: len(COUNTERS)]  # the rest of this array is the random key
        return {**own_copy({**self.carry, "counters": counters}), "key": jnp.copy(self.run_key)}

    def assign(self, state: PyTree) -> list[int]:
        """Replace the train state by a return value of `as_pytree`, possibly with other values.

        Returns:
            The counters of the new state, in the order of `COUNTERS`.

        Raises:
            DeclarationError: The new state has another structure, or arrays of other shapes or dtypes.
        """
        # Checked before anything changes, because the compiled programs accept only this structure.
        wrong = differences(self.as_pytree(), state)
        if wrong:
            raise DeclarationError(
                f"The assigned state does not fit the Learner: {wrong[0]}.",
                where=wrong[1:5],
                fix="assign what `learner.state` returned, with other values",
            )
        self.run_key = jnp.copy(state["key"])
        counters = np.asarray(state["counters"]).tolist()
        self.carry = {
            **own_copy({name: value for name, value in state.items() if name not in ("key", "counters")}),
            "counters": self.counters(counters),
        }
        return counters

    def copies_of(self, paths: Sequence[StatePath]) -> dict[StatePath, Callable[[], PyTree]]:
        """Start copies of parts of the current carry, and return functions that wait for them."""
        if not paths:
            return {}
        arrays, layout = self._arrays, self._layout
        if arrays is None or layout is None:
            copies = {path: copy_tree(part_of(self.carry, self.hyperparams, path)) for path in paths}
            return {path: functools.partial(copies.__getitem__, path) for path in paths}
        # One compiled program copies all parts, because between calls each eager JAX operation takes longer than a
        # small step.
        parts = [part_of(layout.indices, self.hyperparams, path) for path in paths]
        return dict(zip(paths, layout.keep(arrays, parts), strict=True))

    @property
    def built(self) -> bool:
        """Whether the train state exists."""
        return self.alive or self._lost is not None

    @property
    def alive(self) -> bool:
        """Whether the train state exists and is not lost."""
        return self._carry is not None or self._arrays is not None

    @property
    def some_array(self) -> Any:
        """Any array of the carry. All arrays share its devices, become ready together, and are donated together."""
        if self._arrays is not None:
            return self._arrays[0]
        if self._carry is not None and self._new_counters is not None:
            # The next call takes the new counters, so the array with the old ones is not donated.
            params = jax.tree.leaves(self._carry["params"])
            if params:
                return params[0]
        return self.carry["counters"]

    @property
    def platform(self) -> str:
        """The platform of the carry's devices, e.g. `cpu`."""
        return next(iter(self.some_array.devices())).platform

    def lose(self, error: BaseException) -> None:
        """Mark the carry as lost, because it was donated to a call that failed."""
        self._carry = self._arrays = self._layout = self._new_counters = None
        self._borrowed = {}
        self._lost = error

    @property
    def run_key(self) -> Any:
        """The run's random key (typed)."""
        return self._run_key

    @run_key.setter
    def run_key(self, key: Any) -> None:
        self._run_key = key
        # Converted once, because `_counters` runs at every epoch.
        self._key_words = np.asarray(jax.random.key_data(key)).view(np.int32).tolist()

    def give_key(self, key: Any) -> None:
        """Record the key with which the program begins a run."""
        self.given_key, self.given_key_text = key, key_text(key)

    def model_key(self) -> Any:
        """Return the random key (typed) that a model is initialized with.

        NumPy's `SeedSequence` derives it on the host, because `jax.random.fold_in` would compile a program for one key.
        The key differs from all keys that steps and handlers use.
        """
        words = np.asarray(jax.random.key_data(self._run_key))
        own = np.random.SeedSequence(words.tolist(), spawn_key=(0,)).generate_state(words.size)
        return jax.random.wrap_key_data(jax.device_put(own), impl=jax.random.key_impl(self._run_key))

    def counters(self, values: Sequence[int]) -> jax.Array:
        """Return the array `counters` of the carry for these values.

        The array ends with the words of the run's key and the switches. A typed key as a separate part of the carry
        would be slower: JAX wraps it in Python at each call (2 us), and each additional array costs 0.6 us per call.
        """
        return jax.device_put(self._counters(values), self.placement and self.placement.replicated)

    def _counters(self, values: Sequence[int]) -> np.ndarray:
        return np.array([*values, *self._key_words, *self.switches], np.int32)

    def set_counters(self, progress: Progress, **values: int) -> None:
        """Write the host's counters, or other `values` by name, into the array `counters` of the carry."""
        held = {
            "step": progress.step,
            "epoch": progress.epoch,
            "step_in_epoch": progress.step_in_epoch,
            "stopped": 0,
            **values,
        }
        counters = self._counters([held[name] for name in COUNTERS])
        # The counters stay a NumPy array until the next call transfers them. Between calls, the Python code of JAX is
        # cold, and a `device_put` takes 0.1 ms and not 35 us.
        if self._arrays is not None and self._layout is not None:
            self._arrays = self._layout.replaced(self._arrays, self._layout.indices["counters"], counters)
            if self._carry is not None:
                self._carry = {**self._carry, "counters": jax.device_put(counters)}
            return
        # The property would first transfer counters that wait for the next call, and that are replaced here.
        old = (self._carry or self.carry)["counters"]
        if old.committed:  # keep the placement (device or sharding) that the compiled program expects
            self.carry = {**self.carry, "counters": jax.device_put(counters, old.sharding)}
        else:
            self._new_counters = counters

    def copy_of(self, root: StatePath) -> PyTree:
        """Return a copy of a part of the carry. All readers share it until the carry changes.

        A handler may keep a reference, and the next step donates the carry, so the live arrays cannot be returned.
        `Read(borrow=True)` avoids the copy.
        """
        arrays, layout = self._arrays, self._layout
        # The identity of the carry shows whether it has changed, since every program call and every write replaces it.
        now = arrays if arrays is not None else self.carry
        if self._copies_from is not now:  # a program has run, or a handler has written
            self.copies, self._copies_from = {}, now
        if root not in self.copies:
            if arrays is None or layout is None:
                self.copies[root] = own_copy(self.live(root))
            else:
                part = part_of(layout.indices, self.hyperparams, root)
                self.copies[root] = layout.part(layout.copy(arrays, part, small=False), part)
        return self.copies[root]

    def live(self, root: StatePath) -> PyTree:
        """Return a part of the carry itself, which the next step donates."""
        arrays, layout = self._arrays, self._layout
        if self._carry is None and arrays is not None and layout is not None:
            # Only this part is sliced. Unpacking the whole carry would copy every array.
            if root not in self._borrowed:
                indices = part_of(layout.indices, self.hyperparams, root)
                self._borrowed[root] = layout.part(arrays, indices), indices
            return self._borrowed[root][0]
        return self.carry["cbstate"][root[1]] if root[0] == "cbstate" else self.carry[root[0]]

    def borrowed(self, root: StatePath) -> PyTree:
        """Return a part of the carry itself like `live`, without waiting for the device."""
        arrays, layout = self._arrays, self._layout
        if self._carry is None and arrays is not None and layout is not None and root not in self._borrowed:
            indices = part_of(layout.indices, self.hyperparams, root)
            self._borrowed[root] = layout.extract(arrays, indices), indices
        return self.live(root)

    def replace(self, root: StatePath, value: PyTree) -> None:
        """Put a new value into the carry."""
        self.carry = _with_part(self.carry, root, value)

    @property
    def carried_entries(self) -> frozenset[str]:
        """The names of the `cbstate` entries that are in the carry."""
        return self._carried_entries

    def in_carry(self, name: str) -> bool:
        """Tell whether a `cbstate` entry is in the carry."""
        # Stored as a set of names, because handlers ask at every step and the mapping may not exist.
        return name in self._carried_entries and self.alive

    def forget_copies(self) -> None:
        """Free the copies that the handlers of a moment shared."""
        if self.copies:
            self.copies, self._copies_from = {}, None


def _with_part(carry: dict[str, Any], root: StatePath, value: PyTree) -> dict[str, Any]:
    """Return a carry with one part replaced."""
    if root[0] == "cbstate":
        return {**carry, "cbstate": {**carry["cbstate"], root[1]: value}}
    return {**carry, root[0]: value}
