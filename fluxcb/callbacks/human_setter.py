"""`HumanHyperParamSetter`: a hyperparameter that somebody changes by editing a file."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.callbacks.setters import HyperParamSetter

__all__ = ["HumanHyperParamSetter"]

_ATTEMPTS = 3


class HumanHyperParamSetter(HyperParamSetter):
    """Set a hyperparameter to what a text file says, while it says anything.

    Each line of the file is `name: value`; empty lines and what follows a `#` do not count, and of two lines with one
    name the later holds. The file is read anew before the first step of a fit and after each epoch, and its value is
    set each time: so it wins over setters that come before this one in `in_order`, until the line is gone. Without a
    file, or a line of this name, nothing is set.

    A line that is no `name: value` with a finite number gives a warning and is passed over; the others count. A file
    that changes while it is read is read again, or left for the next epoch.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`; its name stands in the file.
        file: The file; a relative path counts from the working directory. It need not exist yet. Where several
            processes train together, all must see the same one.

    Access:
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        A look at the file per epoch. Nothing is recompiled.

    Raises:
        DeclarationError: `param` names no hyperparameter, or `file` is no path of a file.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> from pathlib import Path
        >>> from fluxcb.callbacks import HumanHyperParamSetter, LearningRate
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(HumanHyperParamSetter(LearningRate, "hyper.txt"), learning_rate=1.0)
        >>> history = learner.fit(1)  # there is no file
        >>> _ = Path("hyper.txt").write_text("learning_rate: 0.25  # it diverged")
        >>> history = learner.fit(1)
        >>> learner.hyperparams
        {'learning_rate': 0.25}

    Source:
        tensorpack, `HumanHyperParamSetter`, for which one bad line voids the file.
    """

    def __init__(self, param: Any, file: str | os.PathLike[str] = "hyper.txt") -> None:
        super().__init__(param)
        if not isinstance(file, str | os.PathLike) or not os.fspath(file):
            raise DeclarationError(
                f"`file` of `HumanHyperParamSetter` must be a path, not {file!r}.", fix='e.g. `file="hyper.txt"`'
            )
        self.file = Path(file)
        if self.file.is_dir():
            raise DeclarationError(
                f"`file` of `HumanHyperParamSetter` is a folder: {self.file}.", fix="name a file in it"
            )

    def next_value(self, learner: Any) -> float | None:
        """Return what the file says."""
        try:
            text = _read(self.file)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            warnings.warn(f"{self!r} cannot read {self.file}: {error}", UserWarning, stacklevel=2)
            return None
        found = None
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            name, _, value = content.partition(":")
            parsed = _finite(value)
            if parsed is None or not name.strip().isidentifier():
                warnings.warn(
                    f"{self.file}:{number} is passed over: {line.strip()!r} is no `name: value` with a finite number",
                    UserWarning,
                    stacklevel=2,
                )
            elif name.strip() == self.param_name:
                found = parsed
        return found

    def __repr__(self) -> str:
        return f"HumanHyperParamSetter({self.param_name}, {str(self.file)!r})"


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _read(file: Path) -> str:
    """Return a file's text, or nothing if somebody keeps writing it."""
    for _ in range(_ATTEMPTS):
        before = file.stat()
        text = file.read_text(encoding="utf-8")
        after = file.stat()
        if (before.st_mtime_ns, before.st_size, before.st_ino) == (after.st_mtime_ns, after.st_size, after.st_ino):
            return text
    return ""
