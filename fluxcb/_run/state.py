"""The host's side of the state: the carry, shared state, counters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import copy_tree, differences, own_copy, signature_of
from fluxcb._compile.carried import part_of
from fluxcb._compile.carry_layout import CarryLayout
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.plan import IN_SYNC
from fluxcb._compile.traced import COUNTERS
from fluxcb._declare.access import dotted
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError, DeclarationError, MissingStateError, StateLostError
from fluxcb._run.measuring import Meter
from fluxcb._run.window import Window
from fluxcb._typing import PyTree, StatePath

__all__ = ["FitRecord", "HostState", "Position"]


@dataclass(frozen=True)
class Position:
    """Where in an epoch a training goes on.

    Attributes:
        phase: Name of the phase whose epoch is at hand.
        step_in_epoch: Finished steps of it.
        outer: Finished steps of the training epoch, where that is another.
    """

    phase: str
    step_in_epoch: int
    outer: int


@dataclass
class FitRecord:
    """What is known of the fit at hand, or of the last one.

    Attributes:
        epoch: Number of the last epoch before it.
        step: Finished training steps before it.
        ended: Why it ended before its time; None while it runs, and where it ran to its end.
        at: Where in an epoch the next fit goes on; None between two epochs.
        restored: Whether this is what a checkpoint says, and no fit has begun since.
        rewinds: How often the run has gone back to an earlier checkpoint.
        rewound_to: The step of the checkpoint to which it went back last, or None.
    """

    epoch: int = 0
    step: int = 0
    ended: str | None = None
    at: Position | None = None
    restored: bool = False
    rewinds: int = 0
    rewound_to: int | None = None


class HostState:
    """Everything a Learner knows, as the host sees it.

    Attributes:
        cbstate: Shared state that lives on the host.
        step: Finished training steps.
        epoch: Number of the current epoch.
        step_in_epoch: Finished steps of the current epoch.
        cancelled: How many training steps have begun and were cancelled at StepBegin.
        cancelled_in_epoch: How many steps of the current epoch were cancelled, if the epoch does not train.
        epochs: Number of the epoch this fit ends with; 0 where unknown.
        last_step: Number of the training step this fit ends with; 0 where unknown.
        steps_in_epoch: Steps this epoch will have; 0 where unknown.
        batch_size: Examples in the batch of the step at hand; 0 between steps.
        compiled: Whether the step was already compiled when the current epoch began or resumed.
        open: Which clocks may be asked at the moment at hand; see `HostCall.asks`.
        window: The window whose handlers run, or None between windows.
        ahead: Whether the train state is ahead of the step whose handlers run.
        meter: Counts reads of the device, and measures handlers if it is asked to.
        fit: What is known of the fit at hand.
        outer_step_in_epoch: Finished steps of the training epoch around a validation.
        copies: Copies of parts of the carry that the handlers of a moment share.
        handed: Containers that handlers were given, to see whether they wrote into them.
    """

    def __init__(self, *, model: Any, loss_fn: Any, optimizer: Any, key: Any) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.run_key = key
        self.cbstate: dict[str, Any] = {}
        self.step = self.epoch = self.step_in_epoch = self.batch_size = 0
        self.epochs = self.last_step = self.steps_in_epoch = 0
        self.cancelled = self.cancelled_in_epoch = 0
        self.compiled = True
        self.window: Window | None = None
        self.ahead = False
        self.open = IN_SYNC
        self.meter = Meter()
        self.handed: list[tuple[str, StatePath, Any, list[Any], Any]] = []
        self.hyperparams = HyperparamIndex({})
        self.data: dict[str, Any] = {}
        self.callbacks: Any = None
        self.evaluation: Any = None
        self.snapshots: Any = None
        self.fit = FitRecord()
        self.outer_step_in_epoch = 0
        self.on_data: Callable[[str, Any], None] = lambda name, source: None
        self.on_model: Callable[[Any], None] = lambda model: None
        # The carry as it is, as programs take it (`_layout` says how it lies in these arrays), or both.
        self._carry: dict[str, Any] | None = None
        self._arrays: list[Any] | None = None
        self._layout: CarryLayout | None = None
        self._borrowed: dict[StatePath, tuple[PyTree, PyTree]] = {}  # parts taken out of `_arrays`, and their indices
        self._riding: frozenset[str] = frozenset()
        self._lost: BaseException | None = None
        self.copies: dict[Any, Any] = {}
        self._copies_from: Any = None

    # -- the carry --------------------------------------------------------------------------

    @property
    def carry(self) -> dict[str, Any]:
        """The carry: live arrays, donated to the next step.

        Raises:
            StateLostError: It went down with a failed call, or is not built yet.
        """
        if self._carry is not None:
            return self._carry
        if self._arrays is None or self._layout is None:
            if self._lost is None:
                raise MissingStateError(
                    "The train state does not exist yet, because nothing has told the shape of a batch.",
                    fix="give the Learner `data=` or `example_batch=`, or run the first step",
                )
            raise StateLostError(
                f"The train state is gone: the call it was donated to failed ({type(self._lost).__name__}).",
                why="a donated array is overwritten by the program it was given to, also when that fails",
                fix="build a new Learner, and restore a checkpoint",
            ) from self._lost
        carry = self._layout.unpack(self._arrays)
        for root, (part, _) in self._borrowed.items():
            carry = _with(carry, root, part)
        self._carry, self._borrowed = carry, {}
        return carry

    @carry.setter
    def carry(self, carry: dict[str, Any]) -> None:
        self._carry, self._arrays, self._layout = carry, None, None
        self._borrowed = {}
        self._riding = frozenset(carry["cbstate"])

    @property
    def layout(self) -> CarryLayout | None:
        """How programs take the carry: the layout of its arrays, or None for the carry as it is."""
        return self._layout or CarryLayout.of(self.carry)

    @property
    def signature(self) -> Any:
        """Structure, shapes and dtypes of the carry, hashable."""
        return self._layout.signature if self._layout is not None else signature_of(self.carry)

    def laid_out(self, layout: CarryLayout | None) -> Any:
        """Return the carry as a program takes it, which may donate it.

        Raises:
            TypeError: It is not a carry of that layout.
        """
        if layout is None:
            carry = self.carry
            self._arrays = self._layout = None  # they would outlive a call that fails
            return carry
        if self._arrays is None or (self._layout is not layout and self._layout != layout):
            self._arrays, self._layout = layout.pack(self.carry), layout
        return self._arrays

    def came_back(self, arrays: Any, layout: CarryLayout | None) -> None:
        """Take the carry as a program returned it."""
        if layout is None:
            self._carry, self._arrays, self._layout = arrays, None, None
            return
        if arrays is not self._arrays:  # what was taken out of them is gone with them
            if self._carry is not None:
                layout.discard(self._carry, layout.indices)
                self._carry = None
            for part, indices in self._borrowed.values():
                layout.discard(part, indices)
            self._borrowed = {}
        self._arrays, self._layout = arrays, layout

    def train_state(self) -> PyTree:
        """Return a copy of the whole train state as one pytree; see `Learner.state`."""
        counters = self.carry["counters"][: len(COUNTERS)]  # the rest of this array is the random key
        return {**own_copy({**self.carry, "counters": counters}), "key": jnp.copy(self.run_key)}

    def set_train_state(self, state: PyTree) -> None:
        """Replace the train state by one that `train_state` returned, possibly with other values.

        Raises:
            DeclarationError: The new state has another structure, or arrays of other shapes or dtypes.
        """
        wrong = differences(self.train_state(), state)
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
        self.step, self.epoch, self.step_in_epoch, _ = counters

    def copies_of(self, paths: Sequence[StatePath]) -> dict[StatePath, Callable[[], PyTree]]:
        """Copy parts of the carry as it is now, without waiting for them; the calls that return them may wait."""
        if not paths:
            return {}
        arrays, layout = self._arrays, self._layout
        if arrays is None or layout is None:
            copies = {path: copy_tree(part_of(self.carry, self.hyperparams, path)) for path in paths}
            return {path: functools.partial(copies.__getitem__, path) for path in paths}
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
        """An array of the carry, as programs take it: it lies where all do, is ready when all are, and is donated."""
        return self._arrays[0] if self._arrays is not None else self.carry["counters"]

    @property
    def platform(self) -> str:
        """The platform of the devices on which the carry lies, e.g. `cpu`."""
        return next(iter(self.some_array.devices())).platform

    def lose(self, error: BaseException) -> None:
        """Note that the carry was donated to a call that failed."""
        self._carry = self._arrays = self._layout = None
        self._borrowed = {}
        self._lost = error

    @property
    def run_key(self) -> Any:
        """The run's random key (typed)."""
        return self._run_key

    @run_key.setter
    def run_key(self, key: Any) -> None:
        self._run_key = key
        self._key_words = np.asarray(jax.random.key_data(key)).view(np.int32).tolist()

    def model_key(self) -> Any:
        """Return the random key (typed) that a model is initialised with.

        It is made on the host, by NumPy's `SeedSequence`, where `jax.random.fold_in` would compile a program for it.
        """
        words = np.asarray(jax.random.key_data(self._run_key))
        own = np.random.SeedSequence(words.tolist(), spawn_key=(0,)).generate_state(words.size)
        return jax.random.wrap_key_data(jax.device_put(own), impl=jax.random.key_impl(self._run_key))

    def counters(self, values: Sequence[int]) -> jax.Array:
        """Return what the carry has as `counters`: these values, and the words of the run's key."""
        return jax.device_put(self._counters(values))

    def _counters(self, values: Sequence[int]) -> np.ndarray:
        return np.array([*values, *self._key_words], np.int32)

    def set_counters(self, **values: int) -> None:
        """Put host counters into the carry's `counters`."""
        held = {"step": self.step, "epoch": self.epoch, "step_in_epoch": self.step_in_epoch, "stopped": 0, **values}
        counters = self._counters([held[name] for name in COUNTERS])
        if self._arrays is not None and self._layout is not None:
            self._arrays = self._layout.replaced(self._arrays, self._layout.indices["counters"], counters)
            if self._carry is not None:
                self._carry = {**self._carry, "counters": jax.device_put(counters)}
            return
        old = self.carry["counters"]
        # Keep the placement (device or sharding) the compiled program expects.
        self.carry = {**self.carry, "counters": jax.device_put(counters, old.sharding if old.committed else None)}

    def copy_of(self, root: StatePath) -> PyTree:
        """Return a copy of a part of the carry; one per state of the carry, shared by its readers."""
        arrays, layout = self._arrays, self._layout
        now = arrays if arrays is not None else self.carry
        if self._copies_from is not now:
            self.copies, self._copies_from = {}, now
        if root not in self.copies:
            if arrays is None or layout is None:
                self.copies[root] = copy_tree(self.live(root))
            else:
                part = part_of(layout.indices, self.hyperparams, root)
                self.copies[root] = layout.part(layout.copy(arrays, part, small=False), part)
        return self.copies[root]

    def live(self, root: StatePath) -> PyTree:
        """Return a part of the carry itself, donated to the next step."""
        arrays, layout = self._arrays, self._layout
        if self._carry is None and arrays is not None and layout is not None:
            if root not in self._borrowed:
                indices = part_of(layout.indices, self.hyperparams, root)
                self._borrowed[root] = layout.part(arrays, indices), indices
            return self._borrowed[root][0]
        return self.carry["cbstate"][root[1]] if root[0] == "cbstate" else self.carry[root[0]]

    def replace(self, root: StatePath, value: PyTree) -> None:
        """Put a new value into the carry."""
        if self.window is not None:  # who reads it at this step sees the new value
            self.window.overwritten.add(root)
        self.carry = _with(self.carry, root, value)

    def cancelled_of(self, phase: Phase) -> int:
        """Return how many steps were cancelled at StepBegin: in the training, or in an epoch that does not train."""
        return self.cancelled if type(phase).trains else self.cancelled_in_epoch

    def in_carry(self, name: str) -> bool:
        """Tell whether a `cbstate` entry rides in the carry."""
        return name in self._riding and self.alive

    def forget_copies(self) -> None:
        """Free the copies that the handlers of a moment shared."""
        if self.copies:
            self.copies, self._copies_from = {}, None

    def verify_handed(self) -> None:
        """Refuse writes into copies: they would be lost."""
        handed, self.handed = self.handed, []
        for who, path, fresh, leaves, structure in handed:
            now, now_structure = jax.tree.flatten(fresh)
            if now_structure == structure and all(a is b for a, b in zip(now, leaves, strict=True)):
                continue
            raise AccessError(
                f"{who} writes into the container it read from `{dotted(path)}`.",
                why="what is read is a copy, so the change would be lost",
                fix=f"declare Write(), change a copy, and assign it: `learner.{dotted(path)} = copy`",
            )


def _with(carry: dict[str, Any], root: StatePath, value: PyTree) -> dict[str, Any]:
    """Return a carry with another value for one part of it."""
    if root[0] == "cbstate":
        return {**carry, "cbstate": {**carry["cbstate"], root[1]: value}}
    return {**carry, root[0]: value}
