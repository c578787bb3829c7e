"""Fixes for arguments of other libraries that `Learner` and `fit` do not have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fluxcb._keyword_fixes import Fix, shown_value, with_value

__all__ = ["EXPLAIN_FIXES", "FIT_FIXES", "LEARNER_FIXES", "POPULATION_FIT_FIXES"]

_VALIDATION = (
    *("validation_data", "valid_data", "val_data", "eval_data", "validation_loader", "valid_loader", "val_loader"),
    *("val_dataloader", "val_dataloaders", "validation_dataset", "val_dataset", "val_ds"),
)
_TRAINING = (
    *("train_data", "training_data", "train_loader", "train_dataloader", "train_dataloaders", "train_dataset"),
    "train_ds",
)
_ARRAYS = ("x", "y", "xs", "ys")
_BATCHES = ("batch_size", "batchsize", "shuffle")


def _mapped(names: str, fix: Fix) -> dict[str, Fix]:
    return dict.fromkeys(names.split(), fix)


# -- fixes that depend on several arguments --------------------------------------------------------


def _loader(arrays: str, kwargs: Mapping[str, Any]) -> str:
    """Return the call of a loader for some arrays, with the batch size and `shuffle` of a call."""
    size = next((kwargs[name] for name in ("batch_size", "batchsize") if name in kwargs), None)
    shuffle = f", shuffle={kwargs['shuffle']}" if isinstance(kwargs.get("shuffle"), bool) else ""
    return f"fluxcb.data.ArrayLoader(({arrays}), batch_size={shown_value(size, '32')}{shuffle})"


def _clip(value: Any, kwargs: Mapping[str, Any]) -> str:
    fix = _CLIP_ELEMENTS if kwargs.get("gradient_clip_algorithm") == "value" else _CLIP_NORM
    return fix(kwargs.get("gradient_clip_val"), kwargs)


def _mesh(value: Any, kwargs: Mapping[str, Any]) -> str:
    mesh = f"mesh=fluxcb.mesh(data={shown_value(kwargs.get('devices'), '-1')})"
    sharding = ', sharding="fsdp"' if "fsdp" in str(kwargs.get("strategy")).lower() else ""
    return f"pass a mesh of devices to the Learner: `{mesh}{sharding}`"


def _metrics(value: Any, kwargs: Mapping[str, Any]) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    names = [metric if isinstance(metric, str) else getattr(metric, "__name__", "") for metric in values]
    shown = ", ".join(names) if names and all(name.isidentifier() for name in names) else "accuracy"
    return f"add the metrics to the callbacks: `callbacks=[Metrics({shown})]`"


def _text(value: Any, otherwise: str) -> str:
    """Return a path as it can be in a string, or another text."""
    text = os.path.expanduser(str(value)) if isinstance(value, str | os.PathLike) else ""
    return text if text and text.isprintable() and not set(text) & set('"\\\\`') else otherwise


def _folder_of_run(value: Any, kwargs: Mapping[str, Any]) -> str:
    folder = _text(value, "runs/1")
    return (
        f'add `Checkpointer("{folder}")` to the callbacks, which saves the run, and `Monitors(CSVBackend("{folder}/'
        'log.csv"))`, which logs the metrics'
    )


def _folder_of_checkpoints(value: Any, kwargs: Mapping[str, Any]) -> str:
    return f'add `Checkpointer("{_text(value, "runs/1")}")` to the callbacks'


def _folder_of_logs(value: Any, kwargs: Mapping[str, Any]) -> str:
    return f'add `Monitors` to the callbacks: `callbacks=[Monitors(CSVBackend("{_text(value, "runs/1")}/log.csv"))]`'


def _seconds(value: Any) -> str:
    if isinstance(value, timedelta):
        return repr(value.total_seconds())
    return repr(value) if type(value) in (int, float) and value > 0 else "..."


def _resume(value: Any, kwargs: Mapping[str, Any]) -> str:
    return f'add `Checkpointer("{_text(value, "runs/1")}")` to the callbacks, and write `learner.fit(10, resume=True)`'


def _split(value: Any, kwargs: Mapping[str, Any]) -> str:
    part = 1 - value if isinstance(value, float) and 0 < value < 1 else 0.8
    training, validation = _loader("xs[:n], ys[:n]", kwargs), _loader("xs[n:], ys[n:]", kwargs)
    return (
        f"split the arrays with `n = int({part:g} * len(xs))`, and pass both parts to the Learner: "
        f"`data=({training}, {validation})`"
    )


def _class_weights(value: Any, kwargs: Mapping[str, Any]) -> str:
    weights = [value[i] for i in range(len(value)) if i in value] if isinstance(value, Mapping) else []
    complete = weights and len(weights) == len(value) and all(isinstance(weight, int | float) for weight in weights)
    shown = f"jnp.array({weights if complete else '...'})[ys]"
    return f"in the loss function, multiply the loss of each example by `{shown}` before the mean"


def _sample_weights(value: Any, kwargs: Mapping[str, Any]) -> str:
    return (
        f"add the weights to the batches: `data={_loader('xs, ys, weights', kwargs)}`, and multiply the loss of each "
        "example by its weight in `loss_fn(model, batch)`"
    )


# -- arguments of both -----------------------------------------------------------------------------

_CLIP_NORM = with_value("add `ClipGradients(<value>)` to the callbacks", "1.0")
_CLIP_ELEMENTS = with_value("clip each element in the optimizer: `optax.chain(optax.clip(<value>), optimizer)`", "1.0")
_RATE = with_value("pass it to the optimizer: `fluxcb.inject(optax.adam, learning_rate=<value>)`", "1e-3")

_BOTH: Mapping[str, Fix] = {
    **_mapped("gradient_clip_val gradient_clip_algorithm", _clip),
    **_mapped("clip_norm global_clipnorm max_grad_norm max_norm grad_clip gradient_clip", _CLIP_NORM),
    # In Keras, `clipnorm` limits the norm of each array.
    "clipnorm": with_value(
        "add `ClipGradients(<value>)` to the callbacks, which limits the norm of all gradients together", "1.0"
    ),
    **_mapped("clipvalue clip_value", _CLIP_ELEMENTS),
    **_mapped(
        "accumulate_grad_batches gradient_accumulation_steps accumulation_steps",
        with_value("add `AccumulateGradients(<value>)` to the callbacks", "4"),
    ),
    **_mapped(
        "precision mixed_precision amp",
        "choose the dtypes in the model, e.g. `nn.Dense(10, dtype=jnp.bfloat16)`; for float16, also add "
        "`DynamicLossScale()` to the callbacks",
    ),
    **_mapped(
        "scheduler lr_scheduler schedule lr_schedule",
        "pass an Optax schedule to the optimizer, e.g. `optax.adam(optax.cosine_decay_schedule(1e-3, 1000))`; if the "
        "optimizer is made by `fluxcb.inject`, add `Scheduler({LearningRate: schedule})` to the callbacks",
    ),
    **_mapped("lr learning_rate", _RATE),
    "weight_decay": with_value("pass it to the optimizer: `optax.adamw(1e-3, weight_decay=<value>)`", "0.01"),
    "metrics": _metrics,
    "metric": _metrics,
    **_mapped("logger loggers", 'add `Monitors` to the callbacks: `callbacks=[Monitors(CSVBackend("log.csv"))]`'),
    **_mapped(
        "log_every_n_steps log_freq log_interval",
        with_value(
            "add both to the callbacks: `callbacks=[every(LogMetrics(), steps=<value>), Monitors(CSVBackend("
            '"log.csv"))]`',
            "50",
        ),
    ),
    "default_root_dir": _folder_of_run,
    **_mapped("output_dir root_dir workdir work_dir", _folder_of_run),
    **_mapped("log_dir logdir", _folder_of_logs),
    **_mapped("checkpoint_dir ckpt_dir", _folder_of_checkpoints),
    **_mapped("devices strategy num_devices", _mesh),
    "max_time": lambda value, kwargs: f"add `StopAfter(seconds={_seconds(value)})` to the callbacks",
    "accelerator": "leave out `accelerator=...`; JAX uses the accelerator that it finds, unless the environment "
    "variable `JAX_PLATFORMS` names another one",
    **{
        name: f"leave out `{name}=...`; the default callbacks `ProgressBar`, `MetricsPrinter` and `FitSummary` show "
        "the progress, and e.g. `learner.callbacks.remove(ProgressBar)` turns one of them off"
        for name in ("verbose", "progress", "progress_bar", "show_progress", "enable_progress_bar", "disable_tqdm")
    },
    "class_weight": _class_weights,
    "class_weights": _class_weights,
    "sample_weight": _sample_weights,
    "sample_weights": _sample_weights,
    "validation_split": _split,
}
"""The fixes for arguments that belong neither to a Learner nor to `fit`."""


# -- Learner ---------------------------------------------------------------------------------------


def _training(value: Any, kwargs: Mapping[str, Any]) -> str:
    return _PAIR if any(name in kwargs for name in _VALIDATION) else ""


def _validation(value: Any, kwargs: Mapping[str, Any]) -> str:
    together = any(name in kwargs for name in _TRAINING)
    return _PAIR if together else "pass it with the training data: `data=(training, validation)`"


_PAIR = "pass both as a pair: `data=(training, validation)`"

LEARNER_FIXES: Mapping[str, Fix] = {
    **_BOTH,
    **_mapped(
        "epochs num_epochs max_epochs n_epochs",
        with_value("pass the epochs to `fit`: `learner.fit(<value>)`", "10"),
    ),
    **_mapped("steps num_steps max_steps", with_value("pass the steps to `fit`: `learner.fit(steps=<value>)`", "1000")),
    **dict.fromkeys(_TRAINING, _training),
    **dict.fromkeys(_VALIDATION, _validation),
    **dict.fromkeys(
        (*_ARRAYS, *_BATCHES), lambda value, kwargs: f"pass a loader of batches: `data={_loader('xs, ys', kwargs)}`"
    ),
    **_mapped("resume ckpt_path resume_from_checkpoint", _resume),
    "params": "write `Learner.from_loss(params, loss_fn, optimizer)`",
    "model": "write `Learner(model, loss_fn, optimizer)`",
}
"""The fixes for arguments that a Learner does not have."""


# -- fit -------------------------------------------------------------------------------------------

_DATA = "pass the data to the Learner: `Learner(..., data=(training, validation))`, then write `learner.fit(10)`"


def _batches(value: Any, kwargs: Mapping[str, Any]) -> str:
    if "validation_split" in kwargs:  # one fix for both
        return _split(kwargs["validation_split"], kwargs)
    return f"pass a loader of batches to the Learner: `data={_loader('xs, ys', kwargs)}`"


def _restored(value: Any, kwargs: Mapping[str, Any]) -> str:
    path = _text(value if value not in ("last", "best") else "", "runs/1")
    return (
        "write `resume=True`, which continues from the newest checkpoint of the `Checkpointer` among the callbacks; to "
        f'continue from another checkpoint, call `learner.restore("{path}")` before `fit`'
    )


FIT_FIXES: Mapping[str, Fix] = {
    **_BOTH,
    # `*` and `*numbers` stand for arguments that are passed by position; see `entry_point`.
    **dict.fromkeys((*_VALIDATION, *_TRAINING, *_ARRAYS, "data", "datamodule", "*"), _DATA),
    "*numbers": "write `learner.fit(10)` to train 10 epochs, or `learner.fit(steps=10)` to train 10 steps",
    **dict.fromkeys(_BATCHES, _batches),
    **_mapped(
        "seed key rng rngs", with_value("pass it to the Learner: `Learner(..., key=<value>)`", "0", positive=False)
    ),
    "callbacks": "pass the callbacks to the Learner: `Learner(..., callbacks=[...])`",
    "n": with_value("write `learner.fit(<value>)`, where the number is that of epochs", "10"),
    **_mapped("ckpt_path resume_from_checkpoint", _restored),
    "initial_epoch": "leave out `initial_epoch=...`; the epochs of a second `fit` are counted from those of the first "
    "one, and `learner.fit(10, resume=True)` continues an interrupted fit if a `Checkpointer` has saved it",
}
"""The fixes for arguments that `Learner.fit` does not have."""


def _of_population(fix: Fix) -> Fix:
    if isinstance(fix, str):
        return fix.replace("learner.fit(", "population.fit(")
    return lambda value, kwargs: fix(value, kwargs).replace("learner.fit(", "population.fit(")


POPULATION_FIT_FIXES: Mapping[str, Fix] = {name: _of_population(fix) for name, fix in FIT_FIXES.items()}
"""The fixes for arguments that `Population.fit` does not have."""

EXPLAIN_FIXES: Mapping[str, Fix] = {
    "*": "call it without arguments, which explains all callbacks; the command `fluxcb explain A B` explains a pair"
}
"""The fixes for arguments that `Learner.explain` does not have."""
