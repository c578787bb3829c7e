"""One step for all members of a population: their traced steps compared, and combined.

The members of a population run in one program. This needs one jaxpr, so their jaxprs must perform the same operations.
Numbers and arrays in which they differ, such as a learning rate that is no hyperparameter, become inputs with one value
for each member.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from fluxcb._compile.arrays import is_key
from fluxcb._compile.step import TracedStep, jaxprs_in

__all__ = ["JointStep", "StepMismatchError", "join_steps"]

# The addresses in the texts of functions and other objects, which differ between members.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class StepMismatchError(Exception):
    """Two members perform different operations.

    Args:
        member: Index of the member that differs from the first one.
        difference: What differs, as text.
    """

    def __init__(self, member: int, difference: str) -> None:
        super().__init__(member, difference)
        self.member, self.difference = member, difference


@dataclass(frozen=True, eq=False)
class JointStep:
    """The step that all members run.

    Attributes:
        step: The step of the first member. Its jaxpr has additional inputs, which follow those of the batch.
        own: The values of these inputs, by member.
    """

    step: TracedStep
    own: tuple[tuple[np.ndarray, ...], ...]


def join_steps(steps: Sequence[TracedStep]) -> JointStep:
    """Combine the steps of all members.

    Raises:
        StepMismatchError: A member performs other operations than the first one.
    """
    first = steps[0]
    closed = first.jaxpr
    literals: dict[tuple[int, int], None] = {}  # positions, in the order in which they were found
    constants: dict[int, None] = {}
    for member, step in enumerate(steps[1:], 1):
        if step.structure != first.structure:
            raise StepMismatchError(member, "its step computes other values")
        found = _Comparison()
        difference = found.compare(closed.jaxpr, step.jaxpr.jaxpr, top=True)
        if difference is not None:
            raise StepMismatchError(member, difference)
        literals.update(dict.fromkeys(found.literals))
        for at, (a, b) in enumerate(zip(closed.consts, step.jaxpr.consts, strict=True)):
            # By identity first, because a comparison of the bits copies both arrays to the host.
            if a is not b and not _same_bits(a, b):
                # The values of all members are stacked into one input.
                if (np.shape(a), np.asarray(a).dtype) != (np.shape(b), np.asarray(b).dtype):
                    raise StepMismatchError(member, f"a constant has shape {np.shape(b)} instead of {np.shape(a)}")
                constants[at] = None
    if not literals and not constants:
        return JointStep(first, tuple(() for _ in steps))
    own = tuple(
        (
            *(np.asarray(_literal_at(step, at).val, _literal_at(first, at).aval.dtype) for at in literals),
            *(np.asarray(step.jaxpr.consts[at]) for at in constants),
        )
        for step in steps
    )
    return JointStep(replace(first, jaxpr=_with_inputs(closed, list(literals), list(constants))), own)


def _literal_at(step: TracedStep, at: tuple[int, int]) -> Any:
    equation, position = at
    return step.jaxpr.jaxpr.eqns[equation].invars[position]


def _with_inputs(closed: ClosedJaxpr, literals: list[tuple[int, int]], constants: list[int]) -> ClosedJaxpr:
    """Return a jaxpr in which some literals and constants are additional inputs."""
    jaxpr = closed.jaxpr
    equations = list(jaxpr.eqns)
    variables = []
    for equation, position in literals:
        old = equations[equation]
        variable = Var(old.invars[position].aval)
        invars = [*old.invars[:position], variable, *old.invars[position + 1 :]]
        equations[equation] = old.replace(invars=invars)
        variables.append(variable)
    moved = [jaxpr.constvars[at] for at in constants]
    kept = [at for at in range(len(closed.consts)) if at not in constants]
    # At the end, because the joint program passes `(batch, own values)` in place of the batch.
    invars = [*jaxpr.invars, *variables, *moved]
    # The names of the arguments are for error messages only, and JAX checks that their number is right.
    names = [*(jaxpr.debug_info.arg_names or ()), *[f"own{at}" for at in range(len(variables) + len(moved))]]
    new = jaxpr.replace(
        constvars=[jaxpr.constvars[at] for at in kept],
        invars=invars,
        eqns=equations,
        debug_info=jaxpr.debug_info._replace(arg_names=tuple(names)),
    )
    return ClosedJaxpr(new, [closed.consts[at] for at in kept])


class _Comparison:
    """Compares two jaxprs.

    Attributes:
        literals: The positions (equation, input) of literals with different values, at the top level.
    """

    def __init__(self) -> None:
        self.literals: list[tuple[int, int]] = []
        self._paired: dict[Any, Any] = {}

    def compare(self, a: Jaxpr, b: Jaxpr, *, top: bool = False) -> str | None:
        """Return the first difference as text, or None."""
        if len(a.eqns) != len(b.eqns):
            return f"its step has {len(b.eqns)} operations instead of {len(a.eqns)}"
        # Not strict, because the next check reports another number of inputs.
        for x, y in zip((*a.constvars, *a.invars), (*b.constvars, *b.invars), strict=False):
            if (difference := self._bind(x, y)) is not None:
                return difference
        if (len(a.invars), len(a.constvars)) != (len(b.invars), len(b.constvars)):
            return "its step has other inputs"
        for number, (x, y) in enumerate(zip(a.eqns, b.eqns, strict=True)):
            if (difference := self._compare_equations(number, x, y, top=top)) is not None:
                return difference
        for x, y in zip(a.outvars, b.outvars, strict=True):
            if not self._same(x, y):
                return "its step returns other values"
        return None

    def _compare_equations(self, number: int, x: Any, y: Any, *, top: bool) -> str | None:
        name = x.primitive.name
        if y.primitive is not x.primitive:
            return f"an operation is `{y.primitive.name}` instead of `{name}`"
        if len(x.invars) != len(y.invars):
            return f"`{name}` has {len(y.invars)} inputs instead of {len(x.invars)}"
        for at, (p, q) in enumerate(zip(x.invars, y.invars, strict=True)):
            if self._same(p, q):
                continue
            # An input for a literal of a branch or a loop would have to be added to the operation around it as well.
            if _is_literal(p) and _is_literal(q) and p.aval.shape == q.aval.shape and top:
                if p.aval.dtype != q.aval.dtype:
                    return f"`{name}` has an input of type {q.aval.dtype} instead of {p.aval.dtype}"
                self.literals.append((number, at))
                continue
            if _is_literal(p) and _is_literal(q):
                return f"`{name}` inside a branch or loop uses {q.val} instead of {p.val}"
            return f"`{name}` has other inputs"
        inside = jaxprs_in(x), jaxprs_in(y)
        if len(inside[0]) != len(inside[1]):
            return f"`{name}` has other branches"
        for p, q in zip(*inside, strict=True):
            if (difference := self.compare(p, q)) is not None:
                return difference
        for parameter, value in x.params.items():
            other = y.params.get(parameter)
            if not _same_parameter(value, other):
                return f"`{name}` has {parameter}={other} instead of {value}"
        for p, q in zip(x.outvars, y.outvars, strict=True):
            if (difference := self._bind(p, q)) is not None:
                return difference
        return None

    def _bind(self, x: Any, y: Any) -> str | None:
        if (x.aval.shape, x.aval.dtype) != (y.aval.shape, y.aval.dtype):
            return f"a value is {y.aval.str_short()} instead of {x.aval.str_short()}"
        # Variables of two jaxprs are never equal, so they are paired where they are defined.
        self._paired[x] = y
        return None

    def _same(self, x: Any, y: Any) -> bool:
        if _is_literal(x) != _is_literal(y):
            return False
        if _is_literal(x):
            return x.aval.dtype == y.aval.dtype and _same_bits(x.val, y.val)
        return self._paired.get(x) is y


def _is_literal(x: Any) -> bool:
    return isinstance(x, Literal)


def _same_bits(a: Any, b: Any) -> bool:
    if is_key(a) and is_key(b):
        # NumPy cannot convert typed keys.
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    # NaN differs from itself, so the bytes are compared.
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _same_parameter(a: Any, b: Any) -> bool:
    """Return whether two parameters of an operation are equal. Functions and jaxprs are compared elsewhere, or not."""
    if callable(a) and callable(b):
        return True  # the rule of a custom derivative, which has been applied already, or a name
    try:
        if bool(a == b):
            return True
    except (TypeError, ValueError):  # arrays
        pass
    # Objects without `__eq__` equal only themselves, so their texts are compared.
    return _text(a) == _text(b)


def _text(value: Any) -> str:
    # Jaxprs in parameters are compared by `jaxprs_in`. As texts they would contain the numbers that may differ.
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if hasattr(getattr(value, "jaxpr", value), "eqns"):
        return "jaxpr"
    return _ADDRESS.sub("", repr(value))
