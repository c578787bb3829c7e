import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fluxcb import DeclarationError
from fluxcb.logging import Image, JSONLinesBackend, Text, Value
from fluxcb.logging.backend_group import BackendGroup
from fluxcb.logging.hub import Put

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND, THIRD = (
    '{"step": 1, "epoch": 1, "time": 101.0, "a": 1.0, "b": 2.5}\n',
    '{"step": 2, "epoch": 1, "time": 102.0, "a": 3.0}\n',
    '{"step": 3, "epoch": 2, "time": 103.0, "a": 4.0}\n',
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "log.jsonl"


def opened(path, *, resumes=False, state=None, append=False):
    backend = JSONLinesBackend(path, append=append)
    backend.load_state_dict(state or {})
    backend.open(resumes=resumes)
    return backend


def test_a_line_per_step(path, log):
    with JSONLinesBackend(path) as backend:
        log(backend, (1, 1, "a", 1), (1, 1, "b", 2.5), (2, 1, "a", 3))
        assert path.read_text() == ""  # until it flushes
        backend.flush()
        assert path.read_text() == FIRST + SECOND
        backend.flush()
        log(backend, (3, 2, "a", 4))
    assert path.read_text() == FIRST + SECOND + THIRD


def test_a_name_that_comes_again_begins_a_line_and_so_does_an_epoch(path, log):
    with JSONLinesBackend(path) as backend:
        log(backend, (2, 1, "a", 1), (2, 1, "b", 2), (2, 1, "a", 3), (2, 1, "c", 4), (2, 2, "d", 5))
    assert [list(json.loads(line).items()) for line in path.read_text().splitlines()] == [
        [("step", 2), ("epoch", 1), ("time", 102.0), ("a", 1.0), ("b", 2.0)],
        [("step", 2), ("epoch", 1), ("time", 102.0), ("a", 3.0), ("c", 4.0)],
        [("step", 2), ("epoch", 2), ("time", 102.0), ("d", 5.0)],
    ]


def test_numbers_survive_to_the_last_bit_and_what_is_not_finite_is_text(path, log):
    numbers = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.nan, math.inf, -math.inf]
    with JSONLinesBackend(path) as backend:
        log(backend, *((step, 1, "a", number) for step, number in enumerate(numbers)))

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    read = [json.loads(line, parse_constant=refuse)["a"] for line in path.read_text().splitlines()]
    assert read[-3:] == ["NaN", "Infinity", "-Infinity"]
    assert [float(value).hex() for value in read] == [number.hex() for number in numbers]


def test_texts_are_texts(path):
    text = 'a "quote",\nÜ \u2028 \ud83d\ude00'.encode("utf-16", "surrogatepass").decode("utf-16")
    with JSONLinesBackend(path) as backend:
        backend.log("note", Text(text), step=0, epoch=0, seconds=1.0)
    assert len(path.read_bytes().splitlines()) == 1
    assert json.loads(path.read_text())["note"] == text
    assert not issubclass(Image, JSONLinesBackend.loggables)


def test_a_new_run_keeps_the_log_of_another_under_another_name(path, log):
    with JSONLinesBackend(path) as backend:
        log(backend, (2, 1, "a", 3))
    for previous in ("log-1.jsonl", "log-2.jsonl"):
        backend = opened(path)
        assert list(backend.output_locations()) == [path]
        assert not path.with_name(previous).exists()  # nothing has been written
        log(backend, (3, 2, "a", 4))
        backend.flush()
        backend.close()
        moved = f"{path}, after moving the log of an earlier run to {path.with_name(previous)}"
        assert list(backend.output_locations()) == [moved]
        assert path.read_text() == THIRD
    assert [path.with_name(name).read_text() for name in ("log-1.jsonl", "log-2.jsonl")] == [SECOND, THIRD]


def test_a_run_without_values_leaves_the_log_of_another_alone(path, log):
    with JSONLinesBackend(path) as backend:
        log(backend, (2, 1, "a", 3))
    with JSONLinesBackend(path):
        pass
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_text() == SECOND


def test_a_checkpoint_before_the_first_value_is_of_the_new_log(path, log):
    with JSONLinesBackend(path) as backend:
        log(backend, (2, 1, "a", 3))
    backend = opened(path)
    state = backend.state_dict()
    backend.close()
    backend = opened(path, resumes=True, state=state)
    log(backend, (3, 2, "a", 4))
    backend.flush()
    backend.close()
    assert (path.read_text(), path.with_name("log-1.jsonl").read_text()) == (THIRD, SECOND)


def test_both_runs_share_a_log_if_the_user_says_so(path, log):
    with JSONLinesBackend(path) as backend:
        log(backend, (2, 1, "a", 3))
    backend = opened(path, append=True)
    log(backend, (3, 2, "a", 4))
    backend.flush()
    backend.close()
    assert path.read_text() == SECOND + THIRD


def test_an_empty_file_is_no_log(path, log):
    path.parent.mkdir()
    path.touch()
    with JSONLinesBackend(path) as backend:
        log(backend, (2, 1, "a", 3))
    assert path.read_text() == SECOND


@pytest.mark.parametrize("torn", ["{", SECOND[:-1], SECOND[:20], "x" * 200_000])
@pytest.mark.parametrize("before", ["", FIRST, FIRST + SECOND])
def test_a_torn_line_is_cut_off(path, log, before, torn):
    path.parent.mkdir()
    path.write_text(before + torn)
    backend = opened(path, resumes=True)
    assert path.read_text() == before
    log(backend, (3, 2, "a", 4))
    backend.flush()
    backend.close()
    assert path.read_text() == before + THIRD


def test_a_run_that_resumes_has_the_lines_of_its_checkpoint(path, log):
    backend = opened(path)
    log(backend, (1, 1, "a", 1), (1, 1, "b", 2.5))
    backend.flush()
    state = backend.state_dict()
    assert state == {"offset": len(FIRST)}
    log(backend, (2, 1, "a", 9))
    backend.flush()
    backend.close()
    with path.open("a") as file:
        file.write('{"step": 3, "ep')
    backend = opened(path, resumes=True, state=state)
    assert backend.state_dict() == state
    log(backend, (2, 1, "a", 3))
    backend.flush()
    backend.close()
    assert path.read_text() == FIRST + SECOND


@pytest.mark.parametrize("content", ["", FIRST, SECOND + FIRST])
def test_a_log_that_was_changed_is_appended_to_with_a_warning(path, log, content):
    path.parent.mkdir()
    path.write_text(content)
    offset = len(FIRST) + 20
    with pytest.warns(UserWarning, match=r"has changed since the checkpoint was written; new records are appended"):
        backend = opened(path, resumes=True, state={"offset": offset})
    log(backend, (3, 2, "a", 4))
    backend.flush()
    backend.close()
    assert path.read_text() == content + THIRD


def test_flushing_is_one_write(path, log, monkeypatch):
    written = []
    write = os.write
    backend = opened(path)
    monkeypatch.setattr(os, "write", lambda handle, data: written.append(data) or write(handle, data))
    log(backend, (1, 1, "a", 1), (1, 1, "b", 2.5), (2, 1, "a", 3))
    backend.flush()
    backend.close()
    assert written == [(FIRST + SECOND).encode()]


def test_a_short_write_is_continued_and_one_that_fails_is_taken_back(path, log, monkeypatch):
    write, room = os.write, [10]

    def nearly_full(handle, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[: room[0]]
        room[0] -= len(data)
        return write(handle, data)

    backend = opened(path)
    log(backend, (1, 1, "a", 1), (1, 1, "b", 2.5))
    backend.flush()
    monkeypatch.setattr(os, "write", nearly_full)
    log(backend, (2, 1, "a", 3))
    with pytest.raises(OSError, match="No space left"):
        backend.flush()
    assert path.read_text() == FIRST
    room[0] = 10_000
    monkeypatch.setattr(os, "write", lambda handle, data: nearly_full(handle, data[:7]))
    log(backend, (2, 1, "a", 3))
    backend.flush()
    backend.close()
    assert path.read_text() == FIRST + SECOND


def test_a_full_disk_keeps_whole_lines_and_stops_nobody(small_disk, path):
    folder, _ = small_disk
    full, fine = JSONLinesBackend(folder / "log.jsonl"), JSONLinesBackend(path)
    group = BackendGroup([full, fine])
    group.open(resumes=False)

    def run():
        for step in range(1000):
            group.send([Put("note", Text("x" * 500), step, 1, 9.0)])
        group.close()

    with pytest.warns(UserWarning, match="No space left on device") as caught:
        run()
    assert len(caught) == 1
    kept = (folder / "log.jsonl").read_text()
    lines = [json.loads(line)["step"] for line in kept.splitlines()]
    assert kept.endswith("}\n")
    assert 100 < len(lines) < 130  # 64 KiB of lines of 552 bytes
    assert lines == list(range(len(lines)))
    assert len(path.read_text().splitlines()) == 1000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_device_that_is_always_full_fails_at_each_write(log):
    backend = opened("/dev/full")
    log(backend, (1, 1, "a", 1))
    with pytest.raises(OSError, match="No space left"):
        backend.flush()
    backend.close()


def test_a_read_only_folder_is_an_error_at_once(small_disk):
    folder, make_read_only = small_disk
    if not make_read_only():
        pytest.skip("the disk cannot be made read-only")
    with pytest.raises(DeclarationError) as error:
        JSONLinesBackend(folder / "runs" / "log.jsonl")
    assert str(error.value) == (
        f"JSONLinesBackend({str(folder / 'runs' / 'log.jsonl')!r}) cannot write to {folder / 'runs' / 'log.jsonl'}: "
        f"{folder} is not writable.\n"
        "  why:   without this check, training would fail at its beginning or later\n"
        "  fix:   name a file in a folder that you may write to"
    )


def test_paths_that_cannot_be_are_errors_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path, why in [
        (tmp_path, f"{tmp_path} is a folder."),
        (tmp_path / "file" / "log.jsonl", f"{tmp_path / 'file'} is a file, so no folder can be created in it."),
    ]:
        with pytest.raises(DeclarationError) as error:
            JSONLinesBackend(path)
        assert error.value.what == f"JSONLinesBackend({str(path)!r}) cannot write to {path}: {why}"
    for path in (None, "", 3):
        with pytest.raises(DeclarationError, match=r"takes a path, not"):
            JSONLinesBackend(path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # looking makes no folders


def test_one_that_is_not_open_says_so(path, log):
    backend = JSONLinesBackend(path)
    assert backend.state_dict() == {}
    log(backend, (1, 1, "a", 1))
    with pytest.raises(DeclarationError, match=r"is not open\.\n  fix:   to use a backend without a Learner, open it"):
        backend.flush()


WRITER = """
import sys
from fluxcb.logging import JSONLinesBackend, Value
backend = JSONLinesBackend(sys.argv[1])
backend.open(resumes=True)
print("open", flush=True)
for step in range(10**9):
    for name in "abcdefgh":
        backend.log(name * 500, Value(step), step=step, epoch=1, seconds=0.0)
    backend.flush()
"""


def test_a_killed_process_leaves_whole_lines(path, log):
    for round in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        ) as process:
            process.stdout.readline()
            before = path.stat().st_size
            while path.stat().st_size < before + 40_000 * (1 + round):
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
        opened(path, resumes=True).close()
        text = path.read_text()
        assert text.endswith("}\n")
        rows = [json.loads(line) for line in text.splitlines()]
        assert all(len(row) == 3 + 8 for row in rows)
        first = [i for i, row in enumerate(rows) if row["step"] == 0]
        assert len(first) == round + 1  # each process has written, behind the others
        for begin, end in zip(first, [*first[1:], len(rows)], strict=True):
            assert [row["step"] for row in rows[begin:end]] == list(range(end - begin))


def test_values_are_named_by_the_protocol():
    assert JSONLinesBackend.loggables == (Value, Text)
    assert repr(JSONLinesBackend("a.jsonl")) == "JSONLinesBackend('a.jsonl')"
