"""`DumpArrays`: values in .npz files, one file per step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxcb._declare.events import Event, FitBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.named_values import leaf_arrays
from fluxcb.callbacks.numbered_files import NumberedFiles
from fluxcb.callbacks.process_arrays import LooksAtValues

__all__ = ["DumpArrays", "DumpsFiles"]


class DumpsFiles(LooksAtValues):
    """Base of what writes named values to files of a run, in a folder.

    Args:
        names: A path, or several.
        files: The files.
    """

    def __init__(self, names: str | Sequence[str], files: NumberedFiles) -> None:
        super().__init__(names)
        self._files = files
        self._begun = False

    def output_locations(self) -> Iterable[Path | str]:
        """Return the folder."""
        return (self._files.folder,)

    @on(FitBegin, AbstractTrainingPhase, access={})
    def begin_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Look at what is in the folder."""
        step = learner.progress.step
        self._files.begin(step, resumes=self._begun or step > 0)
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return whether the files in the folder are this run's."""
        return {"begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._begun = state["begun"]


class DumpArrays(DumpsFiles):
    """Write values to `<folder>/<prefix>-00000012.npz`: after each training step if one is the step's, else at Trigger.

    The number is that of the step. In the file, arrays are named as here, the parts of containers `params.layers.0.w`;
    bfloat16 is written as float32. Each file is complete or not there. Where a run resumes from an earlier step, files
    of later ones are removed, and written again. Files of another run are an error when the fit begins. Under several
    processes, process 0 writes.

    `every(DumpArrays(...), steps=100)` writes every 100 steps.

    Args:
        names: Path or paths of the values; see `ProcessArrays`.
        folder: Where to; made if it does not exist.
        prefix: What the files' names begin with.
        keep: How many files are kept, the newest; None for all.

    Access:
        What the names say: Read.

    Runs:
        FitBegin x AbstractTrainingPhase (host).
        StepEnd x AbstractTrainingPhase (host, if a name is a step's).
        Trigger x AbstractTrainingPhase (host, if none is).

    Cost:
        As `ProcessArrays`, and a file, which is brought to the disk before training goes on.

    Raises:
        DeclarationError: A name is no path, the folder cannot be written to, or `keep` is no number above 0; when a fit
            begins, there are files of another run.
        OSError: While training, a file cannot be written.

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
        tensorpack, `DumpTensors`, which writes at every step, and keeps everything.
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

    def process(self, learner: Any, values: Mapping[str, Any]) -> None:
        """Write a file."""
        import numpy as np

        arrays = dict(pair for name, value in values.items() for pair in leaf_arrays(name, value))
        self._files.write(learner.progress.step, {".npz": lambda file: np.savez(file, **arrays)})
