"""`HumanHyperParamSetter`, which sets a hyperparameter from a text file that users edit during training."""

from __future__ import annotations

import math
import os
from typing import Any

from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.state import is_negative_rate
from fluxcb._errors import did_you_mean
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import file_path, require
from fluxcb.callbacks.hyperparams.hyperparameter import is_name
from fluxcb.callbacks.hyperparams.setters import FLOAT32_MAX, HyperParamSetter
from fluxcb.callbacks.inspect.own_file import OwnFile, UntrustedFileError

__all__ = ["HumanHyperParamSetter"]

_LONGEST = 1 << 16  # bytes


class HumanHyperParamSetter(HyperParamSetter):
    """Set a hyperparameter to the value in a text file, which can be edited during training.

    Each line of the file is `name: value`. Empty lines and text after a `#` are ignored. If two lines have the same
    name, the later one is used. The file is read before the first step of a fit and after each epoch, and the value is
    set each time. The value therefore overrides setters that come before this one in `in_order`, until the line is
    removed. If there is no file, or no line with the name of this hyperparameter, nothing is set.

    A line is skipped with a warning if it is not `name: value` with a finite number, if the value is outside `limits`,
    or if it is a negative learning rate. A line whose name is not a hyperparameter of the Learner is also skipped with
    a warning, unless another callback sets an `ObjAttrParam`. The other lines are still used. If the file changes while
    it is read, it is read again immediately or after the next epoch.

    The file is used only if no other user can have written it. It must be a regular file without further hard links,
    and not a symbolic link. It must belong to the user who runs the program, and no one else may have write permission
    (`chmod go-w hyper.txt`). Its maximum size is 64 KiB. For any other file, the callback warns and sets nothing. On
    Windows, the owner and the permissions are not checked.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`. Its name is the one to use in
            the file.
        file: Path of the file. A relative path is relative to the working directory. The file need not exist yet. If
            several processes train together, the file of process 0 determines a value in `hyperparams`. For an
            `ObjAttrParam`, all processes must see the same file.
        limits: The smallest and the largest value that the file may set. The default is the range of float32.

    Access:
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        One read of the file per epoch. Does not recompile.

    Raises:
        DeclarationError: `param` does not name a hyperparameter, `file` is not the path of a file, or `limits` are not
            two finite numbers in ascending order.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> from pathlib import Path
        >>> from fluxcb.callbacks import HumanHyperParamSetter, LearningRate
        >>> from fluxcb.testing import testlearner
        >>> setter = HumanHyperParamSetter(LearningRate, "hyper.txt", limits=(0.0, 1.0))
        >>> learner = testlearner(setter, learning_rate=1.0)
        >>> history = learner.fit(1)  # there is no file
        >>> _ = Path("hyper.txt").write_text("learning_rate: 0.25  # it diverged")
        >>> Path("hyper.txt").chmod(0o600)
        >>> history = learner.fit(1)
        >>> learner.hyperparams
        {'learning_rate': 0.25}

    Source:
        tensorpack, `HumanHyperParamSetter`, which ignores the whole file if one line is invalid.
    """

    def __init__(
        self,
        param: Any,
        file: str | os.PathLike[str] = "hyper.txt",
        *,
        limits: tuple[float, float] = (-FLOAT32_MAX, FLOAT32_MAX),
    ) -> None:
        super().__init__(param)
        self.file = file_path(file, "`file` of `HumanHyperParamSetter`", 'file="hyper.txt"')
        self.limits = _limits(limits)

    def next_value(self, learner: LearnerView) -> float | None:
        """Return the value in the file, or None if the file does not set one."""
        try:
            read = OwnFile(self.file).read(_LONGEST)
            lines = (read or b"").decode("utf-8").splitlines()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError, UntrustedFileError) as error:
            warn_user(f"{self!r} cannot read {self.file}: {error}", UserWarning)
            return None
        result = None
        for number, line in enumerate(lines, 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            name, _, value = content.partition(":")
            parsed = _finite(value)
            # A line for another hyperparameter is also parsed, so that a typo is reported whichever setter reads it.
            if parsed is None or not is_name(name.strip()):
                warn_user(
                    f"{self.file}:{number} is skipped: {line.strip()!r} is not `name: value` with a finite number",
                    UserWarning,
                )
            elif name.strip() == self.param_name and abs(parsed) > FLOAT32_MAX:
                warn_user(
                    f"{self.file}:{number} is skipped: {parsed:g} is not finite in float32",
                    UserWarning,
                )
            elif name.strip() == self.param_name and not self.limits[0] <= parsed <= self.limits[1]:
                warn_user(
                    f"{self.file}:{number} is skipped: {parsed:g} is not between {self.limits[0]:g} and "
                    f"{self.limits[1]:g}",
                    UserWarning,
                )
            elif name.strip() == self.param_name and is_negative_rate(self.param_name, parsed):
                warn_user(f"{self.file}:{number} is skipped: {parsed:g} is negative", UserWarning)
            elif name.strip() == self.param_name:
                result = parsed
            # With an `ObjAttrParam`, the line may be for an attribute, whose name is not known here.
            elif name.strip() not in learner.hyperparams and "attributes" not in learner.cbstate:
                warn_user(
                    f"{self.file}:{number} is skipped: there is no hyperparameter `{name.strip()}`."
                    f"{did_you_mean(name.strip(), learner.hyperparams)}",
                    UserWarning,
                )
        return result

    def __repr__(self) -> str:
        return f"HumanHyperParamSetter({self.param_name}, {str(self.file)!r})"


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _limits(limits: Any) -> tuple[float, float]:
    fits = isinstance(limits, tuple | list) and len(limits) == 2
    fits = fits and all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits)
    fits = fits and -math.inf < limits[0] <= limits[1] < math.inf
    expected = "two finite numbers in ascending order"
    require(fits, limits, "`limits` of `HumanHyperParamSetter`", expected, "limits=(0.0, 1.0)")
    return float(limits[0]), float(limits[1])
