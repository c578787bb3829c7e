"""Unusable paths, flags, rates and log files raise errors of fluxcb."""

import json

import numpy as np
import pytest

from fluxcb import CheckpointError, DataError, DeclarationError
from fluxcb._tools.cli import main
from fluxcb._tools.runs import read_run
from fluxcb.callbacks import HyperParamSetterWithFunc, LearningRate
from fluxcb.checkpoints import load_params
from fluxcb.data import ArrayLoader
from fluxcb.testing import testlearner


@pytest.mark.parametrize("path", [None, 3, "a\0b", b"a\0"])
def test_invalid_checkpoint_path_raises(path, refused):
    text = (
        f"The location of a checkpoint must be a path, not {path!r}.\n"
        "  fix:   use the directory that was passed to `Checkpointer`"
    )
    with refused(DeclarationError, text):
        load_params(path)
    with refused(DeclarationError, text):
        testlearner().restore(path)


def test_long_name_raises(refused):
    name = "n" * 300
    with refused(CheckpointError, f"{name} cannot be read: File name too long.\n  fix:   use another directory"):
        load_params(name)


@pytest.mark.parametrize("name", ["shuffle", "drop_last", "device"])
@pytest.mark.parametrize("value", ["no", "cpu", 1, None])
def test_invalid_flag_raises(name, value):
    with pytest.raises(DeclarationError, match=f"^`{name}` of `ArrayLoader` must be True or False, not {value!r}"):
        ArrayLoader(np.ones(4), 2, **{name: value})
    ArrayLoader(np.ones(4), 2, **{name: True})


@pytest.mark.parametrize("rate", [1e39, -1e39, float("nan")])
def test_rate_outside_float32_raises(rate, refused):
    learner = testlearner(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: rate))
    with refused(
        DeclarationError,
        f"HyperParamSetterWithFunc(learning_rate) would set `hyperparams.learning_rate` to {rate!r}, "
        "which is not a finite float32 number.\n"
        "  why:   the next step would fail or make every parameter NaN\n"
        "  fix:   return a finite number, or None to keep the current value",
    ):
        learner.fit(1)


GOOD = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize(
    "more",
    [
        '{"step": 3, "lo',  # torn by a kill
        f'{{"step": 3, "loss": {10**400}}}\n',
        f'{{"step": {10**400}, "loss": 3}}\n',
        '{"step": -1e308, "loss": 3}\n{"step": 1e308, "loss": 3}\n',
        json.dumps({"step": 3, "note": "a\u2028b\u2029\x85"}, ensure_ascii=False) + "\n",
    ],
    ids=["torn", "huge value", "huge step", "wide steps", "line separators"],
)
def test_unusual_log_lines_are_read(tmp_path, more):
    file = tmp_path / "log.jsonl"
    file.write_text(GOOD + more, encoding="utf-8")
    assert read_run(file) == {"loss": [(1.0, 2.0), (2.0, 1.0)]}


@pytest.mark.parametrize("text", ["{]\n" + GOOD, "[" * 100_000 + "\n"], ids=["damaged", "deep"])
def test_invalid_log_lines_raise(tmp_path, text):
    file = tmp_path / "log.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=r"log.jsonl cannot be read: "):
        read_run(file)


@pytest.mark.parametrize("steps", [(1, 1e300), (-1e300, 1e300), (1e300, 1e300)])
def test_steps_of_any_size_are_drawn(tmp_path, steps, capsys):
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))
    assert main(["plot", str(file)]) == 0
    assert "loss" in capsys.readouterr().out
