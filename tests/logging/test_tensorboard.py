import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb.logging import Audio, File, Graph, Histogram, Image, TensorBoardBackend, Text, Value
from fluxcb.logging.backend_group import BackendGroup
from fluxcb.logging.encoding import png_of, wav_of
from fluxcb.logging.hub import Put

pytest.importorskip("tensorboardX")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def read(folder):
    """Return what TensorBoard's own reader finds."""
    everything = dict.fromkeys(("scalars", "images", "audio", "histograms", "compressedHistograms", "tensors"), 0)
    found = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
    found.Reload()
    return found


def scalars(folder, name="a"):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def opened(folder, *, resumes=False, state=None, append=False):
    backend = TensorBoardBackend(folder, append=append)
    backend.load_state_dict(state or {})
    backend.open(resumes=resumes)
    return backend


def test_numbers_are_read_back(tmp_path, log):
    with TensorBoardBackend(tmp_path / "run") as backend:
        log(backend, (1, 1, "train/a", 0.1), (2, 1, "train/a", float("nan")), (2, 1, "b", 1e30), (2, 1, "b", 2))
    found = read(tmp_path / "run")
    assert found.Tags()["scalars"] == ["train/a", "b"]
    first, second = found.Scalars("train/a")
    assert (first.wall_time, first.step, first.value) == (101.0, 1, np.float32(0.1))
    assert (second.wall_time, second.step) == (102.0, 2)
    assert np.isnan(second.value)
    assert scalars(tmp_path / "run", "b") == [(2, np.float32(1e30)), (2, 2.0)]


def test_everything_else_is_read_back(tmp_path):
    grey = Image(np.arange(6, dtype=np.uint8).reshape(2, 3))
    colour = Image(np.arange(48, dtype=np.uint8).reshape(2, 4, 2, 3))
    sound = Audio(np.linspace(-1, 1, 10), 8000)
    things = {
        "note": Text("Ü *warm*"),
        "graph": Graph("digraph {}"),
        "grey": grey,
        "colour": colour,
        "sound": sound,
        "weights": Histogram([1, 0, 3], [0, 1, 2, 3]),
    }
    with TensorBoardBackend(tmp_path) as backend:
        for name, thing in things.items():
            backend.log(name, thing, step=7, epoch=2, seconds=9.0)
    found = read(tmp_path)
    [text] = found.Tensors("note")
    assert (text.step, text.tensor_proto.string_val) == (7, ["Ü *warm*".encode()])
    assert found.Tensors("graph")[0].tensor_proto.string_val == [b"```\ndigraph {}\n```"]
    assert found.SummaryMetadata("note").plugin_data.plugin_name == "text"
    assert sorted(found.Tags()["images"]) == ["colour/0", "colour/1", "grey"]
    [image] = found.Images("grey")
    assert (image.step, image.width, image.height, image.encoded_image_string) == (7, 3, 2, png_of(grey))
    assert found.Images("colour/1")[0].encoded_image_string == png_of(Image(colour.data[1]))
    [audio] = found.Audio("sound")
    assert (audio.sample_rate, audio.length_frames, audio.encoded_audio_string) == (8000, 10, wav_of(sound))
    [histogram] = [event.histogram_value for event in found.Histograms("weights")]
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 3, 4, 0.5 + 3 * 2.5)
    assert histogram.sum_squares == 0.25 + 3 * 6.25
    assert (histogram.bucket_limit, histogram.bucket) == ([0, 1, 2, 3], [0, 1, 0, 3])
    assert not issubclass(File, TensorBoardBackend.loggables)


def test_a_new_run_moves_the_events_of_another_to_a_subfolder(tmp_path, log):
    for value in (1, 2, 3):
        with TensorBoardBackend(tmp_path) as backend:
            log(backend, (1, 1, "a", value))
    assert list(backend.output_locations()) == [
        f"{tmp_path}, after moving the log of an earlier run to {tmp_path / 'run-2'}"
    ]
    assert [scalars(folder) for folder in (tmp_path / "run-1", tmp_path / "run-2", tmp_path)] == [
        [(1, 1.0)],
        [(1, 2.0)],
        [(1, 3.0)],
    ]


def test_a_run_without_values_leaves_the_events_of_another_alone(tmp_path, log):
    with TensorBoardBackend(tmp_path) as backend:
        log(backend, (1, 1, "a", 1))
    with TensorBoardBackend(tmp_path) as backend:
        pass
    assert len(list(tmp_path.iterdir())) == 1
    assert list(backend.output_locations()) == [tmp_path]


def test_event_files_without_values_are_no_log_of_another_run(tmp_path, log):
    with TensorBoardBackend(tmp_path):
        pass  # as if the run had been killed before its first value
    (tmp_path / "events.out.tfevents.1.torn").write_bytes(b"123")
    with TensorBoardBackend(tmp_path) as backend:
        log(backend, (1, 1, "a", 1))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_both_runs_share_a_folder_if_the_user_says_so(tmp_path, log):
    with TensorBoardBackend(tmp_path) as backend:
        log(backend, (1, 1, "a", 1))
    backend = opened(tmp_path, append=True)
    log(backend, (1, 1, "a", 2))
    backend.flush()
    backend.close()
    assert scalars(tmp_path) == [(1, 1.0), (1, 2.0)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_resumes_has_the_events_of_its_checkpoint(tmp_path, log):
    backend = opened(tmp_path)
    log(backend, (1, 1, "a", 1), (2, 1, "a", 2))
    backend.flush()
    state = backend.state_dict()
    log(backend, (2, 2, "a", 9), (3, 2, "a", 9))  # one at the checkpoint's step, too
    backend.flush()
    backend.close()
    [first] = tmp_path.iterdir()
    assert state == {"next_step": 3, "files": {first.name: state["files"][first.name]}}
    for _ in range(2):  # the second time, the file of the first one is not in the state: its steps are purged
        backend = opened(tmp_path, resumes=True, state=state)
        log(backend, (3, 2, "a", 3), (4, 2, "a", 4))
        backend.flush()
        backend.close()
        assert first.stat().st_size == state["files"][first.name]
        assert scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("times", [(2000, 1000, 1000, 3000), (1000, 1000, 1000, 1000), (9, 1_900_000_000, 10, 10)])
def test_steps_are_in_order_whatever_the_clock_said_when_a_file_was_made(tmp_path, log, monkeypatch, times):
    state = {}
    for job, now in enumerate(times):
        monkeypatch.setattr(f"{TensorBoardBackend.__module__}.time", SimpleNamespace(time=lambda now=now: now))
        backend = opened(tmp_path, resumes=job > 0, state=state)
        log(backend, (2 * job + 1, 1, "a", job), (2 * job + 2, 1, "a", job))
        backend.flush()
        state = backend.state_dict()
        log(backend, (2 * job + 3, 1, "a", -1))  # after the checkpoint, so the next job removes it
        backend.flush()
        backend.close()
    assert scalars(tmp_path) == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3), (8, 3), (9, -1)]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("name", ["1700000005.host.12.0.v2", "1700000005123.host", "1700000005.0003.host"])
def test_a_file_is_read_after_those_of_other_writers(tmp_path, log, monkeypatch, name):
    with TensorBoardBackend(tmp_path) as backend:
        log(backend, (1, 1, "a", 1))
    [first] = tmp_path.iterdir()
    first.rename(tmp_path / f"events.out.tfevents.{name}")
    monkeypatch.setattr(f"{TensorBoardBackend.__module__}.time", SimpleNamespace(time=lambda: 1_700_000_005))
    with TensorBoardBackend(tmp_path, append=True) as backend:
        log(backend, (2, 1, "a", 2))
    assert scalars(tmp_path) == [(1, 1), (2, 2)]


def test_a_torn_event_hides_none_of_the_others(tmp_path, log):
    for value, resumes in ((1, False), (2, True)):
        backend = opened(tmp_path, resumes=resumes)
        log(backend, (value, 1, "a", value))
        backend.flush()
        backend.close()
        if not resumes:
            [first] = tmp_path.iterdir()
            whole = first.read_bytes()
            first.write_bytes(whole + whole[-20:-3])
    assert scalars(tmp_path) == [(1, 1.0), (2, 2.0)]


WRITER = """
import sys
from fluxcb.logging import TensorBoardBackend, Value
backend = TensorBoardBackend(sys.argv[1])
backend.open(resumes=True)
print("open", flush=True)
for step in range(10**9):
    for name in "abcdefgh":
        backend.log(name, Value(step), step=step, epoch=1, seconds=0.0)
    backend.flush()
"""


def test_a_killed_process_leaves_whole_events(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        while sum(path.stat().st_size for path in tmp_path.rglob("*")) < 10_000:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = scalars(tmp_path, "a")
    assert len(found) > 1
    assert found == [(step, float(step)) for step in range(len(found))]


def test_a_full_disk_keeps_whole_events_and_stops_nobody(small_disk):
    folder, _ = small_disk
    group = BackendGroup([TensorBoardBackend(folder)])
    group.open(resumes=False)

    def run():
        for step in range(200):
            group.send([Put("a", Value(step), step, 1, 9.0), Put("note", Text("x" * 500), step, 1, 9.0)])
        group.close()

    with pytest.warns(UserWarning, match="No space left on device") as caught:
        run()
    assert len(caught) == 1
    found = scalars(folder)
    assert 80 < len(found) < 120  # 64 KiB of events of about 600 bytes
    assert found == [(step, float(step)) for step in range(len(found))]


def test_a_folder_that_cannot_be_is_an_error_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DeclarationError, match=r"cannot write to .*file: .*file is a file\."):
        TensorBoardBackend(tmp_path / "file")


def test_without_the_library_there_is_the_command(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("tensorboardX")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(DeclarationError) as error:
        TensorBoardBackend(tmp_path)
    assert str(error.value) == (
        "`TensorBoardBackend` needs the package `tensorboardX`, which is not installed.\n"
        "  fix:   `pip install 'fluxcb[tensorboard]'`"
    )
