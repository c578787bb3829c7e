"""The laws that every callback keeps, tried out on one callback."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Append, Permission, Read, dotted, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import Event, StepBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._typing import StatePath

__all__ = ["Laws"]


class Laws:
    """One check of one callback; `fluxcb.testing.check_callback` says which laws there are.

    Args:
        make: Returns a new instance of the callback.
        needs: Makers of the callbacks it cannot do without.
        beside: Maker of a callback that touches nothing, to have something to reorder.
        learner: Builds the Learner.
        epochs: How long it is trained (epochs).
        unused: Declared paths that need not be touched.
        handles: Fields that need not be restored.

    Attributes:
        label: What messages call the callback.
        broken: What was found, one text per broken law.
        cause: The first exception met on the way.
    """

    def __init__(
        self,
        make: Callable[[], Callback],
        *,
        needs: tuple[Callable[[], Callback], ...],
        beside: Callable[[], Callback],
        learner: Callable[..., Any],
        epochs: int,
        unused: frozenset[str],
        handles: frozenset[str],
    ) -> None:
        self.make, self.needs, self.beside = make, needs, beside
        self.learner, self.epochs = learner, epochs
        self.unused, self.handles = unused, handles
        self.label = repr(make())
        self.broken: list[str] = []
        self.cause: BaseException | None = None

    def check(self) -> None:
        """Go through the laws; without the first there is nothing to say about the others."""
        reference = self._alone()
        if reference is None:
            return
        self._with_defaults()
        others: list[Callable[[], Callback]] = [self.beside]
        for law, makers, reorder in (
            ("when the callbacks list is turned round", others, lambda items: items[::-1]),
            ("when the callbacks list is rotated", others, lambda items: items[1:] + items[:1]),
            ("when every step is a window of its own", [_MayCancel], lambda items: items),
        ):
            self._same_state(reference, law, makers, reorder)
        self._same_state(reference, "when three steps run in one call", [], lambda items: items, steps_per_call=3)

    def _fresh(self) -> tuple[Callback, list[Callback]]:
        callback = self.make()
        return callback, [callback, *(make() for make in self.needs)]

    def _alone(self) -> Any:
        callback, items = self._fresh()
        with _quiet(), _recorded() as touched:
            try:
                learner = self.learner(*items, default_callbacks=False)
                created, fields = _snapshot(learner.cbstate), _fields(callback)
                learner.callbacks.set(items)
                self._init_again(created, learner.cbstate, "")
                learner.fit(1)
                counts = learner.compile_counts
                if self.epochs > 1:
                    learner.fit(self.epochs - 1)
            except Exception as error:
                self._fails("without the default callbacks", error)
                return None
            if learner.compile_counts != counts:
                self.broken.append(
                    f"After the first epoch the step is traced or compiled again: {counts} became "
                    f"{learner.compile_counts}. Traced handlers must not depend on what changes in Python."
                )
            trained = _snapshot(learner.cbstate)
            state, after = _leaves(learner.state), _fields(callback)
            learner.callbacks.set(items)
            self._init_again(trained, learner.cbstate, " after training")
            self._access(callback, learner, touched)
            self._state_dict(callback, fields, after)
        return state

    def _fails(self, how: str, error: Exception) -> None:
        self.broken.append(f"It does not train {how}. {type(error).__name__}: {error}".replace("\n", "\n  "))
        self.cause = self.cause or error

    def _with_defaults(self) -> None:
        _, items = self._fresh()
        with _quiet():
            try:
                self.learner(*items, default_callbacks=True).fit(self.epochs)
            except Exception as error:
                self._fails("beside the default callbacks", error)

    def _same_state(
        self,
        reference: list[Any],
        law: str,
        others: Sequence[Callable[[], Callback]],
        reorder: Callable[[list[Any]], Any],
        *,
        steps_per_call: int | None = None,
    ) -> None:
        _, items = self._fresh()
        with _quiet():
            try:
                learner = self.learner(*reorder([*items, *(make() for make in others)]), default_callbacks=False)
                if steps_per_call is not None:  # not by argument: who builds the Learner need not have one
                    learner._parts.engine.programs.steps_per_call = steps_per_call
                learner.fit(1)
                if self.epochs > 1:
                    learner.fit(self.epochs - 1)
            except Exception as error:
                self._fails(law, error)
                return
            found = _leaves(learner.state)
        wrong = [name for (name, a), (other, b) in zip(reference, found, strict=False) if name != other or a != b]
        if wrong or len(reference) != len(found):
            self.broken.append(f"The train state differs {law}: {', '.join(wrong[:5]) or 'in its structure'}.")

    # -- access -----------------------------------------------------------------------------

    def _access(self, callback: Callback, learner: Any, touched: dict[int, _Touches]) -> None:
        declared = next(d for d in learner._parts.graph.declared if d.callback is callback)
        seen = touched.get(id(callback), _Touches())
        for _, step in learner._parts.engine.programs._steps.values():
            for handler, traced in step.touched.items():
                if handler.declared.callback is callback:
                    seen.read |= traced.read
                    seen.written |= traced.written
        for path, permission in declared.access.items():
            name = dotted(path)
            if path[0] in ("*", "control") or name in self.unused:
                continue
            said = f"It declares {type(permission).__name__}() on `{name}`"
            if writes(permission) and not _touches(path, seen.written):
                if not _touches(path, seen.read):
                    self.broken.append(f"{said}, and never touches it in {self.epochs} epochs.")
                elif not (isinstance(permission, Append) or _touches(path, seen.changeable)):
                    self.broken.append(f"{said}, and only reads it; declare Read().")
            elif isinstance(permission, Read) and not _touches(path, seen.read):
                self.broken.append(f"{said}, and never reads it in {self.epochs} epochs.")

    # -- init and saved state -----------------------------------------------------------------

    def _init_again(self, before: Any, now: Any, when: str) -> None:
        names = {**before, **now}
        wrong = [n for n in names if n not in before or n not in now or not _same(before[n], now[n])]
        if wrong:
            self.broken.append(
                f"`init` run a second time{when} changes `cbstate.{wrong[0]}`; create it only "
                f'`if "{wrong[0]}" not in learner.cbstate`.'
            )

    def _state_dict(self, callback: Callback, before: dict[str, Any], after: dict[str, Any]) -> None:
        saved = _snapshot(callback.state_dict())
        other = self.make()
        try:
            other.load_state_dict(_snapshot(saved))
        except Exception as error:
            self._fails("after `load_state_dict(state_dict())`", error)
            return
        if not _same(saved, other.state_dict()):
            self.broken.append("`load_state_dict(state_dict())` does not bring back what `state_dict` gave.")
        restored = _fields(other)
        for name, value in after.items():
            first = before.get(name, getattr(type(unwrap(callback)), name, None))
            if name in self.handles or _same(first, value) or _same(restored.get(name), value):
                continue
            self.broken.append(
                f"Its field `{name}` changes during training (from {_short(first)} to {_short(value)}), and is not "
                "restored by `load_state_dict`. Save it in `state_dict`, or put it into `learner.cbstate`."
            )


class _MayCancel(Callback):
    """Bounds every window to one step, and does nothing."""

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare that it may cancel."""
        return {"control": Append()}

    @on(StepBegin)
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Do nothing."""


class _Touches:
    """Paths that one callback's host handlers and `init` touched."""

    def __init__(self) -> None:
        self.read: set[StatePath] = set()
        self.written: set[StatePath] = set()
        self.changeable: set[StatePath] = set()  # read under Write(): what it got may have been changed in place


@contextlib.contextmanager
def _recorded() -> Iterator[dict[int, _Touches]]:
    """Record what all callbacks touch on the host, and whether traced handlers ask what there is; by identity."""
    from fluxcb._compile.handler_backend import HandlerBackend
    from fluxcb._run.host_backend import HostBackend

    touched: dict[int, _Touches] = {}
    kept = HostBackend.read, HostBackend.write, HostBackend.names, HandlerBackend.names, HostBackend.reader

    def of(declared: Any) -> _Touches:
        return touched.setdefault(id(declared.callback), _Touches())

    def read(self: Any, path: StatePath, permission: Permission) -> Any:
        seen = of(self._declared)
        seen.read.add(path)
        if writes(permission):
            seen.changeable.add(path)
        return kept[0](self, path, permission)

    def reader(self: Any, path: StatePath, permission: Permission) -> Callable[[], Any]:
        inner, seen = kept[4](self, path, permission), of(self._declared)

        def recorded() -> Any:
            seen.read.add(path)
            if writes(permission):
                seen.changeable.add(path)
            return inner()

        return recorded

    def write(self: Any, path: StatePath, value: Any, permission: Permission) -> None:
        of(self._declared).written.add(path)
        kept[1](self, path, value, permission)

    def names(self: Any, path: StatePath) -> Iterator[str]:
        of(self._declared).read.add(path)
        return kept[2](self, path)

    def traced_names(self: Any, path: StatePath) -> Iterator[str]:
        of(self._handler.declared).read.add(path)
        return kept[3](self, path)

    HostBackend.read, HostBackend.write, HostBackend.names = read, write, names
    HandlerBackend.names, HostBackend.reader = traced_names, reader
    try:
        yield touched
    finally:
        HostBackend.read, HostBackend.write, HostBackend.names = kept[:3]
        HandlerBackend.names, HostBackend.reader = kept[3:]


def _touches(path: StatePath, seen: Iterable[StatePath]) -> bool:
    return any(path[: len(p)] == p or p[: len(path)] == path for p in seen)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _fields(callback: Callback) -> dict[str, Any]:
    return {name: _snapshot(value) for name, value in vars(unwrap(callback)).items() if not name.startswith("_fluxcb")}


def _snapshot(value: Any) -> Any:
    """Return a copy that stays as it is, or the thing itself where it cannot be copied."""
    if isinstance(value, Mapping):
        return {key: _snapshot(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # consoles, locks and the like: they are compared by identity
        return value


def _leaves(state: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a train state as (name, bits)."""
    import jax
    import numpy as np

    def bits(x: Any) -> Any:
        data = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        array = np.asarray(data)
        return str(array.dtype), array.shape, array.tobytes()

    return [(jax.tree_util.keystr(path), bits(x)) for path, x in jax.tree_util.tree_flatten_with_path(state)[0]]


def _same(a: Any, b: Any) -> bool:
    """Compare values as a checkpoint would: arrays by their bits, containers and plain objects by what they hold."""
    if a is b:
        return True
    if hasattr(a, "dtype") and hasattr(b, "dtype"):
        return _leaves(a) == _leaves(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return _same(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)  # NaN is the same as NaN here


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
