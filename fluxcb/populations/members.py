"""The members of a population: their keyword arguments, their Learners, and the checks that they fit together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluxcb._compile.arrays import batch_differences, differences, is_key
from fluxcb._compile.joint_step import JointStep, StepMismatchError, join_steps
from fluxcb._declare.callback import unwrap
from fluxcb._declare.signatures import shown_path, source_of
from fluxcb._errors import DeclarationError, TraceError, nearest
from fluxcb._interruptions import is_interruption
from fluxcb._run.executors import SerialExecutor
from fluxcb._run.learner import Learner
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.run_changes import Change
from fluxcb._run.threaded import ThreadedEmitter
from fluxcb._typing import PyTree
from fluxcb.callbacks.defaults import without_output

__all__ = ["check_members", "check_outputs", "joined", "make_members", "member_arguments", "member_label"]

_MEMBER = "member"  # the parameter of a factory that gets the index of the member


def member_arguments(factory: Any, keywords: Mapping[str, Any], options: Collection[str]) -> list[dict[str, Any]]:
    """Return the keyword arguments of each member.

    Args:
        factory: The factory.
        keywords: For each argument of the factory, a sequence with a value for each member, or one value for all.
        options: The names of the population's own options, to find typos in them.

    Raises:
        DeclarationError: The factory cannot be called or has no such argument, there is no sequence, or the sequences
            have different lengths.
    """
    if not callable(factory):
        raise DeclarationError(
            f"`Population` takes a function that builds a Learner, not {factory!r}.",
            fix="write e.g. `Population(make_learner, learning_rate=[1e-3, 1e-2])`",
        )
    _check_names(factory, keywords, options)
    lengths = {name: len(value) for name, value in keywords.items() if _is_sequence(value)}
    if not lengths:
        raise DeclarationError(
            "`Population` was given no sequence, so the number of members is unknown.",
            why="each member gets one value of every sequence, and all values that are not sequences",
            fix="pass e.g. `learning_rate=[1e-3, 1e-2]` or `key=range(8)`",
        )
    (name, count), *others = lengths.items()
    for other, length in others:
        if length != count:
            raise DeclarationError(
                f"`{name}` has {_values(count)}, and `{other}` has {length}.",
                why="each member gets one value of every sequence",
                fix="pass sequences of one length, or a single value for all members",
            )
    if count == 0:
        raise DeclarationError(
            f"`{name}` is empty, so the population would have no members.", fix=f"give `{name}` at least one value"
        )
    arguments = [
        {key: _item(value, index) if key in lengths else value for key, value in keywords.items()}
        for index in range(count)
    ]
    if _MEMBER not in keywords and _takes_member(factory):
        arguments = [{**one, _MEMBER: index} for index, one in enumerate(arguments)]
    return arguments


def _check_names(factory: Callable[..., Any], keywords: Mapping[str, Any], options: Collection[str]) -> None:
    try:
        # A decorated function may accept arguments that the original function does not have.
        parameters = list(inspect.signature(factory, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # some callables of C have no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    called = getattr(factory, "__name__", "the factory")
    for name in keywords:
        if name not in names:
            near = nearest(name, [*names, *options])
            raise DeclarationError(
                f"`{name}` is neither an option of `Population` nor a parameter of `{called}`.",
                where=f"{called}  {source_of(factory)}",
                why=f"`{called}` takes ({', '.join(map(str, parameters))})",
                fix=f"write `{near}=...` instead of `{name}=...`"
                if near
                else [f"leave out `{name}=...`", f"give `{called}` a parameter `{name}`"],
            )


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray | jax.Array):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _item(value: Any, index: int) -> Any:
    item = value[index]
    # A factory expects the number that the user could have written.
    return item.item() if isinstance(item, np.generic) or (isinstance(item, jax.Array) and _is_number(item)) else item


def _is_number(item: jax.Array) -> bool:
    return item.ndim == 0 and not is_key(item)


def _takes_member(factory: Callable[..., Any]) -> bool:
    try:
        return _MEMBER in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables of C have no signature
        return False


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"


def member_label(index: int, arguments: Mapping[str, Any]) -> str:
    """Return the name of a member in messages: `member 2 (learning_rate=0.01)`."""
    shown = [f"{name}={value!r}" for name, value in arguments.items() if name != _MEMBER and _is_short(value)]
    return f"member {index} ({', '.join(shown)})" if shown else f"member {index}"


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and len(repr(value)) <= 40


def make_members(factory: Callable[..., Any], arguments: Sequence[Mapping[str, Any]]) -> list[Learner]:
    """Call the factory for each member, without the default callbacks that print.

    Raises:
        DeclarationError: The factory returns something else, or one Learner twice.
        Exception: An exception of the factory, unchanged, with a note that names the member.
    """
    members: list[Learner] = []
    for index, own in enumerate(arguments):
        try:
            with without_output():  # the progress bars of several members would overwrite each other
                learner = factory(**own)
        except Exception as error:
            error.add_note(f"raised while `Population` built {member_label(index, own)}")
            raise
        if not isinstance(learner, Learner):
            raise DeclarationError(
                f"The factory of a `Population` must return a Learner, not {type(learner).__name__}.",
                fix="return the Learner from the function: `return fluxcb.Learner(...)`",
            )
        if learner in members:
            raise DeclarationError(
                f"The factory returned the same Learner for member {members.index(learner)} and member {index}.",
                why="each member has its own train state and callbacks",
                fix="build the Learner inside the factory",
            )
        members.append(learner)
    return members


def check_members(cores: Sequence[LearnerCore], labels: Sequence[str], checked: set[Any]) -> None:
    """Check that the members can run in one program.

    Args:
        cores: The cores of the members.
        labels: Their names, for messages.
        checked: The steps that have been checked before. This function adds those that it checks.

    Raises:
        DeclarationError: A member has another structure, other phases or batches, or a part that cannot be batched.
        TraceError: A step contains an operation that `vmap` does not support.
    """
    first = cores[0]
    for core, label in zip(cores, labels, strict=True):
        _check_alone(core, label)
        _check_settings(first, core, labels[0], label)
        if core.state.train.built and first.state.train.built:
            lines = differences(first.state.train.carry, core.state.train.carry)
            if lines:
                raise _mismatch("another train state", lines, labels[0], label)
    for position, phase in enumerate(first.phases):
        specs = [core.batch_spec(core.phases[position]) for core in cores]
        if any(spec is None for spec in specs):
            continue  # the shape is not known before the first batch
        for spec, label in zip(specs, labels, strict=True):
            lines, _ = batch_differences(specs[0], spec)
            if lines:
                raise _mismatch(f"other batches of `data.{type(phase).name}`", lines, labels[0], label)
        steps = tuple(
            core.engine.programs.traced(core.phases[position], of) for core, of in zip(cores, specs, strict=True)
        )
        if steps not in checked:
            joint = joined(cores, steps, labels)
            _check_batched(joint, first.state.train.carry, len(cores), type(phase).__name__)
            checked.add(steps)


def joined(cores: Sequence[LearnerCore], steps: Sequence[Any], labels: Sequence[str]) -> JointStep:
    """Return the step of all members.

    Raises:
        DeclarationError: The steps of two members differ in more than numbers.
    """
    try:
        return join_steps(steps)
    except StepMismatchError as mismatch:
        lines = [mismatch.difference, *_changes(cores[0], cores[mismatch.member])]
        raise _mismatch("another step", lines, labels[0], labels[mismatch.member]) from None


def _changes(first: LearnerCore, core: LearnerCore) -> list[str]:
    """Return the arguments of callbacks and of the optimizer in which two members differ."""
    lines, changes = core.snapshots.differences(first.snapshots.about(), ())
    return [*lines, *[_shown(change) for change in changes if not change.path.startswith(("hyperparams.", "key"))]]


def _shown(change: Change) -> str:
    return f"{change.path}: {change.saved} became {change.program}"


def _mismatch(what: str, lines: Sequence[str], first: str, label: str) -> DeclarationError:
    return DeclarationError(
        f"{label[0].upper()}{label[1:]} has {what} than {first}.",
        where=list(lines[:6]),
        why="all members run in one program, which performs the same operations on arrays of the same shapes",
        fix=[
            "build all members with the same model, callbacks and data shapes; numbers may differ, except those that "
            "decide which operations a step has, such as a weight decay of 0 or an integer exponent",
            "train members of different structure in populations of their own",
        ],
    )


def _check_alone(core: LearnerCore, label: str) -> None:
    if core.placement is not None:
        raise DeclarationError(
            f"{label[0].upper()}{label[1:]} has a mesh.",
            why="the members of a population share one device",
            fix="build the Learner without `mesh=` and `sharding=`",
        )
    if isinstance(core.engine.emitter, ThreadedEmitter):
        raise DeclarationError(
            f"{label[0].upper()}{label[1:]} runs its handlers on threads.",
            why="the members of a population take turns, so that their order is fixed",
            fix=f"build the Learner without `executor=`, or with `executor=fluxcb.{SerialExecutor.__name__}()`",
        )
    if jax.process_count() > 1:
        raise DeclarationError(
            "A `Population` trains in one process, and this program has several.",
            fix="start one process, or train a population in each process without `jax.distributed`",
        )


def _check_settings(first: LearnerCore, core: LearnerCore, first_label: str, label: str) -> None:
    phases = [type(phase) for phase in first.phases]
    if phases != [type(phase) for phase in core.phases]:
        lines = [f"phases: {', '.join(type(phase).__name__ for phase in of.phases)}" for of in (first, core)]
        raise _mismatch("other phases", lines, first_label, label)
    a, b = first.engine.programs, core.engine.programs
    for name in ("steps_per_call", "window_bytes", "requested_kind", "exact_observers"):
        if getattr(a, name) != getattr(b, name):
            argument = "program" if name == "requested_kind" else name
            line = f"{argument}: {getattr(a, name)!r} became {getattr(b, name)!r}"
            raise _mismatch("other settings", [line], first_label, label)


def _check_batched(joint: JointStep, carry: PyTree, members: int, phase: str) -> None:
    """Trace the step with a leading axis for the members, without compiling it."""
    step = joint.step

    def add_axis(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((members, *np.shape(x)), x.dtype)

    own = [jax.ShapeDtypeStruct((members, *np.shape(x)), x.dtype) for x in joint.own[0]]
    try:
        jax.eval_shape(
            jax.vmap(step.computing(())), jax.tree.map(add_axis, carry), (jax.tree.map(add_axis, step.batch_spec), own)
        )
    except Exception as error:
        if is_interruption(error):
            raise
        raise TraceError(
            f"The step of {phase} cannot run for several members at once: {str(error).splitlines()[0]}",
            why="a population applies `jax.vmap` to the step, and an operation of this step does not support it",
            fix=[
                "remove that operation; `jax.pure_callback` needs `vmap_method=`, and ordered effects do not work",
                "train the Learners one after the other",
            ],
        ) from error


def check_outputs(members: Sequence[Learner], labels: Sequence[str]) -> None:
    """Check that no two members write to the same location.

    Raises:
        DeclarationError: Two members do.
    """
    seen: dict[Path, tuple[int, str]] = {}
    for index, learner in enumerate(members):
        for location, name in _outputs(learner.callbacks):
            path = Path(location).absolute()
            if path not in seen:
                seen[path] = index, name
            elif seen[path][0] != index:
                other, _ = seen[path]
                raise DeclarationError(
                    f"{labels[other][0].upper()}{labels[other][1:]} and {labels[index]} both write to "
                    f"{shown_path(str(location))!r}.",
                    where=f"{name} of each member",
                    why="each member has its own checkpoints and logs, and one would overwrite those of the other",
                    fix="give the factory a parameter `member`, which gets the number of the member, and use it in the "
                    'path: `Checkpointer(f"runs/{member}")`',
                )


def _outputs(callbacks: Iterable[Any]) -> Iterable[tuple[Path, str]]:
    for callback in callbacks:
        for location in callback.output_locations():
            if isinstance(location, Path):
                yield location, type(unwrap(callback)).__name__
