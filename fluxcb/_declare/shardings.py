"""Declared shardings: the mesh, and which axes of the mesh each array is divided over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fluxcb._calls import Constructed, entry_point
from fluxcb._errors import DeclarationError

__all__ = ["FSDP", "Ragged", "Sharding", "as_sharding", "automatic_mesh", "automatic_placement", "fsdp", "mesh"]

Ragged = Literal["error", "drop", "pad"]

_MIB = 2**20


@entry_point
def mesh(data: int = -1, model: int = 1, *, devices: Sequence[Any] | None = None, **axes: int) -> Any:
    """Return a mesh of devices for `Learner(mesh=...)`.

    Args:
        data: Number of devices along the axis `data`, over which batches are divided. -1 for all devices that the other
            axes leave.
        model: Number of devices along the axis `model`.
        devices: The devices. By default, all devices of all processes.
        **axes: Further axes by name, each with its number of devices.

    Returns:
        A `jax.sharding.Mesh` with the axes `data` and `model`, followed by those in `axes`.

    Raises:
        DeclarationError: A size is not a positive whole number, or the sizes do not match the number of devices.

    Example:
        >>> import fluxcb
        >>> mesh = fluxcb.mesh(data=-1, model=1)
        >>> mesh.axis_names
        ('data', 'model')
    """
    import jax

    sizes = {"data": data, "model": model, **axes}
    for name, size in sizes.items():
        if type(size) is not int or (size < 1 and size != -1):
            raise DeclarationError(
                f"`{name}` of `fluxcb.mesh` must be a number of devices, or -1, not {size!r}.",
                fix=f"write e.g. `fluxcb.mesh({name}=1)`",
            )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise DeclarationError(
            f"`fluxcb.mesh` got -1 for several axes: {', '.join(open_axes)}.",
            why="-1 means all devices that the other axes do not use, so only one axis can have it",
            fix=f"set `{open_axes[1]}` to a number of devices",
        )
    chosen = list(jax.devices() if devices is None else devices)
    fixed = 1
    for size in sizes.values():
        fixed *= size if size != -1 else 1
    if len(chosen) % fixed or (not open_axes and len(chosen) != fixed):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        fixes = ["let one axis use the remaining devices: `fluxcb.mesh(data=-1)`"]
        if fixed < len(chosen):
            fixes.append(f"choose the devices: `fluxcb.mesh({shown}, devices=jax.devices()[:{fixed}])`")
        raise DeclarationError(
            f"A mesh with {shown} does not fit {len(chosen)} devices.",
            why=f"the sizes multiply to {fixed}, which must "
            + ("divide the number of devices" if open_axes else "be the number of devices"),
            fix=fixes,
        )
    shape = tuple(len(chosen) // fixed if size == -1 else size for size in sizes.values())
    automatic = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(sizes), axis_types=automatic, devices=chosen)


@dataclass(frozen=True)
class FSDP:
    """The rule that `fsdp` returns. It divides each large parameter over one axis of the mesh.

    Attributes:
        axis: The axis of the mesh.
        min_bytes: The smallest parameter that is divided (bytes).
    """

    axis: str
    min_bytes: int

    def dimension(self, shape: Sequence[int], nbytes: int, devices: int) -> int | None:
        """Return the dimension to divide: the largest that the devices divide evenly. None to replicate the array."""
        if nbytes < self.min_bytes:
            return None
        even = [position for position, size in enumerate(shape) if size and size % devices == 0]
        return max(even, key=lambda position: shape[position], default=None)

    def __repr__(self) -> str:
        """Return the call that created the rule."""
        return f"fsdp(axis={self.axis!r}, min_bytes={self.min_bytes})"


@entry_point
def fsdp(axis: str = "data", min_bytes: int = 4 * _MIB) -> FSDP:
    """Return a rule that divides each large parameter over the devices of one mesh axis (fully sharded data parallel).

    The rule divides the largest dimension that the number of devices divides evenly. Parameters without such a
    dimension are replicated.

    Args:
        axis: The axis of the mesh.
        min_bytes: The smallest parameter that is divided (bytes). Collecting smaller ones costs more than it saves.

    Raises:
        DeclarationError: `axis` is not a string, or `min_bytes` is not a whole number of at least 0.

    Example:
        >>> import fluxcb
        >>> fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=2**20))
        Sharding(params=fsdp(axis='data', min_bytes=1048576))
    """
    if not isinstance(axis, str) or not axis:
        raise DeclarationError(
            f"`axis` of `fsdp` must be the name of a mesh axis, not {axis!r}.", fix='write e.g. `fsdp(axis="data")`'
        )
    if type(min_bytes) is not int or min_bytes < 0:
        raise DeclarationError(
            f"`min_bytes` of `fsdp` must be a number of bytes, not {min_bytes!r}.",
            fix="write e.g. `fsdp(min_bytes=2**20)`",
        )
    return FSDP(axis, min_bytes)


class Sharding(Constructed):
    """Declare how the arrays of a training are divided over a mesh, for `Learner(mesh=..., sharding=...)`.

    A rule for parameters is one of the following, or a list of several. The first rule that matches a parameter
    decides. Parameters that no rule matches are replicated.

    - `fsdp(...)`.
    - A mapping of path patterns to `jax.sharding.PartitionSpec`. Patterns are matched against dotted paths, such as
      `encoder.*.kernel`, in the way of file names. They may be written with `/` instead of dots. The path of a
      container matches all parameters in it.
    - A function `rule(path, shape)` that returns a `PartitionSpec`, or None if it does not match.

    Args:
        params: The rule for parameters. None keeps the shardings of parameters that are divided over the mesh already.
            For the others, it uses the annotations of Flax modules (`nnx.with_partitioning`, `nn.with_partitioning`).
            Parameters without annotation are replicated.
        opt_state: A rule for the optimizer state. Arrays that it does not match, or all of them without a rule, are
            divided like the parameter whose path and shape they have. Other arrays are replicated.
        batch: A `PartitionSpec` for all arrays of a batch, or a rule for them. By default, the leading axis is divided
            over the axis `data` of the mesh (and `fsdp`, if there is one), or over the only axis.
        cbstate: A rule for the arrays of `cbstate` that traced handlers use; see `opt_state`.
        ragged: What to do with a batch that the devices cannot divide evenly: `"error"`, `"drop"` to leave it out, or
            `"pad"`. With `"pad"`, every batch gets a mask, and batches that are smaller than the first one are filled
            up. The loss function must take the batch, and average with `batch.mask`. `Metrics` use the mask.

    Raises:
        DeclarationError: A rule or `ragged` is none of the above.

    Example:
        >>> import fluxcb
        >>> from jax.sharding import PartitionSpec as P
        >>> fluxcb.Sharding(params={"*.up": P(None, "model"), "*.down": P("model", None)}, ragged="drop")
        Sharding(params={'*.up': P(None, 'model'), '*.down': P('model', None)}, ragged='drop')
    """

    def __init__(
        self,
        params: Any = None,
        opt_state: Any = None,
        batch: Any = None,
        cbstate: Any = None,
        *,
        ragged: Ragged = "error",
    ) -> None:
        self.params = _rules(params, "params")
        self.opt_state = _rules(opt_state, "opt_state")
        self.batch = _rules(batch, "batch", allows_spec=True)
        self.cbstate = _rules(cbstate, "cbstate")
        if ragged not in ("error", "drop", "pad"):
            raise DeclarationError(
                f"`ragged` of `Sharding` is 'error', 'drop' or 'pad', not {ragged!r}.", fix="write `ragged='error'`"
            )
        self.ragged: Ragged = ragged
        self._given = {"params": params, "opt_state": opt_state, "batch": batch, "cbstate": cbstate}

    def __repr__(self) -> str:
        """Return the call that created it, without defaults."""
        shown = [f"{name}={_shown(value)}" for name, value in self._given.items() if value is not None]
        shown += [f"ragged={self.ragged!r}"] if self.ragged != "error" else []
        return f"Sharding({', '.join(shown)})"


REPLICATED: Callable[..., Any] = lambda path, shape: None  # noqa: E731 - a rule; annotations are not used then
"""The rule of `sharding="replicated"`, which matches nothing."""


def as_sharding(sharding: Any, mesh: Any) -> Sharding:
    """Return the argument `sharding` of a Learner that has a mesh.

    Raises:
        DeclarationError: It is something else.
    """
    if sharding is None:
        return Sharding()
    if isinstance(sharding, str) and sharding == "replicated":
        return Sharding(params=REPLICATED)
    if isinstance(sharding, str) and sharding == "fsdp":
        axes: Sequence[str] = mesh.axis_names
        axis = "fsdp" if "fsdp" in axes else "data" if "data" in axes or len(axes) > 1 else axes[0]
        return Sharding(params=FSDP(axis, 4 * _MIB))
    if isinstance(sharding, Sharding):
        return sharding
    if isinstance(sharding, FSDP | Mapping):
        shown = repr(sharding) if isinstance(sharding, FSDP) else "{...}"
        raise DeclarationError(
            f"`sharding` is a rule for parameters, {shown}.",
            why="a `Sharding` also has rules for the optimizer state and the batches",
            fix=f"write `sharding=fluxcb.Sharding(params={shown})`",
        )
    raise DeclarationError(
        f"`sharding` must be 'replicated', 'fsdp' or a `fluxcb.Sharding`, not {sharding!r}.",
        fix=["write `sharding='fsdp'`", "write `sharding=fluxcb.Sharding(params=...)`"],
    )


def automatic_mesh(mesh: Any) -> Any:
    """Return a mesh whose axes have the type Auto.

    Explicit axes, which `jax.make_mesh` creates by default, make shardings part of the types of arrays. A step is
    traced without knowing them, and models would need `out_sharding` arguments. With Auto axes, XLA propagates the
    shardings.
    """
    import jax

    automatic = jax.sharding.AxisType.Auto
    if all(kind == automatic for kind in mesh.axis_types):
        return mesh
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(automatic,) * len(mesh.axis_names))


def automatic_placement(placement: Any) -> Any:
    """Return a device or a sharding; a `NamedSharding` with Auto axes. See `automatic_mesh`."""
    import jax

    if not isinstance(placement, jax.sharding.NamedSharding) or not isinstance(placement.mesh, jax.sharding.Mesh):
        return placement
    mesh = automatic_mesh(placement.mesh)
    if mesh is placement.mesh:
        return placement
    return jax.sharding.NamedSharding(mesh, placement.spec, memory_kind=placement.memory_kind)


def _rules(given: Any, argument: str, *, allows_spec: bool = False) -> tuple[Any, ...] | None:
    """Return the rules in an argument of `Sharding`, or None if there is none."""
    if given is None:
        return None
    if allows_spec and _is_spec(given):
        return ({"*": given},)
    rules = tuple(given) if isinstance(given, list) else (given,)
    for rule in rules:
        fits = isinstance(rule, FSDP | Mapping) or (callable(rule) and not isinstance(rule, type))
        if not fits or _is_spec(rule):
            raise DeclarationError(
                f"`{argument}` of `Sharding` must be `fsdp(...)`, a mapping of path patterns to `PartitionSpec`s, or a "
                f"function of path and shape, not {rule!r}.",
                fix=f'write e.g. `{argument}={{"*": P("data")}}`, with `P = jax.sharding.PartitionSpec`',
            )
        for pattern, spec in rule.items() if isinstance(rule, Mapping) else ():
            if not isinstance(pattern, str) or not _is_spec(spec):
                raise DeclarationError(
                    f"`{argument}` of `Sharding` maps {pattern!r} to {spec!r}; it must map path patterns to "
                    "`PartitionSpec`s.",
                    fix=f'write e.g. `{argument}={{"*": P("data")}}`, with `P = jax.sharding.PartitionSpec`',
                )
    return rules


def _is_spec(value: Any) -> bool:
    jax = sys.modules.get("jax")  # a spec exists only if the user has imported JAX
    return jax is not None and isinstance(value, jax.sharding.PartitionSpec)


def _shown(rule: Any) -> str:
    text = repr(rule) if not isinstance(rule, list) else f"[{', '.join(map(_shown, rule))}]"
    if callable(rule) and not isinstance(rule, FSDP):
        return getattr(rule, "__qualname__", text)
    return text.replace("PartitionSpec(", "P(")
