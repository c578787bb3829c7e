"""Fixes for arguments of other libraries that savers, `EarlyStopping` and `ReduceLROnPlateau` do not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from fluxcb._keyword_fixes import Fix, name_of_metric, shown_value, with_value
from fluxcb.callbacks.watched import Watched

__all__ = ["CHECKPOINTER_FIXES", "EARLY_STOPPING_FIXES", "PLATEAU_FIXES", "best_saver_fixes"]

_MONITORS = ("monitor", "watch", "quantity")
_BEST = (*_MONITORS, "save_best_only", "save_top_k")
_PERIODS_WITHIN_EPOCHS = ("steps", "seconds", "every_n_train_steps", "train_time_interval")


def _watched(kwargs: Mapping[str, Any]) -> str:
    """Return the name of the metric that a call names, or `loss`."""
    named = next((name_of_metric(kwargs[name]) for name in _MONITORS if name in kwargs), None)
    metric = named or kwargs.get("metric")
    return metric if isinstance(metric, str) and metric and metric.strip("/") == metric else "loss"


def _names_metric(kwargs: Mapping[str, Any]) -> bool:
    return any(name in kwargs for name in _MONITORS)


def _mode(kwargs: Mapping[str, Any]) -> str:
    """Return whether low or high values of the metric of a call are good, `min` or `max`."""
    watched = Watched.named(_watched(kwargs), None, "MinSaver")
    return kwargs["mode"] if kwargs.get("mode") in ("min", "max") else watched.default_mode


def _best_saver(kwargs: Mapping[str, Any]) -> tuple[str, str]:
    """Return the call of the saver that keeps the best value of the metric of a call, and the folder of this saver."""
    metric = _watched(kwargs)
    mode = _mode(kwargs)
    folder = re.sub(r"[^\w.-]+", "-", f"{mode}-{Watched.named(metric, None, 'MinSaver')}")
    return f'{mode.capitalize()}Saver("runs/1", "{metric}")', f"runs/1/{folder}"


# -- Checkpointer ----------------------------------------------------------------------------------


def _keep_best(value: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the fix for all arguments that decide which checkpoints are the best."""
    passed = [name for name in _BEST if name in kwargs]
    theirs = " and ".join(f"`{name}=...`" for name in passed)
    instead = f"instead of {theirs}"
    saver, folder = _best_saver(kwargs)
    count = kwargs.get("save_top_k", 1)
    without_mode = " and leave out `mode=...`" if "mode" in kwargs else ""
    if count == 0:
        return "remove `Checkpointer` from the callbacks; no checkpoint is saved then"
    if count == -1:
        return f"write `keep_every=1` {instead}, which keeps all checkpoints{',' if without_mode else ''}{without_mode}"
    if passed == ["save_best_only"] and not value:
        return "leave out `save_best_only=...`; the newest checkpoints are kept, 3 of them by default (`keep_last=3`)"
    frequency = kwargs.get("save_freq")
    if isinstance(frequency, int) or any(kwargs.get(name) is not None for name in _PERIODS_WITHIN_EPOCHS):
        return (
            f"add `{saver}` to the callbacks {instead},{without_mode + ',' if without_mode else ''} because the metric "
            "has no value within an epoch"
        )
    keep = [] if "keep_best" in kwargs else [f"keep_best={shown_value(count, '1')}"]
    metric = [f'metric="{_watched(kwargs)}"'] if _names_metric(kwargs) else []
    written = f"write `{', '.join(keep + metric)}` {instead}" if keep or metric else f"leave out {theirs}"
    return (
        f"{written}; to load the best model, which is often not the newest one, "
        f'also add `{saver}`, and load `"{folder}"`'
    )


def _save_freq(value: Any, kwargs: Mapping[str, Any]) -> str:
    period = "epochs=1" if value == "epoch" else f"steps={shown_value(value, '1000')}"
    return f"write `{period}` instead of `save_freq=...`"


CHECKPOINTER_FIXES: Mapping[str, Fix] = {
    **dict.fromkeys(_BEST, _keep_best),
    "save_freq": _save_freq,
    "save_last": "leave out `save_last=...`; the newest checkpoints are kept, 3 of them by default (`keep_last=3`)",
    "save_weights_only": "leave out `save_weights_only=...`; a checkpoint contains the whole run, and "
    "`fluxcb.checkpoints.load_params` returns the parameters alone",
    "verbose": "leave out `verbose=...`; `Checkpointer` prints nothing, and the folder shows what it has saved",
}
"""The fixes for arguments that `Checkpointer` does not have."""


# -- MinSaver and MaxSaver -------------------------------------------------------------------------


def best_saver_fixes(own_mode: Literal["min", "max"]) -> Mapping[str, Fix]:
    """Return the fixes for arguments that `MinSaver` or `MaxSaver` does not have."""
    owner, size = f"{own_mode.capitalize()}Saver", {"min": "smallest", "max": "largest"}

    def metric(value: Any, kwargs: Mapping[str, Any]) -> str:
        mode = _mode(kwargs)
        if mode != own_mode:
            by_name = f', metric="{_watched(kwargs)}"' if "metric" in kwargs or _names_metric(kwargs) else ""
            saver = f"{mode.capitalize()}Saver(...{by_name})"
            return f"write `{saver}`, which keeps the checkpoint with the {size[mode]} value"
        monitors = [name for name in _MONITORS if name in kwargs]
        renamed = [f'write `metric="{_watched(kwargs)}"` instead of `{name}=...`' for name in monitors]
        without_mode = [f"leave out `mode=...`; `{owner}` keeps the {size[mode]} value"] if "mode" in kwargs else []
        return ", and ".join(renamed + without_mode)

    best_only = f'; `{owner}` keeps the one best checkpoint, and `Checkpointer("runs/1", keep_best=3)` keeps several'
    when = f"; `{owner}` saves after each epoch with a better value, and a `Checkpointer` saves at regular intervals"
    return {
        **dict.fromkeys((*_MONITORS, "mode"), metric),
        **_leave_out(("save_top_k", "save_best_only", "max_to_keep", "keep_last", "keep_best"), best_only),
        **_leave_out(
            ("save_last", "save_freq", "period", "every_n_epochs", "every_n_train_steps", "train_time_interval"), when
        ),
        "save_weights_only": CHECKPOINTER_FIXES["save_weights_only"],
        **_leave_out(("verbose",), f"; `{owner}` prints nothing, and its attribute `best` has the step and the value"),
    }


def _leave_out(names: tuple[str, ...], what_happens: str) -> dict[str, Fix]:
    return {name: f"leave out `{name}=...`{what_happens}" for name in names}


# -- EarlyStopping and ReduceLROnPlateau -----------------------------------------------------------


def _restore_best(value: Any, kwargs: Mapping[str, Any]) -> str:
    if not value:
        return "leave out `restore_best_weights=...`; the trained parameters stay as they are"
    saver, folder = _best_saver(kwargs)
    clear = "metric" in kwargs or _names_metric(kwargs)
    other = "" if clear else "; for another metric, write its name, or `MaxSaver` if high values of it are good"
    return (
        f"leave out `restore_best_weights=...`, add `{saver}` to the callbacks, and call "
        f'`learner.restore("{folder}")` after `fit`{other}'
    )


def _divergence(value: Any, kwargs: Mapping[str, Any]) -> str:
    bad = "max" if _mode(kwargs) == "min" else "min"
    criterion = f'("{_watched(kwargs)}", Threshold({shown_value(value, "10.0", positive=False)}, mode="{bad}"))'
    return f"pass it as another criterion, by position: `{criterion}`, with `Threshold` from `fluxcb.stopping`"


_THRESHOLD = (
    "the criterion `Threshold(<value>)` of `fluxcb.stopping` by position: `EarlyStopping(Threshold(<value>), ...)`"
)

EARLY_STOPPING_FIXES: Mapping[str, Fix] = {
    "min_delta": "leave out `min_delta=...`; every better value counts as an improvement",
    "restore_best_weights": _restore_best,
    **dict.fromkeys(("threshold", "stopping_threshold"), with_value(f"pass {_THRESHOLD}", "0.5", positive=False)),
    "baseline": with_value(
        "leave out `baseline=...`; values are compared only with earlier values; to end the fit when a value is better "
        f"than <value>, pass {_THRESHOLD}",
        "0.5",
        positive=False,
    ),
    "divergence_threshold": _divergence,
    "start_from_epoch": with_value(
        "leave it out, and write `fluxcb.when(EarlyStopping(...), lambda learner: learner.progress.epoch > <value>)`",
        "3",
        positive=False,
    ),
    "check_finite": "leave out `check_finite=...`; the criterion `InvalidValue()` of `fluxcb.stopping` ends the fit at "
    "the first value that is NaN or infinite: `EarlyStopping(InvalidValue(), ...)`",
    "strict": "leave out `strict=...`; a metric without a value is always an error",
    "verbose": "leave out `verbose=...`; `learner.stop_reason` says why the fit ended",
}
"""The fixes for arguments that `EarlyStopping` does not have."""

PLATEAU_FIXES: Mapping[str, Fix] = {
    # In Keras, `min_delta` is a difference, and the default of `threshold_mode` is a ratio.
    **{
        name: with_value(f'write `threshold=<value>, threshold_mode="abs"` instead of `{name}=...`', "1e-4")
        for name in ("min_delta", "epsilon")
    },
    "verbose": "leave out `verbose=...`, and add `LogHyperParams()` and a `Monitors` to the callbacks, which log each "
    "change of the learning rate",
}
"""The fixes for arguments that `ReduceLROnPlateau` does not have."""
