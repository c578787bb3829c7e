"""`PredictionWriter`, which writes the predictions for a data set to a file atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb._paths import fix_of_path, why_impossible
from fluxcb.callbacks.arguments import require
from fluxcb.callbacks.inference.inferencer import Inferencer, checked_name
from fluxcb.callbacks.inspect.named_values import leaf_arrays

__all__ = ["PredictionWriter"]


class PredictionWriter(Inferencer):
    """Write step values of all samples, such as the outputs, to a file, in the order of the data.

    Each round of the `InferenceRunner` replaces the file atomically at the end of the round. If a round fails or the
    process is killed, the complete file of the previous round remains.

    A `.npz` file has one array per value, with all samples along the first axis. A `.jsonl` file has one line per
    sample: an object with `index` and the values. NaN and infinity are written as null, because JSON does not have
    them. If a value is a container, its parts have names such as `outputs.logits`. An `ArrayLoader` that shuffles is
    an error.

    With several processes, process 0 writes the file.

    Args:
        path: Path of the file, with the suffix `.npz`, `.jsonl` or `.json`. Its folder is created if it does not exist.
        names: The name or names of the values, arrays with the samples along the first axis.

    Raises:
        DeclarationError: The suffix of `path` is unknown, `path` is not writable, or there are no names. During
            training: the first axis of a value is not the axis of samples.

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

    keeps_order = True

    def __init__(self, path: str | os.PathLike[str], names: str | Sequence[str] = "outputs") -> None:
        fits = isinstance(path, str | os.PathLike)
        require(fits, path, "`path` of `PredictionWriter`", "a path", '"predictions.npz"')
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
        """Return the path of the file."""
        return (self.path,)

    def fetches(self) -> Sequence[str]:
        """Return the names of the values."""
        return self.names

    def before(self) -> None:
        """Open a temporary file in the same folder."""
        import jax

        self.abandon()
        if jax.process_index() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.suffix != ".npz"
        self._file = open(self._unfinished, "w" if text else "wb", encoding="utf-8" if text else None)  # noqa: SIM115

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Write the values of a batch; for `.npz`, store them until `after`.

        Raises:
            DeclarationError: The first axis of a value is not the axis of samples.
        """
        rows = {column: array for name in self.names for column, array in leaf_arrays(name, values[name])}
        for column, array in rows.items():
            if array.shape[:1] != (samples,):
                raise DeclarationError(
                    f"`{column}` has shape {array.shape} in a batch of {samples} samples, but "
                    "`PredictionWriter` writes one value per sample.",
                    fix="name a value whose first axis is the axis of samples, such as `outputs`",
                )
        if self._file is None:  # another process writes the file
            return
        if self.path.suffix == ".npz":
            for column, array in rows.items():
                self._columns.setdefault(column, []).append(array)
        else:
            for row in range(samples):
                line = {"index": self._samples + row, **{c: _finite(array[row].tolist()) for c, array in rows.items()}}
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._samples += samples

    def statistics(self) -> Collection[str]:
        """Return no names, because this inferencer computes no statistics."""
        return ()

    def after(self) -> Mapping[str, float]:
        """Finish the temporary file, and rename it to `path`."""
        import numpy as np

        if self._file is None:
            return {}
        if self.path.suffix == ".npz":
            columns: dict[str, Any] = {c: np.concatenate(arrays) for c, arrays in self._columns.items()}
            np.savez(self._file, **columns)
        # Without fsync, a crash of the machine could leave an empty file after the rename.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._unfinished, self.path)
        self._reset()
        return {}

    def abandon(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `close` writes what is buffered; the write that failed has raised
                self._file.close()
            self._unfinished.unlink(missing_ok=True)
        self._reset()

    def _reset(self) -> None:
        self._file = None
        self._columns, self._samples = {}, 0

    def __repr__(self) -> str:
        return f"PredictionWriter({self.path.name!r})"


def _require_writable(path: Path) -> None:
    if why := why_impossible(path.with_name(f".{path.name}.unfinished")):
        raise DeclarationError(
            f"`PredictionWriter` cannot write to `{path}`.", why=why, fix=fix_of_path(path, "use another path")
        )
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DeclarationError(
            f"`PredictionWriter` cannot write to `{path}`.",
            why="it is a folder" if path.is_dir() else f"`{folder}` is not a writable folder",
            fix="use another path",
        )


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
