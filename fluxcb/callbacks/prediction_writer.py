"""`PredictionWriter`: the predictions for a data set, in a file that is complete or not there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.callbacks.inferencer import Inferencer, checked_name
from fluxcb.callbacks.named_values import leaf_arrays

__all__ = ["PredictionWriter"]


class PredictionWriter(Inferencer):
    """Write step values of every sample, such as the outputs, to a file, in the order of the data.

    Each round of the `InferenceRunner` it belongs to replaces the file, at the end and in one move: there is the whole
    file of a round or that of the one before, never a part, also if the round fails or the process is killed.

    A `.npz` has an array per value, all samples along the first axis. A `.jsonl` has a line per sample, an object with
    `index` and the values; numbers that JSON does not have (NaN, infinity) are null. The parts of values that are
    containers are named `outputs.logits`. Give a loader `shuffle=False` for the order of the arrays in it.

    Args:
        path: The file: `.npz`, `.jsonl` or `.json`. Its folder is made if it does not exist.
        names: Name or names of the values: arrays with the samples along the first axis.

    Raises:
        DeclarationError: Another kind of file, a place that cannot be written to, or no names. While training: a value
            has no axis of samples.

    Example:
        >>> import numpy as np
        >>> from fluxcb.callbacks import InferenceRunner, PredictionWriter
        >>> from fluxcb.testing import testlearner
        >>> xs = np.float32([[0], [1], [2]])
        >>> batches = [(xs[:2], xs[:2]), (xs[2:], xs[2:])]
        >>> learner = testlearner(InferenceRunner(batches, PredictionWriter("predictions.npz")))
        >>> history = learner.fit(30)
        >>> np.load("predictions.npz")["outputs"].round(1).tolist()  # 3 x - 1
        [[-1.0], [2.0], [5.0]]

    Source:
        Lightning, `BasePredictionWriter`.
    """

    def __init__(self, path: str | os.PathLike[str], names: str | Sequence[str] = "outputs") -> None:
        if not isinstance(path, str | os.PathLike):
            raise DeclarationError(f"`PredictionWriter` takes a path, not {path!r}.", fix='e.g. "predictions.npz"')
        self.path = Path(path)
        if self.path.suffix not in (".npz", ".jsonl", ".json"):
            raise DeclarationError(
                f"`PredictionWriter` writes .npz and .jsonl files, not `{self.path.name}`.",
                fix=f"name it `{self.path.stem}.npz` or `{self.path.stem}.jsonl`",
            )
        _require_writable(self.path)
        self.names = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else (names,)
        for name in self.names or (None,):
            checked_name(name, "PredictionWriter", "the names of step values")
        self._unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        self._file: Any = None
        self._columns: dict[str, list[Any]] = {}
        self._samples = 0

    def output_locations(self) -> Iterable[Path | str]:
        """Return the file."""
        return (self.path,)

    def fetches(self) -> Sequence[str]:
        """Return the names."""
        return self.names

    def before(self) -> None:
        """Begin a file beside the one of the round before."""
        self.abandon()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.suffix != ".npz"
        self._file = open(self._unfinished, "w" if text else "wb", encoding="utf-8" if text else None)  # noqa: SIM115

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Write a batch's values.

        Raises:
            DeclarationError: A value has no axis of samples.
        """
        rows = {column: array for name in self.names for column, array in leaf_arrays(name, values[name])}
        for column, array in rows.items():
            if array.shape[:1] != (samples,):
                raise DeclarationError(
                    f"`{column}` has shape {array.shape} in a batch of {samples} samples; "
                    "`PredictionWriter` writes a value per sample.",
                    fix="name a value with the samples along its first axis, such as `outputs`",
                )
        if self.path.suffix == ".npz":
            for column, array in rows.items():
                self._columns.setdefault(column, []).append(array)
        else:
            for row in range(samples):
                line = {"index": self._samples + row, **{c: _finite(array[row].tolist()) for c, array in rows.items()}}
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._samples += samples

    def statistics(self) -> Collection[str]:
        """Return no names, because this inferencer has no statistics."""
        return ()

    def after(self) -> Mapping[str, float]:
        """Put the file in its place."""
        import numpy as np

        if self.path.suffix == ".npz":
            columns: dict[str, Any] = {c: np.concatenate(arrays) for c, arrays in self._columns.items()}
            np.savez(self._file, **columns)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._unfinished, self.path)
        self._forget()
        return {}

    def abandon(self) -> None:
        """Remove the file that was begun."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk is told by the write that met it
                self._file.close()
            self._unfinished.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        self._file = None
        self._columns, self._samples = {}, 0

    def __repr__(self) -> str:
        return f"PredictionWriter({self.path.name!r})"


def _require_writable(path: Path) -> None:
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DeclarationError(
            f"`PredictionWriter` cannot write to `{path}`.",
            why="it is a folder" if path.is_dir() else f"`{folder}` is no folder that can be written to",
            fix="give another path",
        )


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
