"""Every file of a checkpoint, damaged in every way: none is silently wrong, each is named, the last good is used."""

import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb._errors import CheckpointCorruptError, CheckpointError, ResumeError
from fluxcb.callbacks import Checkpointer, CustomCallback, Metrics, Recorder
from fluxcb.checkpoints import ResumeWarning, load_params
from fluxcb.checkpoints.loading import find
from fluxcb.checkpoints.manifest import MANIFEST, Manifest
from fluxcb.events import StepEnd

STEPS = ("3", "6", "8")
FLIPS = 20


def learner(folder: Path, look: Callable[[Any], None] = lambda learner: None, **options: Any) -> fluxcb.Learner:
    """A Learner of every part: state of the optimizer and of callbacks, random keys, metrics, a history."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        noise = jax.random.normal(key, batch.shape)
        return jnp.mean((batch @ params["w"] + params["b"] - 1 + 0.1 * jnp.sum(noise)) ** 2)

    return fluxcb.Learner.from_loss(
        {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3), "none": jnp.zeros((0, 2))},
        loss,
        optax.adam(0.1),
        data=[jnp.full((4, 2), i / 3) for i in range(4)],
        callbacks=[
            Checkpointer(folder, steps=3, **options),
            CustomCallback(look, StepEnd, name="look"),
            Metrics(),
            Recorder(),
        ],
        default_callbacks=False,
    )


def bits(tree: Any) -> list[bytes]:
    leaves = jax.tree.leaves(tree)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(x) if k else x).tobytes() for x, k in zip(leaves, is_key, strict=True)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    learner(folder).fit(steps=8)
    assert sorted(path.name for path in folder.iterdir()) == [*STEPS, "fluxcb.lock"]
    return folder


@pytest.fixture(scope="module")
def params(original: Path) -> dict[str, list[bytes]]:
    """The parameters of each step; they differ."""
    found = {step: bits(load_params(original / step)) for step in STEPS}
    assert len(set(map(tuple, found.values()))) == len(STEPS)
    return found


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tree_of(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


# -- one file damaged -------------------------------------------------------------------------------


def _write(content: Callable[[bytes], bytes]) -> Callable[[Path], list[Path]]:
    def damage(path: Path) -> list[Path]:
        before = path.read_bytes()
        path.write_bytes(content(before))
        return [path]

    return damage


def _remove(path: Path) -> list[Path]:
    path.unlink()
    return [path]


def _rename(path: Path) -> list[Path]:
    path.rename(path.with_name(f"{path.name}-"))
    return [path]


def _become_a_folder(path: Path) -> list[Path]:
    path.unlink()
    path.mkdir()
    return [path]


def _link(path: Path) -> list[Path]:
    """What it leads to is the same, today."""
    target = _folder_of(path).parent / "elsewhere"
    shutil.copyfile(path, target)
    path.unlink()
    path.symlink_to(target)
    return [path]


def _pipe(path: Path) -> list[Path]:
    path.unlink()
    os.mkfifo(path)
    return [path]


def _swap(path: Path) -> list[Path]:
    """Exchange it with the next that has other bytes."""
    files, mine = files_of(_folder_of(path)), path.read_bytes()
    at = files.index(path)
    other = next(f for f in files[at + 1 :] + files[:at] if f.read_bytes() != mine)
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)
    return [path, other]


def _stale(path: Path) -> list[Path]:
    """Put the file at its place in an older checkpoint there; some are the same."""
    folder = _folder_of(path)
    older, before = folder.with_name("6"), path.read_bytes()
    twin = older / path.relative_to(folder)
    if not twin.exists():  # the names of orbax's data files are random
        twin = next(f for f in files_of(older) if f.parent == twin.parent)
    shutil.copyfile(twin, path)
    return [path] if path.read_bytes() != before else []


def _folder_of(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name in STEPS)


DAMAGE = {
    "removed": _remove,
    "renamed": _rename,
    "emptied": _write(lambda held: b""),
    "truncated": _write(lambda held: held[: len(held) // 2]),
    "longer": _write(lambda held: held + b"\0"),
    "zeroed": _write(lambda held: bytes(len(held))),
    "swapped": _swap,
    "stale": _stale,
    "linked": _link,
    "a folder": _become_a_folder,
    "a pipe": _pipe,
}


@contextmanager
def put_back(folder: Path) -> Iterator[None]:
    before = {path: path.read_bytes() for path in files_of(folder)}
    yield
    for path in folder.rglob("*"):
        if path not in before and (path.is_symlink() or not path.is_dir()):
            path.unlink()
    for path, held in before.items():
        if path.is_symlink() or not path.is_file() or path.read_bytes() != held:
            (path.rmdir if path.is_dir() else partial(path.unlink, missing_ok=True))()
            path.write_bytes(held)


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(run: Path, damage: str) -> None:
    newest, tried, wrong = run / "8", 0, []
    for file in files_of(newest):
        with put_back(newest):
            damaged = DAMAGE[damage](file)
            if not damaged:
                continue
            tried += 1
            with pytest.raises(CheckpointCorruptError) as caught:
                find(newest)
            if not any(str(path) in str(caught.value) for path in damaged):
                wrong.append((str(file), str(caught.value)))
            with pytest.warns(ResumeWarning) as told:
                used, _ = find(run)
            (text,) = [str(warning.message) for warning in told]
            if used != run / "6" or "checkpoint 6 " not in text or not any(f"8: {path} " in text for path in damaged):
                wrong.append((str(file), text))
    assert wrong == []
    assert tried >= (15 if damage == "stale" else 30)  # equal in two checkpoints: nothing is damaged


def test_a_flipped_bit_is_found_wherever_it_is(run: Path) -> None:
    newest, draw, wrong = run / "8", random.Random(6), []
    before = Manifest.read(newest)
    for file in files_of(newest):
        held = file.read_bytes()
        for bit in draw.sample(range(8 * len(held)), FLIPS):
            flipped = bytearray(held)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                _, manifest = find(newest)
            except CheckpointCorruptError as error:
                if str(file) not in str(error):
                    wrong.append((file, bit, str(error)))
            else:
                if file.name != MANIFEST or manifest != before:  # 1e-5 and 1E-5 are the same number
                    wrong.append((file, bit, "not noticed"))
        file.write_bytes(held)
    assert wrong == []
    assert find(newest)[1] == before


@pytest.mark.parametrize("inside", ["", "params", "params/d", "host"])
@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "pipe"])
def test_what_does_not_belong_to_a_checkpoint_is_named(run: Path, tmp_path: Path, inside: str, kind: str) -> None:
    extra = run / "8" / inside / "extra"
    (tmp_path / "folder").mkdir()
    if kind == "file":
        extra.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(extra)
    else:
        extra.symlink_to(tmp_path / "folder" if kind == "link to a folder" else run / "fluxcb.lock")
    with pytest.raises(CheckpointCorruptError, match=rf"^{re.escape(str(extra))} does not belong to the checkpoint\."):
        find(run / "8")


def test_an_empty_folder_in_a_checkpoint_changes_nothing(run: Path, params: dict[str, list[bytes]]) -> None:
    (run / "8" / "empty").mkdir()
    assert bits(load_params(run / "8")) == params["8"]


# -- unreadable -------------------------------------------------------------------------------------


def as_a_user(work: Callable[[], Any]) -> Any:
    """Do something without root's right to read everything, which a thread can give away for itself."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            if os.geteuid() == 0:
                libc = ctypes.CDLL(None, use_errno=True)
                header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
                assert libc.capget(header, data) == 0
                data[0] &= ~0b110  # effective: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                assert libc.capset(header, data) == 0
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@pytest.fixture
def locked_up() -> Iterator[Callable[[Path], None]]:
    """Make paths unreadable for the length of a test."""
    before: dict[Path, int] = {}

    def lock_up(path: Path) -> None:
        before.setdefault(path, path.stat().st_mode)
        path.chmod(0)
        with pytest.raises(PermissionError):
            as_a_user(lambda: os.listdir(path) if path.is_dir() else path.read_bytes())

    yield lock_up
    for path, mode in reversed(before.items()):
        path.chmod(mode)


def test_an_unreadable_file_is_named_and_the_checkpoint_before_it_is_used(
    run: Path, locked_up: Callable[[Path], None]
) -> None:
    for file in files_of(run / "8"):
        mode = file.stat().st_mode
        locked_up(file)
        with pytest.raises(CheckpointCorruptError) as caught:
            as_a_user(lambda: find(run / "8"))
        assert str(file) in str(caught.value)
        assert "Permission denied" in str(caught.value)
        with pytest.warns(ResumeWarning, match=re.escape(file.name)):
            assert as_a_user(lambda: find(run))[0] == run / "6"
        file.chmod(mode)


@pytest.mark.parametrize("inside", [".", "params", "params/ocdbt.process_0/d"])
def test_an_unreadable_folder_of_a_checkpoint_is_noticed(
    run: Path, locked_up: Callable[[Path], None], inside: str
) -> None:
    locked_up(run / "8" / inside)
    with pytest.warns(ResumeWarning, match=re.escape(str(run / "8"))):
        assert as_a_user(lambda: find(run))[0] == run / "6"


def test_an_unreadable_run_is_an_error(run: Path, locked_up: Callable[[Path], None]) -> None:
    locked_up(run)
    with pytest.raises(CheckpointError, match=r"cannot be searched for checkpoints: Permission denied\."):
        as_a_user(lambda: find(run))


# -- going on ---------------------------------------------------------------------------------------


def break_data(folder: Path) -> Path:
    """Flip the last bit of the first file with parameters, and return it."""
    file = files_of(folder / "params" / "d")[0]
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)
    return file


def test_fit_resumes_from_the_last_good_checkpoint(run: Path, params: dict[str, list[bytes]]) -> None:
    broken = break_data(run / "8")
    again = learner(run)
    with pytest.warns(ResumeWarning) as told:
        again.fit(steps=8, resume=True)
    assert [str(warning.message) for warning in told] == [
        f"The checkpoint 6 in {run} is used, because newer ones are damaged: "
        f"8: {broken} is not what was written: its checksum differs."
    ]
    assert bits(again.params) == params["8"]
    # The damaged one is still there, the new one is the newest, and whole.
    assert sorted(path.name for path in run.iterdir()) == ["6", "8", "8.1", "fluxcb.lock"]
    assert find(run)[0] == run / "8.1"
    assert bits(load_params(run)) == params["8"]


def test_damaged_checkpoints_do_not_push_out_good_ones(run: Path, params: dict[str, list[bytes]]) -> None:
    break_data(run / "8")
    break_data(run / "6")
    newest = {}

    def look(learner: Any) -> None:
        again.callbacks.get(Checkpointer).wait()
        newest[learner.progress.step] = find(run)[0].name

    again = learner(run, look, keep_last=1)
    with pytest.warns(ResumeWarning, match="The checkpoint 3 in"):
        again.fit(steps=8, resume=True)
    assert newest == {4: "3", 5: "3", 6: "3", 7: "6.1", 8: "6.1"}
    assert sorted(path.name for path in run.iterdir()) == ["8", "fluxcb.lock", "superseded-8"]
    assert bits(load_params(run)) == bits(again.params) == params["8"]


def test_restore_takes_the_last_good_checkpoint_of_a_run(run: Path, params: dict[str, list[bytes]]) -> None:
    (run / "8" / MANIFEST).unlink()
    (run / "6" / "host" / "metadata").write_text("{}")
    again = learner(run)
    with pytest.warns(ResumeWarning) as told:
        again.restore(run)
    (text,) = [str(warning.message) for warning in told]
    assert text.startswith(
        f"The checkpoint 3 in {run} is used, because newer ones are damaged: 8: {run / '8' / MANIFEST} is "
    )
    assert re.search(rf"; 6: {re.escape(str(run / '6' / 'host' / 'metadata'))} has 2 bytes, not \d+\.$", text)
    assert (again.step, bits(again.params)) == (3, params["3"])


def test_an_explicit_path_never_falls_back(run: Path) -> None:
    broken = break_data(run / "8")
    again = learner(run)
    before = bits(again.state)
    for attempt in (again.restore, load_params):
        with pytest.raises(CheckpointCorruptError, match=re.escape(str(broken))):
            attempt(run / "8")
    assert bits(again.state) == before


def test_none_good_is_an_error_that_lists_each_and_deletes_nothing(run: Path) -> None:
    broken = break_data(run / "8")
    (run / "6" / MANIFEST).write_text("")
    shutil.rmtree(run / "3" / "host")
    (run / ".saving-9.orbax-checkpoint-tmp").mkdir()
    before = tree_of(run)
    again = learner(run)
    state = bits(again.state)
    no_json = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    for attempt in (lambda: again.fit(steps=8, resume=True), lambda: again.restore(run), lambda: load_params(run)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert str(caught.value) == textwrap.dedent(f"""\
            None of the 3 checkpoints in {run} is whole; nothing was deleted.
              where: 8: {broken} is not what was written: its checksum differs.
                     6: {run / "6" / MANIFEST} is no manifest that can be read: {no_json}
                     3: {run / "3" / "host" / "commit_success.txt"} is missing.
              why:   a run that began anew instead would lose what was trained without a word
              fix:   copy good ones to it
                 or: train in another directory""")
    assert tree_of(run) == before
    assert (again.step, bits(again.state)) == (0, state)


# -- folders that are none, or others ----------------------------------------------------------------


def test_folders_that_are_no_checkpoints_are_passed_over(run: Path, params: dict[str, list[bytes]]) -> None:
    for name in (".saving-10.orbax-checkpoint-tmp", ".trash-2", "superseded-12", "010", "9.0", "-1", "1e3", "\u0663"):
        shutil.copytree(run / "6", run / name)
    (run / "12").write_text("a file of somebody's")
    assert find(run)[0] == run / "8"
    (again := learner(run)).fit(steps=12, resume=True)
    names = {path.name for path in run.iterdir()}
    foreign = {"superseded-12", "010", "9.0", "-1", "1e3", "\u0663", "12"}
    assert names == {*foreign, "9", "12.1", "12.2", "fluxcb.lock"}  # what killed saves leave is cleared away
    assert (run / "12").read_text() == "a file of somebody's"
    assert bits(load_params(run)) == bits(again.params)


@pytest.mark.parametrize("content", ["empty", "foreign"])
def test_a_folder_named_as_a_step_is_named(run: Path, content: str) -> None:
    (run / "10").mkdir()
    if content == "foreign":
        (run / "10" / "notes.txt").write_text("mine")
    with pytest.warns(
        ResumeWarning, match=rf"The checkpoint 8 .* 10: {re.escape(str(run / '10' / MANIFEST))} is no manifest"
    ):
        assert find(run)[0] == run / "8"
    with pytest.raises(CheckpointCorruptError, match=f"{re.escape(str(run / '10' / MANIFEST))}"):
        load_params(run / "10")


def test_only_foreign_folders_are_no_run_to_begin_anew_in(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    with pytest.raises(CheckpointError, match="None of the 1 checkpoints"):
        learner(tmp_path).fit(steps=2, resume=True)
    with pytest.raises(CheckpointError, match="has checkpoints, and it cannot be read whose they are"):
        learner(tmp_path).fit(steps=2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["2024"]


def test_a_renamed_checkpoint_is_noticed(run: Path) -> None:
    (run / "8").rename(run / "9")
    with pytest.raises(CheckpointCorruptError, match=rf"^{re.escape(str(run / '9' / MANIFEST))} is of step 8: "):
        load_params(run / "9")
    with pytest.warns(ResumeWarning, match=r"The checkpoint 6 .* 9: .* is of step 8"):
        assert find(run)[0] == run / "6"


def test_exchanged_checkpoints_are_noticed(run: Path) -> None:
    (run / "8").rename(run / "x")
    (run / "6").rename(run / "8")
    (run / "x").rename(run / "6")
    with pytest.warns(ResumeWarning, match=r"The checkpoint 3 .* 8: .* is of step 6.*; 6: .* is of step 8"):
        assert find(run)[0] == run / "3"
    assert find(run / "3")[1].step == 3


def test_a_checkpoint_may_be_copied_under_a_name_without_digits(run: Path, params: dict[str, list[bytes]]) -> None:
    shutil.copytree(run / "6", run / "best-so-far")
    assert bits(load_params(run / "best-so-far")) == params["6"]


def test_a_run_may_have_a_number_as_its_name(original: Path, tmp_path: Path) -> None:
    assert find(Path(shutil.copytree(original, tmp_path / "runs" / "1")))[0].name == "8"


@pytest.mark.parametrize("part", ["params", "opt_state", "cbstate", "host", "host_arrays"])
def test_a_part_from_another_step_is_noticed(run: Path, part: str) -> None:
    shutil.rmtree(run / "8" / part)
    shutil.copytree(run / "6" / part, run / "8" / part)
    with pytest.raises(CheckpointCorruptError, match=re.escape(str(run / "8" / part))):
        find(run / "8")


def test_the_manifest_of_another_step_is_noticed(run: Path) -> None:
    shutil.copyfile(run / "6" / MANIFEST, run / "8" / MANIFEST)
    with pytest.raises(CheckpointCorruptError, match="is of step 6"):
        find(run / "8")


def test_nothing_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no", "there is no such directory"), (tmp_path, "a checkpoint is a folder with a")):
        for attempt in (load_params, learner(tmp_path / "x").restore):
            with pytest.raises(CheckpointError, match=rf"There is no checkpoint in {re.escape(str(path))}\.\n.*{why}"):
                attempt(path)


# -- written by somebody who can compute checksums ---------------------------------------------------


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, with the right checksum."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"sha256": digest, **content}))


def forge_file(folder: Path, name: str, held: bytes) -> None:
    """Change a file, with the right checksum."""
    (folder / name).write_bytes(held)
    digest = hashlib.sha256(held).hexdigest()
    forge(folder, lambda content: content["files"].update({name: [len(held), digest]}))


def test_a_forged_manifest_that_says_the_truth_is_read(run: Path, params: dict[str, list[bytes]]) -> None:
    forge_file(run / "8", "host/metadata", (run / "8" / "host" / "metadata").read_bytes())
    assert bits(load_params(run / "8")) == params["8"]  # so what is refused below is refused for its content


FIELDS = {
    "run": [None, 1, ["x"]],
    "step": [-1, 8.0, "8", True, None, 2**31, [8]],
    "epoch": [-1, 2.0, "2", None, 10**30],
    "at": [1, "training", [], ["training", 1], ["training", -1, 0], [1, 2, 3], {"phase": "training"}],
    "ended": [1, []],
    "value": ["0.5", [], True],
    "average": [1, [], True],
    "trees": [None, [], {}, {"params": {}}, {"params": {"w": 1}}],
    "sequences": [None, [], {}, {"params": ["0"]}],
    "about": [None, [], {}, {"callbacks": []}],
    "files": [
        None,
        [],
        {"a": 1},
        {"a": [1]},
        {"a": [-1, "0" * 64]},
        {"a": ["1", "0" * 64]},
        {"a": [1, "x"]},
        {"../6/host/metadata": [1, "0" * 64]},
        {"/etc/passwd": [1, "0" * 64]},
        {"a/../../b": [1, "0" * 64]},
    ],
    "format": [0.5, "1", None, -1],
}


@pytest.mark.parametrize("field", list(FIELDS))
def test_a_hostile_manifest_is_refused(run: Path, original: Path, field: str) -> None:
    manifest = run / "8" / MANIFEST
    expected = f"{manifest} is no manifest that fluxcb wrote: see `{field}`."
    wrong = []
    for value in (*FIELDS[field], ...):
        shutil.copyfile(original / "8" / MANIFEST, manifest)
        forge(run / "8", methodcaller("pop", field) if value is ... else methodcaller("update", {field: value}))
        with pytest.raises(CheckpointCorruptError) as caught:
            find(run / "8")
        if caught.value.what != expected:
            wrong.append((value, caught.value.what))
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    ["float32", "float32[", "float32[-1]", "float32[1,2]", "float32[1e9]", f"float32[{'9' * 40}]", "x[1]; y", ""],
)
def test_a_hostile_description_of_an_array_is_refused(run: Path, text: str) -> None:
    forge(run / "8", lambda content: content["trees"]["params"].update(w=text))
    with pytest.raises(CheckpointCorruptError, match="see `trees`"):
        load_params(run / "8")


@pytest.mark.parametrize(
    "text", ["float32[999999999, 999999999]", "float64[2, 3]", "float32[3, 2]", "nonsense[0]", "key<fry>[2]"]
)
def test_an_array_that_is_not_as_the_manifest_says_is_refused(run: Path, text: str) -> None:
    forge(run / "8", lambda content: content["trees"]["params"].update(w=text))
    with pytest.raises(CheckpointCorruptError, match=re.escape(str(run / "8"))):
        load_params(run / "8")
    with pytest.raises(ResumeError, match=re.escape(f"params: w was {text}, and is float32[2, 3] now")):
        learner(run).restore(run / "8")


def test_fields_that_nobody_knows_are_refused(run: Path) -> None:
    forge(run / "8", lambda content: content.update(code="import os"))
    with pytest.raises(CheckpointCorruptError, match="see `code`"):
        find(run / "8")


@pytest.mark.parametrize("text", ["null", "[]", "1", '"x"', "{}", '{"sha256": 1}', "[" * 100_000, "9" * 5_000, "{"])
def test_a_manifest_that_is_something_else_is_refused(run: Path, text: str) -> None:
    (run / "8" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointCorruptError, match=re.escape(str(run / "8"))):
        find(run / "8")


def test_a_manifest_that_would_fill_the_memory_is_refused(run: Path) -> None:
    os.truncate(run / "8" / MANIFEST, 1 << 40)  # a hole: it takes no space
    with pytest.raises(CheckpointCorruptError, match="is no manifest, but something else"):
        find(run / "8")


@pytest.mark.parametrize(
    "text", ["null", "[]", "{", "[" * 100_000, "{}", '{"progress": {}}', '{"progress": 1, "at": 1}']
)
def test_a_hostile_state_of_the_host_is_refused(run: Path, text: str) -> None:
    forge_file(run / "8", "host/metadata", text.encode())
    with pytest.raises(CheckpointError, match=re.escape(str(run / "8"))):
        learner(run).restore(run / "8")


@pytest.mark.parametrize("cancelled", [None, 3, [1], [1, -1], [1, "2"], [0.5, 0], [True, 0]])
def test_a_hostile_number_of_cancelled_steps_is_refused(run: Path, cancelled: Any) -> None:
    host = json.loads((run / "8" / "host" / "metadata").read_text())
    assert host["cancelled"] == [0, 0]
    forge_file(run / "8", "host/metadata", json.dumps({**host, "cancelled": cancelled}).encode())
    with pytest.raises(CheckpointCorruptError, match="see `cancelled`"):
        learner(run).restore(run / "8")


def test_a_checkpoint_of_a_version_that_did_not_count_cancelled_steps_is_read(run: Path) -> None:
    host = json.loads((run / "8" / "host" / "metadata").read_text())
    del host["cancelled"]
    forge_file(run / "8", "host/metadata", json.dumps(host).encode())
    restored = learner(run)
    restored.restore(run / "8")
    assert restored.step == 8


PROGRAM = """
import json, os, pathlib, sys
import fluxcb, numpy, optax
from fluxcb.callbacks import Checkpointer, CustomCallback, Metrics, Recorder
from fluxcb.events import StepEnd
sys.path.insert(0, os.path.dirname({tests!r}))
import test_damaged_checkpoints as tests

folders = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
run = folders[0].parent
learners = [tests.learner(run.with_name("unused")) for _ in folders]
learners[0].restore(folders[0])  # what has to be imported is imported, what has to be compiled is compiled
os.chdir(folders[0])
seen = []

def watch(event, args):
    if event == "open":
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            seen.append([event, str(path)])
    elif event == "exec":
        seen.append([event, args[0].co_filename])
    elif event == "import":
        seen.append([event, args[0]])
    elif event.split(".")[0] in ("subprocess", "pickle", "shutil", "ctypes", "marshal") or event in (
        "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.rename", "os.remove", "os.mkdir", "os.rmdir",
        "os.link", "os.symlink", "os.chmod", "os.truncate", "compile", "socket.connect", "socket.bind",
    ):
        seen.append([event, str(args)])

sys.addaudithook(watch)
for learner, folder in zip(learners, folders):
    seen.clear()
    error = None
    try:
        learner.restore(folder)
    except Exception as caught:
        error = type(caught).__name__ + ": " + str(caught)
    print(json.dumps([folder.name, error, seen]), flush=True)
"""


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another step": lambda host: host["progress"].update(step=3),
    "negative": lambda host: host["progress"].update(step_in_epoch=-1),
    "huge": lambda host: host["progress"].update(epoch=2**62),
    "no key": lambda host: host.update(key={}),
    "a key of another kind": lambda host: host["key"].update(impl="os.system"),
    "an array that is not there": lambda host: host["key"]["of"].update(at="99"),
    "an array of the attacker's": lambda host: host.update(key={"$": "array", "shape": [1 << 60], "dtype": "O"}),
    "an object of the attacker's": lambda host: host["callbacks"].update(
        Checkpointer={"$": "state", "of": {"py/reduce": ["os.system", "touch pwned"], "__class__": "evil.Evil"}}
    ),
    "a class to import": lambda host: host["cbstate"].update(history={"$": "evil.Evil", "of": {"_target_": "evil"}}),
    "attributes": lambda host: host["cbstate"].update(metrics_epoch={"$": "fields", "of": {"__class__": "evil"}}),
    "data": lambda host: host["data"].update(training={"open": True, "pass": 10**9, "consumed": 0}),
    "nested": lambda host: host["cbstate"].update(history=[[[[[[]]]]]]),
}


def test_loading_a_hostile_checkpoint_runs_and_writes_nothing(run: Path, original: Path) -> None:
    folders = [run / "8"]
    for name, change in HOSTILE.items():
        folder = Path(shutil.copytree(original / "8", run / name))
        host = json.loads((folder / "host" / "metadata").read_text())
        change(host)
        forge_file(folder, "host/metadata", json.dumps(host).encode())
        folders.append(folder)
    for part, old, new in (
        ("", "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler", "evil.Evil"),
        ("params", "np.ndarray", "evil.Evil"),
        ("params", '"w"', '"../../../w"'),
        ("opt_state", '"use_ocdbt": true', '"use_ocdbt": false'),
    ):
        folder = Path(shutil.copytree(original / "8", run / f"orbax {len(folders)}"))
        name = f"{part}/_METADATA" if part else "_CHECKPOINT_METADATA"
        text = (folder / name).read_text()
        assert old in text
        forge_file(folder, name, text.replace(old, new).encode())
        folders.append(folder)
    for folder in folders[1:]:
        forge_file(folder, "evil.py", b"open('pwned', 'w').close()\nclass Evil: pass\n")
        forge_file(folder, "sitecustomize.py", b"open('pwned', 'w').close()\n")
    before = tree_of(run.parent)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(tests=__file__), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    print(*told, sep="\n")
    assert [name for name, _, _ in told] == [folder.name for folder in folders]
    assert told[0] == ["8", None, []]
    assert [(name, seen) for name, _, seen in told if seen] == []
    assert tree_of(run.parent) == before


def test_a_manifest_of_a_later_version_is_no_reason_to_go_back(run: Path) -> None:
    forge(run / "8", lambda content: content.update(format=3, new=1))
    before = tree_of(run)
    for attempt in (lambda: load_params(run), lambda: learner(run).fit(steps=8, resume=True)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert str(caught.value) == (
            f"{run / '8'} was written by a later version of fluxcb (format 3, this one knows 2).\n"
            "  fix:   upgrade fluxcb"
        )
    assert tree_of(run) == before
    with pytest.raises(CheckpointError, match="later version"):
        learner(run).fit(steps=2)
    learner(run.with_name("else")).fit(steps=2)
