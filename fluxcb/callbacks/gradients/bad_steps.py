"""`BadSteps`, which records the steps that a callback skips, and leaves their batches out after a resume."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._errors import ConflictError, DeclarationError
from fluxcb.callbacks.arguments import flag, run_folder, whole_number
from fluxcb.checkpoints.bad_steps import (
    BAD_STEPS,
    batch_checksum,
    read_bad_steps,
    text_of_record,
    write_bad_steps,
)
from fluxcb.logging.record_file import unused_path

__all__ = ["BadSteps"]

_RECORDS = {"cbstate": {"bad_steps": Append()}}


class BadSteps(Callback):
    """Record each training step that a callback skips (`step.skip`), with the batch and the values that decided.

    `cbstate.bad_steps` is a list with a dict for each of the newest `keep_last` skipped steps:

    - `number`: how many steps have been recorded, with this one. The last record therefore has the number of all
      recorded steps, also of those whose records are no longer in the list.
    - `step`, `phase`, `epoch`, `step_in_epoch`: the step.
    - `data`: the position of its batch. `source` is the name of the data source, `pass` the number of the pass over the
      data (from 1), and `batch` the number of batches of the pass before this one. None outside an epoch.
    - `checksum`: the CRC-32 of the batch.
    - `key`: the random key of the step (uint32 words), from which the keys of the model and of callbacks are folded.
    - `by`: for each callback that set the flag, the values that it used: the scalars in `step`, `cbstate` and
      `hyperparams` that its handler reads, as they were before it ran, the scalars in `step` that it writes, the loss,
      and the norm of the gradients. A callback of your own needs no code for this. A handler that reads the flag, as in
      `learner.step.skip |= bad`, is listed if no earlier handler has set it.
    - `undone`: None, or if the run has gone back to a checkpoint since then, `to`, the step of the checkpoint, and
      `records`, the `number` of the last record at that time.

    With `folder`, the file `bad_steps.jsonl` there has all records, also those that are no longer in the list. Unlike
    the state in checkpoints, it keeps the records of steps that a rewind has undone. `learner.replay(folder,
    bad_step=N)` replays a step whose record is in the file. A run that resumes from a checkpoint repeats the steps
    after it, and removes their records until they are skipped again.

    With `skip_again`, a run that resumes from an earlier checkpoint keeps all records in the file, and does not train
    on their batches again. A run that rewinds continues with other batches and needs no argument for this.

    Args:
        folder: The directory of the run, usually that of the `Checkpointer`, or None for no file.
        skip_again: Whether to leave out the batches of all records in the file.
        keep_last: Maximum number of records in `cbstate.bad_steps`, which checkpoints contain. A record takes about 4
            kB of memory.

    Access:
        step.skip, step.skips, step.data_position, step.batch: Read.
        cbstate.bad_steps: Append.

    Runs:
        FitBegin, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase (host).

    Cost:
        Fetches one flag per step and, for each callback that writes `step.skip`, its scalars. The step computes the
        norm of the gradients. Copies the batch of a skipped step to the host. Does not shorten windows.

    Raises:
        DeclarationError: `folder` is not a path, `skip_again` is not a bool or is true without a folder, `keep_last` is
            not positive, or several processes train together.
        ConflictError: There are two `BadSteps` in the list.
        CheckpointError: A line of the file is not a record.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import BadSteps, SkipNonFinite
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2), jnp.array([1.0, jnp.nan]), jnp.ones(2)],
        ...     callbacks=[SkipNonFinite(), BadSteps()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> record = learner.cbstate["bad_steps"][0]
        >>> record["step"], record["data"], record["by"]["SkipNonFinite"]["step.loss"]
        (2, {'source': 'training', 'pass': 1, 'batch': 1}, nan)
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, skip_again: bool = False, keep_last: int = 1000
    ) -> None:
        self.folder = run_folder(folder, "BadSteps") if folder is not None else None
        self._passed_folder = os.fspath(folder) if folder is not None else None  # for labels
        self.skip_again = flag(skip_again, "`skip_again` of BadSteps")
        if self.skip_again and folder is None:
            raise DeclarationError(
                "`skip_again` of BadSteps needs a directory.",
                why="a checkpoint does not have the records of later steps, so a file must keep them",
                fix='write e.g. `BadSteps("runs/1", skip_again=True)`',
            )
        self.keep_last = whole_number(keep_last, "`keep_last` of BadSteps", 1)
        self._undone: list[dict[str, Any]] = []  # the records before a rewind, until the fit begins again

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and appends to."""
        return {"step": {name: Read() for name in ("skip", "skips", "data_position", "batch")}, **_RECORDS}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse a second `BadSteps`, because both would add their records to the same list."""
        if isinstance(other, BadSteps):
            raise ConflictError(
                "The callbacks list contains more than one `BadSteps`.",
                where=[repr(self), repr(other)],
                why="both would add their records to `cbstate.bad_steps`",
                fix="remove one of them",
            )
        return super().resolveconflict(other)

    def output_locations(self) -> Iterable[Path | str]:
        """Return the path of the file."""
        return () if self._file is None else (self._file,)

    @property
    def _file(self) -> Path | None:
        return None if self.folder is None else self.folder / BAD_STEPS

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.bad_steps`."""
        if "bad_steps" not in learner.cbstate:
            learner.cbstate.bad_steps = []

    @on(FitBegin, Phase, access=_RECORDS)
    def begin(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Compare the records in the file with those of the restored state."""
        import jax

        if jax.process_count() > 1:
            raise DeclarationError(
                "`BadSteps` does not work if several processes train together.",
                why="each process has only a part of the batch",
                fix="leave it out",
            )
        records, step = learner.cbstate.bad_steps, learner.progress.step
        rewound, self._undone = self._undone, []
        is_new = not (self.skip_again or event.resumes or step > 0)
        if self._file is not None and is_new and self._file.exists():
            self._file.rename(unused_path(lambda number: self._file_of_earlier_run(number)))
        by_identity: dict[str, dict[str, Any]] = {}
        for record in [*self._earlier(records, rewound), *records]:
            by_identity.setdefault(_identity(record), record)
        current = sorted(by_identity.values(), key=lambda record: record["number"])
        for record in current:
            if record["step"] > step:  # the restored state does not have the step
                undone = record["undone"] or {"to": step, "records": current[-1]["number"]}
                record["undone"] = {**undone, "to": min(step, undone["to"])}
        # In place, so that the callback needs no permission to replace the list.
        records[:] = current[-self.keep_last :]
        if self._file is not None and (current or self._file.exists()):
            write_bad_steps(self._file, current)

    def _earlier(self, records: list[dict[str, Any]], rewound: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the records that the restored state does not have: undone ones, and those before the newest ones."""
        has_all = not records or records[0]["number"] == 1
        if self._file is None or (has_all and not rewound and not self.skip_again):
            return rewound
        in_file = read_bad_steps(self._file)
        if rewound or self.skip_again:
            return [*in_file, *rewound]
        # A file without the first record of the state belongs to another run.
        first = _identity(records[0])
        return in_file[: next((at for at, record in enumerate(in_file) if _identity(record) == first), 0)]

    def _file_of_earlier_run(self, number: int) -> Path:
        path = Path(BAD_STEPS)
        return Path(self.folder or "", f"{path.stem}-{number}{path.suffix}")

    @on(StepEnd, AbstractTrainingPhase)
    def record(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Record the step if it was skipped."""
        if not learner.step.skip:
            return
        import jax

        skips, position, progress = learner.step.skips, learner.step.data_position, learner.progress
        by = {writer: entry["values"] for writer, entry in skips["by"].items() if entry["skip"]}
        records = learner.cbstate.bad_steps
        record = {
            "number": records[-1]["number"] + 1 if records else 1,
            "step": progress.step,
            "phase": type(phase).name,
            "epoch": progress.epoch,
            "step_in_epoch": progress.step_in_epoch,
            "data": None if position is None else {name: position[name] for name in ("source", "pass", "batch")},
            "checksum": batch_checksum(jax.tree.leaves(learner.step.batch)),
            "key": [int(word) for word in (() if skips["key"] is None else skips["key"])],
            "by": {writer: {name: value.item() for name, value in values.items()} for writer, values in by.items()},
            "undone": None,
        }
        records.append(record)
        del records[: -self.keep_last]
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{text_of_record(record)}\n")

    @on(FitEnd, Phase, access=_RECORDS)
    def end(self, event: FitEnd, phase: Phase, learner: LearnerView) -> None:
        """Keep the records that a rewind is about to undo."""
        if event.outcome == "rewinding":
            # Copies, because a restore changes the dicts of the list in place.
            self._undone = copy.deepcopy(list(learner.cbstate.bad_steps))

    def left_out_batches(self) -> Mapping[str, Collection[tuple[int, int]]]:
        """Return the batches of the records in the file, with `skip_again`."""
        left_out: dict[str, list[tuple[int, int]]] = {}
        for record in read_bad_steps(self._file) if self._file is not None and self.skip_again else ():
            if (data := record["data"]) is not None:
                left_out.setdefault(data["source"], []).append((data["pass"], data["batch"]))
        return left_out

    def __repr__(self) -> str:
        return f"BadSteps({'' if self._passed_folder is None else repr(self._passed_folder)})"


def _identity(record: Mapping[str, Any]) -> str:
    """Return a text that is the same before and after the step is undone."""
    return text_of_record({**record, "undone": None})
