"""The description of a run in its checkpoints, with which a program that resumes the run is compared."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import jax

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.callback import unwrap
from fluxcb._declare.described import Description
from fluxcb._declare.phases import Phase
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.state import HostState
from fluxcb.data.sources import length_of, order_of

__all__ = ["SnapshotSource", "describe_run"]

_PACKAGES = ("fluxcb", "jax", "jaxlib", "numpy", "optax")


class SnapshotSource(Protocol):
    """The parts of a Learner that a snapshot contains; `LearnerCore` has them."""

    state: HostState
    graph: CallbackGraph
    streams: dict[str, BatchStream]
    phases: tuple[Phase, ...]
    switching: frozenset[str] | None

    def program_kinds(self, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the kind of program that each phase's steps run in, by the name of the phase."""
        ...

    def adopt_kinds(self, recorded: Mapping[str, str]) -> None:
        """Run the kinds of programs that a restored checkpoint has recorded, where a measurement chooses them."""
        ...

    def schedule_of_phases(self) -> list[str]:
        """Return the training phases in the order in which an epoch runs them."""
        ...


def describe_run(
    core: SnapshotSource, optimizer: Description, unsaved_fields: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return a description of the run: callbacks, optimizer, data, phases, programs, versions, and devices.

    Args:
        core: The core of the Learner.
        optimizer: The description of the optimizer.
        unsaved_fields: The fields of callbacks that the checkpoint does not contain; see `UnsavedFields.changed`.
    """
    declared, train = core.graph.declared, core.state.train
    arguments = {d.name: getattr(d.callback, "_fluxcb_arguments", None) for d in declared}
    about = {
        "callbacks": {d.name: _class_of(d.callback) for d in declared},
        "layouts": {d.name: f"({text})" for d in declared if (text := unwrap(d.callback).carried_layout)},
        # Copies of callbacks do not know the arguments with which the original was constructed.
        "arguments": {name: found for name, found in arguments.items() if found is not None},
        "unsaved_fields": unsaved_fields,
        "optimizer": optimizer,
        "hyperparams": dict(train.given_hyperparams),
        "key": train.given_key_text,  # the program may have assigned another key since
        "data": {name: _data(stream.source) for name, stream in core.streams.items()},
        "phases": core.schedule_of_phases(),
        "programs": core.program_kinds(),
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "devices": [train.platform, jax.device_count(), platform.machine(), _mesh(train.placement)],
    }
    # Not known between two fits, and in a loop of the user.
    fit = core.state.fit
    return about if fit.steps_per_epoch is None else {**about, "fit": {"steps_per_epoch": fit.steps_per_epoch}}


def _data(source: Any) -> dict[str, Any]:
    batches, order = length_of(source), order_of(source)
    # Without the entry, `find_changes` does not compare the order.
    return {"batches": batches, "order": order} if order else {"batches": batches}


def _mesh(placement: Any) -> str:
    if placement is None:
        return "none"
    axes = ", ".join(f"{name}={size}" for name, size in placement.mesh.shape.items())
    count = jax.process_count()
    return f"{axes} ({count} {'process' if count == 1 else 'processes'})"


def _class_of(callback: Any) -> str:
    cls = type(unwrap(callback))
    # Files of the library can move between versions, but the public name stays.
    module = "fluxcb.callbacks" if cls.__module__.startswith("fluxcb.callbacks.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


@functools.cache  # reads files
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
