"""The costs of a step, divided between the model, the optimizer, and the traced handlers.

XLA counts the operations of a whole program. Handlers and the optimizer are traced in scopes of their own, so the
operations of a step can be divided by scope. Each part then becomes a program that XLA counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from fluxcb._compile.step import jaxprs_in
from fluxcb._errors import DeclarationError

__all__ = ["Cost", "CountedStep", "count_step"]


@dataclass(frozen=True)
class Cost:
    """The cost of some operations.

    Attributes:
        flops: Number of operations on array elements. Additions, comparisons and exponentials count as one each.
        bytes: Size of the operands and results of all operations, before XLA fuses operations (bytes).
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __sub__(self, other: Cost) -> Cost:
        return self + -1 * other

    def __rmul__(self, times: float) -> Cost:
        return Cost(times * self.flops, times * self.bytes)


@dataclass(frozen=True)
class CountedStep:
    """The costs of one step.

    Attributes:
        parts: The cost of each scope that has operations. The key "" stands for the operations outside of all scopes,
            which are those of the phase and the model.
        repeated: The part of these costs that is due to all but the first iteration of loops. XLA's count of a program
            has each loop body once.
        xla: XLA's count of the whole step.
    """

    parts: Mapping[str, Cost]
    repeated: Cost
    xla: Cost

    @property
    def whole(self) -> Cost:
        """XLA's count of the whole step, with all iterations of loops."""
        return self.xla + self.repeated

    @property
    def remainder(self) -> Cost:
        """The cost of the whole step that is in none of the parts."""
        return self.whole - sum(self.parts.values(), Cost())


def count_step(step: Callable[..., Any], scopes: Collection[str], *arguments: Any) -> CountedStep:
    """Return the costs of a step, without compiling or running it.

    Args:
        step: The function of one step.
        scopes: The scopes between which its operations are divided.
        *arguments: The specs of the arguments of the function.

    Raises:
        DeclarationError: XLA cannot count the operations.
    """
    with jax.default_device(_cpu()):
        return _count(step, scopes, *arguments)


def _cpu() -> Any:
    """Return a CPU device. Only for the CPU, XLA counts the operations of a program that has not been compiled.

    Steps that run on another device are counted for the CPU, too: without fusion, they have the same operations.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise _uncountable("JAX may not use the CPU, and only for the CPU, XLA counts operations") from error


def _uncountable(why: str) -> DeclarationError:
    return DeclarationError(
        "The costs of a step cannot be counted.",
        why=why,
        fix="run the program with the environment variable `JAX_PLATFORMS=cpu`, which gives the same costs",
    )


def _count(step: Callable[..., Any], scopes: Collection[str], *arguments: Any) -> CountedStep:
    traced = jax.jit(step).trace(*arguments)
    jaxpr = traced.jaxpr.jaxpr
    # Longest first, because the name of a scope can be the beginning of another one.
    names = sorted(scopes, key=len, reverse=True)
    equations: dict[str, list[Any]] = {}
    for equation in jaxpr.eqns:
        # Operations of a gradient have names such as `transpose(jvp(scope))`.
        stack = str(equation.source_info.name_stack)
        equations.setdefault(next((name for name in names if name in stack), ""), []).append(equation)
    parts, repeated = {}, Cost()
    for scope, members in equations.items():
        further = _repetitions(members)
        parts[scope] = _counted(_part(jaxpr, members)) + further
        repeated += further
    return CountedStep(parts, repeated, _as_cost(traced.lower()))


def _part(jaxpr: Any, equations: list[Any]) -> Any:
    """Return the jaxpr of some of the equations of a jaxpr."""
    made = {variable for equation in equations for variable in equation.outvars}
    members = set(map(id, equations))
    others = [_variables(equation.invars) for equation in jaxpr.eqns if id(equation) not in members]
    needed = {variable for variables in (*others, _variables(jaxpr.outvars)) for variable in variables}
    # Constants become inputs as well, because only their shapes matter for the count.
    inputs = dict.fromkeys(v for equation in equations for v in _variables(equation.invars) if v not in made)
    outputs = [v for equation in equations for v in equation.outvars if v in needed]
    return jaxpr.replace(constvars=[], invars=list(inputs), outvars=outputs, eqns=equations)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _counted(jaxpr: Any) -> Cost:
    """Return XLA's count of a jaxpr."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    function = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), ()))
    return _as_cost(jax.jit(function).lower(*specs))


def _as_cost(lowered: jax.stages.Lowered) -> Cost:
    # Before optimization, because a fused operation belongs to several parts.
    counts: Any = lowered.cost_analysis()
    if counts is None:
        raise _uncountable("the step uses a mesh of accelerators, and only for the CPU, XLA counts operations")
    # The result has no entry for a count of zero. XLA counts functions such as `exp` separately.
    return Cost(counts.get("flops", 0.0) + counts.get("transcendentals", 0.0), counts.get("bytes accessed", 0.0))


def _repetitions(equations: Iterable[Any]) -> Cost:
    """Return the cost of the iterations of loops that XLA's count does not have."""
    total = Cost()
    for equation in equations:
        # These bodies need the axes of a mesh or the memory of a kernel, so they cannot be counted alone.
        if equation.primitive.name in ("shard_map", "pallas_call"):
            continue
        inside = [(body, _repetitions(body.eqns)) for body in jaxprs_in(equation)]
        if equation.primitive.name == "scan":
            ((body, further),) = inside
            length, unroll = equation.params["length"], equation.params["unroll"]
            # An unrolled loop has several copies of the body, and more of them after the loop.
            missing = length - min(length, unroll + length % unroll)
            if missing:
                total += missing * _counted(body)
            total += length * further
        elif equation.primitive.name == "cond":
            # XLA counts the most expensive branch.
            total += max((further for _, further in inside), key=lambda cost: cost.flops)
        else:
            # A `while` loop has an unknown number of iterations, so its body counts once.
            total += sum((further for _, further in inside), Cost())
    return total
