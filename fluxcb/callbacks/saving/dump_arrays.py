"""`DumpArrays`: write values to .npz files, one file per step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxcb._declare.events import Event, FitBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.inspect.named_values import leaf_arrays
from fluxcb.callbacks.inspect.process_arrays import NamedValuesCallback
from fluxcb.callbacks.saving.numbered_files import NumberedFiles

__all__ = ["DumpArrays", "FileDumper"]


class FileDumper(NamedValuesCallback):
    """Base class of callbacks that write named values to numbered files in a directory.

    Args:
        names: One path or several.
        files: The files.
    """

    def __init__(self, names: str | Sequence[str], files: NumberedFiles) -> None:
        super().__init__(names)
        self._files = files
        self._begun = False

    def output_locations(self) -> Iterable[Path | str]:
        """Return the directory."""
        return (self._files.folder,)

    @on(FitBegin, AbstractTrainingPhase, access={})
    def begin_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Check the directory for files of another run, and remove files of later steps."""
        step = learner.progress.step
        self._files.begin(step, resumes=self._begun or step > 0)
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return whether the files in the directory belong to this run."""
        return {"begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore whether the files in the directory belong to this run."""
        self._begun = state["begun"]


class DumpArrays(FileDumper):
    """Write named values to .npz files such as `<folder>/<prefix>-00000012.npz`.

    A file is written after each training step if at least one path begins with `step`, and at Trigger otherwise. The
    number in the file name is the step. Arrays in the file are named by their paths, such as `params.layers.0.w`.
    bfloat16 is written as float32. Files are written atomically. If a run resumes from an earlier step, files of later
    steps are removed and written again. It is an error if the directory contains files of another run when the fit
    begins. In a multi-host run, only process 0 writes files.

    `every(DumpArrays(...), steps=100)` writes every 100 steps.

    Args:
        names: One path or several; see `ProcessArrays`.
        folder: The output directory. It is created if it does not exist.
        prefix: The beginning of the file names.
        keep: Number of most recent files to keep; None keeps all.

    Access:
        The paths in `names`: Read.

    Runs:
        FitBegin x AbstractTrainingPhase (host).
        StepEnd x AbstractTrainingPhase (host, if a path begins with `step`).
        Trigger x AbstractTrainingPhase (host, otherwise).

    Cost:
        The cost of `ProcessArrays`, plus writing a file. Training waits until the file is on disk.

    Raises:
        DeclarationError: A path is invalid, the directory is not writable, or `keep` is not a positive integer. When a
            fit begins: the directory contains files of another run.
        OSError: During training, a file cannot be written.

    Example:
        >>> import numpy as np
        >>> from pathlib import Path
        >>> from fluxcb import every
        >>> from fluxcb.callbacks import DumpArrays
        >>> from fluxcb.testing import testlearner
        >>> history = testlearner(every(DumpArrays(["step.outputs", "params"], "dumps", keep=2), steps=2)).fit(2)
        >>> [path.name for path in sorted(Path("dumps").iterdir())]
        ['arrays-00000006.npz', 'arrays-00000008.npz']
        >>> {name: array.shape for name, array in np.load("dumps/arrays-00000008.npz").items()}
        {'step.outputs': (8, 1), 'params.b': (), 'params.w': ()}

    Source:
        tensorpack, `DumpTensors`, which writes at every step and keeps all files.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        folder: str | os.PathLike[str],
        *,
        prefix: str = "arrays",
        keep: int | None = None,
    ) -> None:
        super().__init__(names, NumberedFiles(folder, prefix, keep, "DumpArrays"))

    def process(self, learner: LearnerView, values: Mapping[str, Any]) -> None:
        """Write the file of a step."""
        import numpy as np

        arrays = dict(pair for name, value in values.items() for pair in leaf_arrays(name, value))
        self._files.write(learner.progress.step, {".npz": lambda file: np.savez(file, **arrays)})
