"""HumanHyperParamSetter: which files it uses, and which values it accepts."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from fluxcb import DeclarationError
from fluxcb.callbacks import HumanHyperParamSetter, LearningRate, ObjAttrParam
from fluxcb.testing import testlearner


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "hyper.txt"
    path.touch(mode=0o600)
    path.write_text("learning_rate: 0.25")
    return path


def warned(setter):
    """Return the value that the file sets, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = setter.next_value(SimpleNamespace(hyperparams={"learning_rate": 1.0, "momentum": 0.9}, cbstate={}))
    return value, [str(warning.message) for warning in caught]


def replaced_by(make):
    def prepare(path):
        path.unlink()
        make(path)

    return prepare


def moved(link):
    def prepare(path):
        path.rename(path.with_suffix(".other"))
        link(path, path.with_suffix(".other"))

    return prepare


HARD_LINK = "it has more than one name (hard links), and another user may have added this one"
REFUSED = {
    "pipe": (replaced_by(os.mkfifo), "it is not a regular file"),
    "directory": (replaced_by(Path.mkdir), "it is not a regular file"),
    "endless": (replaced_by(lambda path: path.symlink_to("/dev/zero")), "it is a symbolic link"),
    "link": (moved(Path.symlink_to), "it is a symbolic link"),
    "names": (moved(Path.hardlink_to), HARD_LINK),
    "group": (lambda path: path.chmod(0o620), "others may write to it; run `chmod go-w` on it"),
    "others": (lambda path: path.chmod(0o602), "others may write to it; run `chmod go-w` on it"),
    "long": (lambda path: path.write_bytes(b"\n" * 65_537), "it has 65537 bytes, and the maximum is 65536"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_file_that_others_can_write_is_ignored(how, file):
    prepare, reason = REFUSED[how]
    prepare(file)
    setter = HumanHyperParamSetter.__new__(HumanHyperParamSetter)  # a directory is refused at construction
    setter.__dict__.update(HumanHyperParamSetter(LearningRate, file.with_name("none")).__dict__, file=file)
    text = f"HumanHyperParamSetter(learning_rate, {str(file)!r}) cannot read {file}: {reason}"
    assert warned(setter) == (None, [text])


def test_a_device_does_not_block(monkeypatch):
    setter = HumanHyperParamSetter(LearningRate, "/dev/zero")
    assert warned(setter) == (
        None,
        ["HumanHyperParamSetter(learning_rate, '/dev/zero') cannot read /dev/zero: it is not a regular file"],
    )


def test_the_file_of_another_user_is_ignored(file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    learner = testlearner(HumanHyperParamSetter(LearningRate, file), learning_rate=0.5)
    with pytest.warns(UserWarning, match="cannot read .*: it belongs to another user$"):
        learner.fit(1)
    assert learner.hyperparams == {"learning_rate": 0.5}


def test_the_suggested_fix_makes_the_file_usable(file):
    file.chmod(0o666)
    setter = HumanHyperParamSetter(LearningRate, file)
    assert warned(setter)[0] is None
    file.chmod(0o644)  # chmod go-w
    assert warned(setter) == (0.25, [])


def test_the_maximum_file_size(file):
    text = b"learning_rate: 0.125\n"
    file.write_bytes(text + b"#" * (65_536 - len(text)))
    assert warned(HumanHyperParamSetter(LearningRate, file)) == (0.125, [])


def test_on_platforms_without_file_owners_kind_and_size_are_checked(file, monkeypatch):
    monkeypatch.delattr(os, "geteuid")
    assert warned(HumanHyperParamSetter(LearningRate, file)) == (0.25, [])


def test_a_negative_learning_rate_is_skipped(file):
    file.write_text("learning_rate: 0.5\nlearning_rate: -0.25\nmomentum: -0.25")
    assert warned(HumanHyperParamSetter(LearningRate, file)) == (0.5, [f"{file}:2 is skipped: -0.25 is negative"])
    assert warned(HumanHyperParamSetter("momentum", file)) == (-0.25, [])


@pytest.mark.parametrize("value", ["1e39", "-1e39", "1e308"])
def test_a_value_beyond_float32_is_skipped(value, file):
    file.write_text(f"learning_rate: 0.5\nlearning_rate: {value}")
    text = f"{file}:2 is skipped: {float(value):g} is not finite in float32"
    assert warned(HumanHyperParamSetter(LearningRate, file)) == (0.5, [text])


def test_limits(file):
    file.write_text("learning_rate: 1\nmomentum: 7\nlearning_rate: 0.1\nlearning_rate: 1.5\nlearning_rate: -0.5")
    setter = HumanHyperParamSetter(LearningRate, file, limits=(0, 1))
    texts = [f"{file}:{line} is skipped: {value} is not between 0 and 1" for line, value in ((4, 1.5), (5, -0.5))]
    assert warned(setter) == (0.1, texts)


@pytest.mark.parametrize("limits", [1.0, (1.0,), (1.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0), ("0", 1), None])
def test_bad_limits(limits, refused):
    text = (
        f"`limits` of `HumanHyperParamSetter` must be two finite numbers in ascending order, not {limits!r}.\n"
        "  fix:   write e.g. `limits=(0.0, 1.0)`"
    )
    with refused(DeclarationError, text):
        HumanHyperParamSetter(LearningRate, limits=limits)
    HumanHyperParamSetter(LearningRate, limits=(0.0, 1.0))


class Sampler:
    size = 1.0


def test_line_for_unknown_hyperparameter_is_skipped(file):
    file.write_text("learning_rate: 0.5\nlearning_rat: 0.25\nlr: 0.25\nSampler_size: 2")
    learner = testlearner(HumanHyperParamSetter(LearningRate, file))
    with pytest.warns(UserWarning, match="is skipped") as caught:
        learner.fit(1)
    # The setter reads the file at the beginning of the fit and after the epoch.
    assert sorted({str(warning.message) for warning in caught}) == [
        f"{file}:2 is skipped: there is no hyperparameter `learning_rat`. Did you mean `learning_rate`?",
        f"{file}:3 is skipped: there is no hyperparameter `lr`.",
        f"{file}:4 is skipped: there is no hyperparameter `Sampler_size`.",
    ]
    assert float(learner.hyperparams["learning_rate"]) == 0.5
    sampler = Sampler()
    other = HumanHyperParamSetter(ObjAttrParam(sampler, "size"), file)
    testlearner(HumanHyperParamSetter(LearningRate, file), other).fit(1)
    assert sampler.size == 2.0
