"""Manipulated checkpoints with valid checksums raise an error and change nothing, or restore what they contain."""

import functools
import io
import json
import shutil
import signal
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fluxcb._errors import CheckpointCorruptError, FluxcbError, ResumeError
from fluxcb._run.encoding import Encoder
from fluxcb.checkpoints import load_params
from fluxcb.checkpoints.manifest import MANIFEST
from tests.reliability.forged_checkpoints import Keeps, header_of, host_of, learner, set_header, set_host, sign, told


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run" / "4"))


# -- fixed cases --------------------------------------------------------------------------------------

HOST: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a key without its array": lambda host: host["key"].pop("at"),
    "a key of another kind": lambda host: host["key"].update({"as": "rbg"}),
    "no key": lambda host: host.update(key={}),
    "an array twice": lambda host: host["callbacks"]["Keeps"].update(more=[dict(host["callbacks"]["Keeps"]["array"])]),
    "an array stored as objects": lambda host: host["callbacks"]["Keeps"]["array"].update({"as": "O"}),
    "an array stored as text": lambda host: host["callbacks"]["Keeps"]["array"].update({"as": "U2"}),
    "an array with a name that is none": lambda host: host["callbacks"]["Keeps"]["array"].update(at=["0"]),
    "a missing field": lambda host: host["callbacks"]["Keeps"].pop("list"),
    "a callback that is a list": lambda host: host["callbacks"].update(Keeps=[1]),
    "callbacks that are one value": lambda host: host.update(callbacks={"$": "numbers", "at": "0"}),
    "steps that are text": lambda host: host["cbstate"]["metrics_step"]["of"]["training"].update(steps="1234"),
    "counters of a phase that are text": lambda host: host["cbstate"]["history"]["of"].update(training=""),
    "an object that is a list": lambda host: host["cbstate"].update(history=[[[]]]),
    "an object without content": lambda host: host["cbstate"].update(history={"$": "state"}),
    "an unknown kind": lambda host: host["callbacks"]["Keeps"].update(list={"$": "evil", "of": []}),
    "a set of lists": lambda host: host["callbacks"]["Keeps"].update(set={"$": "set", "of": [[1]]}),
    "a dict with lists as keys": lambda host: host["callbacks"]["Keeps"].update(pairs={"$": "dict", "of": [[[1], 2]]}),
    "a position without a number": lambda host: host["data"]["training"].pop("consumed"),
    "a position that is text": lambda host: host["data"]["training"].update(total="4"),
    "a position behind the end": lambda host: host["data"]["training"].update(
        open=True, consumed=10**9, total=10**9, state=None
    ),
    "no state of a part of cbstate": lambda host: host["cbstate"].pop("metrics_step"),
    "no position of the data": lambda host: host["data"].pop("training"),
    "a kind that is null": lambda host: host["callbacks"]["Keeps"]["tuple"].update({"$": None}),
    "a kind that is a list": lambda host: host["callbacks"]["Keeps"]["key"].update({"$": []}),
    "numbers that are a matrix": lambda host: host["callbacks"]["Keeps"]["array"].update({"$": "numbers"}),
    "a scalar that is a matrix": lambda host: host["callbacks"]["Keeps"]["array"].update({"$": "scalar"}),
    "a key of a dict twice": lambda host: host["callbacks"]["Keeps"]["pairs"]["of"].append([1, "again"]),
    "a state of the data that is none": lambda host: host["data"]["training"].update(open=True, state={"x": [1]}),
}


@pytest.mark.parametrize("case", list(HOST))
def test_hostile_state_changes_nothing_and_valid_checkpoint_restores(
    checkpoint: Path, before: Path, original: Path, case: str
) -> None:
    host = host_of(checkpoint)
    HOST[case](host)
    set_host(checkpoint, host)
    hostile = learner(checkpoint.parent)
    hostile.restore(before)
    held = told(hostile)
    with pytest.raises(FluxcbError):
        hostile.restore(checkpoint)
    assert told(hostile) == held
    hostile.restore(original)
    expected = learner(checkpoint.parent)
    expected.restore(original)
    assert told(hostile) == told(expected)


def test_deeply_nested_json_changes_nothing(checkpoint: Path) -> None:
    host = host_of(checkpoint)
    for depth in (300, 900, 100_000):
        deep = json.dumps(host).replace('"x"', "[" * depth + "]" * depth)
        set_host(checkpoint, deep)
        hostile = learner(checkpoint.parent)
        held = told(hostile)
        with pytest.raises(FluxcbError):
            hostile.restore(checkpoint)
        assert told(hostile) == held


def test_error_in_load_state_dict_is_reported(checkpoint: Path, refused: Any) -> None:
    host = host_of(checkpoint)
    del host["callbacks"]["Keeps"]["list"]
    set_host(checkpoint, host)
    with pytest.raises(ResumeError) as caught:
        learner(checkpoint.parent).restore(checkpoint)
    error = caught.value
    assert error.what == "Keeps() cannot restore its state from the checkpoint: KeyError: 'list'."
    assert error.where[0].startswith("Keeps.load_state_dict  ")
    assert error.why.startswith("the saved state has 'number', 'text', ")
    assert error.fix == ("write `state.get('list', default)`, because the checkpoint does not have the key",)


@pytest.mark.parametrize(
    ("message", "second", "note"),
    [
        ("no such file", "no such file", "for the same reason"),
        ("", "", "for the same reason"),
        ("no such file", "disk full", "OSError: disk full"),
    ],
)
def test_error_of_undoing_a_restore_is_a_note(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, message: str, second: str, note: str
) -> None:
    messages = [message, second]

    def fail(self: Keeps, state: Any) -> None:
        raise OSError(messages.pop(0))

    monkeypatch.setattr(Keeps, "load_state_dict", fail)
    with pytest.raises(ResumeError) as raised:
        learner(checkpoint.parent).restore(checkpoint)
    assert raised.value.what == f"Keeps() cannot restore its state from the checkpoint: OSError: {message}."
    separator = ", " if note == "for the same reason" else ": "
    assert raised.value.__notes__ == [f"and the state of Keeps() could not be undone{separator}{note}"]


HEADERS: dict[str, dict[str, Any]] = {
    "924 GiB": {"shape": [2, 124_000_000_000], "chunks": [2, 3]},
    "a chunk of 924 GiB": {"chunks": [2, 124_000_000_000]},
    "another shape": {"shape": [3, 2]},
    "another type": {"dtype": "<f8"},
    "another rank": {"shape": [6], "chunks": [6]},
}


@pytest.mark.parametrize("case", list(HEADERS))
def test_forged_header_raises_before_memory_is_allocated(checkpoint: Path, case: str) -> None:
    set_header(checkpoint, "params", "w", {**header_of(checkpoint, "params", "w"), **HEADERS[case]})
    hostile = learner(checkpoint.parent)
    held = told(hostile)
    for attempt in (hostile.restore, functools.partial(load_params, average=None)):
        with pytest.raises(CheckpointCorruptError, match=r"for params: w, but its manifest lists float32\[2, 3\]"):
            attempt(checkpoint)
    assert told(hostile) == held


@pytest.mark.parametrize("depth", [20, 100_000])
def test_deeply_nested_header_raises_before_tensorstore_parses_it(checkpoint: Path, depth: int) -> None:
    text = json.dumps({**header_of(checkpoint, "params", "w"), "shape": 0})
    set_header(checkpoint, "params", "w", text.replace('"shape": 0', f'"shape": {"[" * depth}2{"]" * depth}'))
    for attempt in (learner(checkpoint.parent).restore, functools.partial(load_params, average=None)):
        with pytest.raises(
            CheckpointCorruptError, match="has a header that is too long or nested too deeply for params"
        ):
            attempt(checkpoint)


def npy(header: str, data: bytes = b"") -> bytes:
    """Return a file in the format of `np.save` with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def zipped(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of names that occur twice
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def with_sizes(data: bytes, size: int) -> bytes:
    """Return a zip file whose directory declares another size of its only member."""
    at = data.index(b"PK\x01\x02") + 20
    return data[:at] + 2 * size.to_bytes(4, "little") + data[at + 8 :]


ONE = "{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n"
EIGHT = np.ones(1).tobytes()
OTHER = "ValueError: 0.npy in host.npz is not an array of numbers in version 1.0 of the NumPy format"
ARCHIVES: dict[str, tuple[bytes, str]] = {
    "no archive": (b"PK", "BadZipFile: "),
    "a large shape": (
        zipped(("0.npy", npy(ONE.replace("(1,)", "(1000000000000,)"), EIGHT))),
        "ValueError: 0.npy in host.npz has 8 bytes for float64[1000000000000]",
    ),
    "a negative shape": (zipped(("0.npy", npy(ONE.replace("(1,)", "(-1, -1)"), EIGHT))), OTHER),
    "objects": (zipped(("0.npy", npy(ONE.replace("<f8", "|O8"), EIGHT))), OTHER),
    "text": (zipped(("0.npy", npy(ONE.replace("<f8", "<U2"), EIGHT))), OTHER),
    "no such type": (zipped(("0.npy", npy(ONE.replace("<f8", "<f9"), EIGHT))), "TypeError: "),
    "code": (zipped(("0.npy", npy("__import__('os').abort()"))), OTHER),
    "a deep header": (zipped(("0.npy", npy("(" * 9000))), OTHER),
    "a header of another length": (zipped(("0.npy", npy(ONE, EIGHT).replace(b"}", b"} "))), OTHER),
    "another version": (zipped(("0.npy", npy(ONE, EIGHT).replace(b"\x01\x00", b"\x02\x00", 1))), OTHER),
    "a compressed member": (
        zipped(("0.npy", npy(ONE, EIGHT)), compression=zipfile.ZIP_DEFLATED),
        "ValueError: 0.npy in host.npz is compressed",
    ),
    "a member that is larger than the file": (
        with_sizes(zipped(("0.npy", npy(ONE, EIGHT))), 1 << 31),
        "ValueError: the members of host.npz are larger than the file",
    ),
    "a name twice": (
        zipped(("0.npy", npy(ONE, EIGHT)), ("0.npy", npy(ONE, EIGHT))),
        "ValueError: an array appears twice in host.npz",
    ),
}


@pytest.mark.parametrize("case", list(ARCHIVES))
def test_forged_host_array_archive_raises(checkpoint: Path, case: str) -> None:
    data, reason = ARCHIVES[case]
    (checkpoint / "host.npz").write_bytes(data)
    sign(checkpoint)
    hostile = learner(checkpoint.parent)
    held = told(hostile)
    with pytest.raises(CheckpointCorruptError) as caught:
        hostile.restore(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint} cannot be read, although its checksums are correct: {reason}")
    assert told(hostile) == held


def test_manifest_and_header_claiming_924_gib_raise(checkpoint: Path, refused: Any) -> None:
    shape = [2, 124_000_000_000]
    set_header(checkpoint, "params", "w", {**header_of(checkpoint, "params", "w"), "shape": shape})
    content = json.loads((checkpoint / MANIFEST).read_text())
    content["trees"]["params"]["w"] = f"float32[{shape[0]}, {shape[1]}]"
    (checkpoint / MANIFEST).write_text(json.dumps(content))
    sign(checkpoint)
    stored = sum(path.stat().st_size for path in (checkpoint / "params").rglob("*") if path.is_file())
    nbytes = 4 * shape[0] * shape[1] + 4 * 3
    with refused(
        CheckpointCorruptError,
        f"{checkpoint / 'params'} claims to contain {nbytes:,} bytes of arrays in {stored:,} bytes of files.\n"
        f"  where: {checkpoint / 'params'}\n"
        "  why:   fluxcb allocates this much memory only if the Learner or `like` confirms the shapes of the arrays\n"
        "  fix:   restore a valid checkpoint from a copy",
    ):
        load_params(checkpoint, average=None)
    with pytest.raises(ResumeError, match=r"params: w was float32\[2, 124000000000\], and is float32\[2, 3\] now"):
        learner(checkpoint.parent).restore(checkpoint)


def test_signal_during_restore_changes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AlarmError(Exception):
        pass

    def handle(number: int, frame: Any) -> None:
        raise AlarmError

    learned = learner(checkpoint.parent)
    held = told(learned)
    monkeypatch.setattr(Keeps, "load_state_dict", lambda self, state: signal.raise_signal(signal.SIGUSR1))
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(AlarmError):
            learned.restore(checkpoint)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    monkeypatch.undo()
    assert told(learned)["trees"] == held["trees"]
    assert told(learned) == held


def test_encoder_names_each_array_once() -> None:
    """A restore rejects arrays that are referenced twice, so fluxcb must not write them."""
    array, encoder = np.arange(3), Encoder()
    first, second = encoder.encode([array, array], "x")
    assert first["at"] != second["at"]
