"""Fixes for keyword arguments that a function does not have: fluxcb's names for them, with the values of the user."""

from __future__ import annotations

import ast
import datetime
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Fix", "FixOfValue", "fix_of", "name_of_metric", "own_fix", "shown_value", "with_value"]

FixOfValue = Callable[[Any, Mapping[str, Any]], str]
"""A function that returns a fix for the value of an argument and all keyword arguments of the call."""

Fix = str | FixOfValue
"""A fix to suggest. If it or what it returns is empty, the fix follows from fluxcb's names of arguments."""

_ELSEWHERE: Sequence[tuple[str, str, str]] = (
    ("loss_fn", "loss_fn", "loss loss_function criterion objective"),
    ("optimizer", "optax.adam(1e-3)", "optim opt tx"),
    ("key", "0", "seed rng rngs random_state"),
    ("seed", "0", "key rng rngs random_state"),
    ("data", "training", "train_data training_data train_loader train_dataloader train_dataloaders train_dataset"),
    ("data", "training", "train_ds dataset loader dataloader dataloaders"),
    ("batch_size", "32", "bs"),
    ("drop_last", "True", "drop_remainder"),
    ("epochs", "10", "num_epochs max_epochs n_epochs nb_epoch"),
    ("steps", "1000", "num_steps max_steps n_steps num_iter num_training"),
    ("epochs", "1", "every_n_epochs every_k_epochs period"),
    ("steps", "1000", "every_n_train_steps every_n_steps every_k_steps log_every_n_steps"),
    ("steps", "100", "n every freq frequency interval"),
    ("every_k_epochs", "1", "epochs every_n_epochs"),
    ("every_k_steps", "100", "steps n every freq every_n_steps"),
    ("freq", "100", "steps every every_n_steps period interval log_freq"),
    ("period", "100", "steps every freq"),
    ("period", "2000", "growth_interval"),
    ("interval", "1.0", "seconds refresh_rate mininterval"),
    ("every", "1", "epochs freq swa_freq every_n_epochs"),
    ("start", "10", "swa_start swa_epoch_start start_epoch"),
    ("seconds", "3600.0", "timeout time max_time time_limit limit train_time_interval"),
    ("n", "3", "patience limit epochs"),
    ("patience", "3", "n epochs"),
    ("metric", '"loss"', "monitor watch quantity"),
    ("threshold", "1e-4", "min_delta epsilon"),
    ("threshold", "6.0", "factor sigma n_sigma num_sigma"),
    ("factor", "0.1", "gamma growth_factor scale_factor"),
    ("min_lr", "1e-6", "min_learning_rate eta_min"),
    ("low", "1e-6", "min_lr start_lr lr_min"),
    ("high", "1.0", "max_lr end_lr lr_max"),
    ("max_value", "1e-3", "max_lr lr learning_rate peak_value"),
    ("warmup", "0.3", "pct_start warmup_steps"),
    ("initial", "2.0**15", "init_scale initial_scale"),
    ("minimum", "1.0", "min_scale"),
    ("decay", "0.999", "momentum ema_decay decay_rate beta smoothing"),
    ("beta", "0.98", "momentum decay smoothing"),
    ("alpha", "0.1", "smoothing label_smoothing"),
    ("eta", "0.01", "std sigma stddev noise scale"),
    ("max_norm", "1.0", "clip clip_norm clipnorm global_clipnorm max_grad_norm gradient_clip_val"),
    ("steps", "4", "accumulate_grad_batches accumulation_steps gradient_accumulation_steps every_k"),
    ("window", "100", "n size window_size"),
    ("limit", "10", "max_consecutive_errors max_skips patience"),
    ("classes", "10", "num_classes n_classes"),
    ("paths", '"encoder"', "layers params names modules"),
    ("fn", "...", "func function metric_fn"),
    (
        "folder",
        '"runs/1"',
        "dirpath filepath directory dir path ckpt_dir checkpoint_dir save_dir log_dir logdir output_dir",
    ),
    ("path", "...", "file filename filepath directory folder log_dir logdir save_dir"),
    ("project", '"my-project"', "project_name"),
    ("project_name", '"my-project"', "project"),
    ("experiment", '"my-experiment"', "experiment_name project"),
    ("keep_last", "3", "max_to_keep save_total_limit keep"),
    ("max_to_keep", "3", "keep_last keep save_total_limit save_top_k"),
    ("keep", "10", "keep_last max_to_keep"),
)
"""fluxcb's name of an argument, an example of a value, and its names in other libraries. The first that fits counts."""

_OTHER_UNITS = ("warmup_steps", "refresh_rate", "factor")
"""Names in other libraries whose values mean something else, such as batches instead of epochs."""

_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400}
"""The units of time that arguments have (seconds). fluxcb's own functions only have `seconds`."""

_LITERALS = (bool, int, float, str, bytes, tuple, list, dict, set, type(None))

_OF_PHASE = re.compile(r"(?:(val|valid|validation|eval)|train|training)[_/](.+)")


def fix_of(
    name: str, kwargs: Mapping[str, Any], known: Sequence[str], rest: str | None, fixes: Mapping[str, Fix]
) -> str:
    """Return the fix for a keyword argument that a function does not have.

    Args:
        name: The name of the argument.
        kwargs: The keyword arguments of the call.
        known: The names of the function's arguments that were not passed by position.
        rest: The name of the parameter for any number of positional arguments, or None.
        fixes: The fixes that the function provides.
    """
    if own := own_fix(name, kwargs, fixes):
        return own
    value = kwargs[name]
    meant = [(ours, example) for ours, example, others in _ELSEWHERE if name in others.split()]
    if name == rest or any(ours == rest for ours, _ in meant):
        return f"pass the values by position, without `{name}=`"
    if name in _UNITS and "seconds" in known:
        return _duration(kwargs)
    for ours, example in meant:
        if ours in known:
            return _renamed(name, value, ours, example)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if rest is not None and callable(value) and not near:
        return f"pass the value by position, without `{name}=`"
    return f"write `{near[0]}=...` instead of `{name}=...`" if near else f"leave out `{name}=...`"


def own_fix(name: str, kwargs: Mapping[str, Any], fixes: Mapping[str, Fix]) -> str | None:
    """Return the fix that a function provides for an argument, or None."""
    fix = fixes.get(name)
    return fix(kwargs.get(name), kwargs) if callable(fix) else fix


def with_value(text: str, example: str, *, positive: bool = True) -> FixOfValue:
    """Return the fix with the text, where `<value>` stands for the user's value; see `shown_value`."""
    return lambda value, kwargs: text.replace("<value>", shown_value(value, example, positive=positive))


def shown_value(value: Any, example: str, *, positive: bool = True) -> str:
    """Return the source of the value that the user passed if it is like the example, otherwise the example.

    If the example is a number and the value is an object without a source, such as a random key, return `...`.

    Args:
        value: The value.
        example: The source of a value.
        positive: Whether a number must be above 0. Others often have a special meaning, such as `save_top_k=-1`.
    """
    try:
        kind = type(ast.literal_eval(example))
    except ValueError:  # an expression, such as `optax.adam(1e-3)`
        return example
    if kind in (int, float) and not isinstance(value, _LITERALS):
        return "..."
    if type(value) is not kind and not (kind is float and type(value) is int):
        return example
    if isinstance(value, str):
        return f'"{value}"' if value.isprintable() and not set(value) & {'"', "\\", "`"} else example
    fits = isinstance(value, int | float) and math.isfinite(value) and (value > 0 or not positive)
    return repr(value) if fits and kind in (int, float) else example


def name_of_metric(name: Any) -> str:
    """Return fluxcb's name of a metric that has a name of Keras or Lightning: `val_loss` is `loss`.

    A name without a phase is that of the training, as in Keras. In fluxcb, it is that of the validation.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w@.-]+(/[\w@.-]+)*", name):
        return "loss"
    found = _OF_PHASE.fullmatch(name)
    if found is None:
        return name if "/" in name else f"training/{name}"
    validation, metric = found.groups()
    if not validation:
        return f"training/{metric}"
    return f"validation/{metric}" if "/" in metric else metric


def _renamed(name: str, value: Any, ours: str, example: str) -> str:
    """Return the fix for an argument that is called `ours` in fluxcb."""
    instead = f"instead of `{name}=...`"
    if ours == "metric":
        metric = name_of_metric(value)
        other = f', or `metric="{value}"` for that of the validation' if metric == f"training/{value}" else ""
        return f'write `metric="{metric}"` {instead}{other}'
    if ours == "seconds" and isinstance(value, datetime.timedelta):
        value = value.total_seconds()
    # A seed can be 0 or negative.
    shown = example if name in _OTHER_UNITS else shown_value(value, example, positive=ours != "key")
    return f"write `{ours}={shown}` {instead}"


def _duration(kwargs: Mapping[str, Any]) -> str:
    """Return the fix for a duration in several units."""
    units = {name: value for name, value in kwargs.items() if name in _UNITS}
    instead = " and ".join(f"`{name}=...`" for name in units)
    if not all(type(value) in (int, float) and math.isfinite(value) for value in units.values()):
        return f"write `seconds=3600` instead of {instead}"
    total = sum(_UNITS[name] * value for name, value in units.items())
    return f"write `seconds={int(total) if total == int(total) else total}` instead of {instead}"
