"""Every file of a checkpoint is damaged in every way: the damage is detected, and the last valid checkpoint is used."""

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
from fluxcb.checkpoints.manifest import MANIFEST, Manifest
from fluxcb.checkpoints.reading import resolve_checkpoint
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.events import StepEnd
from tests.changed_callbacks import changes_arguments

STEPS = ("3", "6", "8")
FLIPS = 20


def learner(folder: Path, look: Callable[[Any], None] = lambda learner: None, **options: Any) -> fluxcb.Learner:
    """Return a Learner with all kinds of state: optimizer, callbacks, random keys, metrics and history."""

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
    """Return the parameters of each step, which all differ."""
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
    """Replace the file with a symbolic link to identical content."""
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
    """Exchange the file with the next one that has other bytes."""
    files, mine = files_of(_folder_of(path)), path.read_bytes()
    at = files.index(path)
    other = next(f for f in files[at + 1 :] + files[:at] if f.read_bytes() != mine)
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)
    return [path, other]


def _stale(path: Path) -> list[Path]:
    """Replace the file with the one of an older checkpoint; some are identical."""
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
def test_damaged_file_is_named_and_previous_checkpoint_is_used(run: Path, damage: str) -> None:
    newest, tried, wrong = run / "8", set[str](), []
    for file in files_of(newest):
        with put_back(newest):
            damaged = DAMAGE[damage](file)
            if not damaged:  # stale: the file is the same in both checkpoints
                continue
            tried.add(str(file.relative_to(newest)))
            with pytest.raises(CheckpointCorruptError) as caught:
                resolve_checkpoint(newest)
            if not any(str(path) in str(caught.value) for path in damaged):
                wrong.append((str(file), str(caught.value)))
            with pytest.warns(ResumeWarning) as told:
                used, _ = resolve_checkpoint(run)
            (text,) = [str(warning.message) for warning in told]
            if used != run / "6" or "checkpoint 6 " not in text or not any(f"8: {path} " in text for path in damaged):
                wrong.append((str(file), text))
    assert wrong == []
    if damage == "stale":  # orbax decides how many files hold the arrays, and some are the same in both checkpoints
        assert tried >= {"host.json", MANIFEST}
        assert {name.split("/")[0] for name in tried if "/d/" in name} == {"cbstate", "opt_state", "params"}
    else:
        assert tried == {str(file.relative_to(newest)) for file in files_of(newest)}


def test_flipped_bit_is_detected_anywhere(run: Path) -> None:
    newest, draw, wrong = run / "8", random.Random(6), []
    before = Manifest.read(newest)
    for file in files_of(newest):
        held = file.read_bytes()
        for bit in draw.sample(range(8 * len(held)), FLIPS):
            flipped = bytearray(held)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                _, manifest = resolve_checkpoint(newest)
            except CheckpointCorruptError as error:
                if str(file) not in str(error):
                    wrong.append((file, bit, str(error)))
            else:
                if file.name != MANIFEST or manifest != before:  # 1e-5 and 1E-5 are the same number
                    wrong.append((file, bit, "not noticed"))
        file.write_bytes(held)
    assert wrong == []
    assert resolve_checkpoint(newest)[1] == before


@pytest.mark.parametrize("inside", ["", "params", "params/d", "opt_state"])
@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "pipe"])
def test_unexpected_file_in_checkpoint_is_named(run: Path, tmp_path: Path, inside: str, kind: str) -> None:
    extra = run / "8" / inside / "extra"
    (tmp_path / "folder").mkdir()
    if kind == "file":
        extra.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(extra)
    else:
        extra.symlink_to(tmp_path / "folder" if kind == "link to a folder" else run / "fluxcb.lock")
    if (inside, kind) == ("", "file"):  # Orbax lists only folders there
        resolve_checkpoint(run / "8")
        return
    with pytest.raises(CheckpointCorruptError) as raised:
        resolve_checkpoint(run / "8")
    assert str(raised.value) == (
        f"{extra} does not belong to the checkpoint.\n"
        f"  where: {extra}\n"
        "  why:   an additional file can change what Orbax reads\n"
        f"  fix:   delete the file {str(extra)!r}"
    )
    extra.unlink()
    resolve_checkpoint(run / "8")


@pytest.mark.parametrize(
    "name", ["notes.txt", ".DS_Store", "params/.DS_Store", "params/ocdbt.process_0/.nfs000001", "params/d/._x"]
)
def test_file_that_is_never_read_is_ignored(run: Path, params: dict[str, list[bytes]], name: str) -> None:
    (run / "8" / name).write_bytes(b"anything")
    assert bits(load_params(run)) == bits(load_params(run / "8")) == params["8"]


@pytest.mark.parametrize(
    "name",
    ["_sharding", "model_state", "params/.zarray", "params/checkpoint", "params/array_metadatas", "host.json.gz"],
)
def test_file_that_may_be_read_is_not_ignored(run: Path, name: str) -> None:
    (run / "8" / name).write_bytes(b"{}")
    with pytest.raises(CheckpointCorruptError, match="does not belong to the checkpoint"):
        resolve_checkpoint(run / "8")


def test_fix_of_a_run_with_additional_files_in_all_checkpoints_works(run: Path) -> None:
    extras = [entry.path / "params" / "extra" for entry in entries_of(run)]
    for extra in extras:
        extra.write_bytes(b"")
    with pytest.raises(CheckpointError) as raised:
        resolve_checkpoint(run)
    assert raised.value.fix == (
        *(f"delete the file {str(extra)!r}" for extra in reversed(extras)),
        "restore valid checkpoints from a copy",
        "start a new run in another directory",
    )
    extras[0].unlink()
    with pytest.warns(ResumeWarning):
        resolve_checkpoint(run)


def test_fix_of_a_damaged_checkpoint_works(run: Path) -> None:
    (run / "8" / "host.npz").unlink()
    with pytest.raises(CheckpointCorruptError) as raised:
        load_params(run / "8")
    assert raised.value.fix == (
        f"use the newest valid checkpoint of the run: pass the directory {str(run)!r}",
        f"copy the checkpoint to {run / '8'} again, if it is a copy or if you have one",
    )
    with pytest.warns(ResumeWarning):
        load_params(str(run))


def test_empty_folder_in_checkpoint_is_ignored(run: Path, params: dict[str, list[bytes]]) -> None:
    (run / "8" / "empty").mkdir()
    assert bits(load_params(run / "8")) == params["8"]


# -- unreadable -------------------------------------------------------------------------------------


def as_a_user(work: Callable[[], Any]) -> Any:
    """Run a function on a thread without root's permission to read everything."""
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
    """Make paths unreadable during a test."""
    before: dict[Path, int] = {}

    def lock_up(path: Path) -> None:
        before.setdefault(path, path.stat().st_mode)
        path.chmod(0)
        with pytest.raises(PermissionError):
            as_a_user(lambda: os.listdir(path) if path.is_dir() else path.read_bytes())

    yield lock_up
    for path, mode in reversed(before.items()):
        path.chmod(mode)


def test_unreadable_file_is_named_and_previous_checkpoint_is_used(run: Path, locked_up: Callable[[Path], None]) -> None:
    for file in files_of(run / "8"):
        mode = file.stat().st_mode
        locked_up(file)
        with pytest.raises(CheckpointCorruptError) as caught:
            as_a_user(lambda: resolve_checkpoint(run / "8"))
        assert str(file) in str(caught.value)
        assert "Permission denied" in str(caught.value)
        with pytest.warns(ResumeWarning, match=re.escape(file.name)):
            assert as_a_user(lambda: resolve_checkpoint(run))[0] == run / "6"
        file.chmod(mode)


@pytest.mark.parametrize("inside", [".", "params", "params/ocdbt.process_0/d"])
def test_unreadable_folder_in_checkpoint_is_detected(run: Path, locked_up: Callable[[Path], None], inside: str) -> None:
    locked_up(run / "8" / inside)
    with pytest.warns(ResumeWarning, match=re.escape(str(run / "8"))):
        assert as_a_user(lambda: resolve_checkpoint(run))[0] == run / "6"


def test_unreadable_run_raises(run: Path, locked_up: Callable[[Path], None]) -> None:
    locked_up(run)
    with pytest.raises(CheckpointError, match=r"^Cannot search .* for checkpoints: Permission denied\."):
        as_a_user(lambda: resolve_checkpoint(run))


# -- going on ---------------------------------------------------------------------------------------


def break_data(folder: Path) -> Path:
    """Flip the last bit of the first file with parameters, and return it."""
    file = files_of(folder / "params" / "d")[0]
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)
    return file


def test_fit_resumes_from_last_valid_checkpoint(run: Path, params: dict[str, list[bytes]]) -> None:
    broken = break_data(run / "8")
    again = learner(run)
    with pytest.warns(ResumeWarning) as told:
        again.fit(steps=8, resume=True)
    assert [str(warning.message) for warning in told] == [
        f"Using the checkpoint 6 in {run}, because newer ones are damaged: "
        f"8: {broken} is damaged: its checksum differs."
    ]
    assert bits(again.params) == params["8"]
    # The damaged one is still there beside three valid ones, of which the new one is the newest.
    assert sorted(path.name for path in run.iterdir()) == ["3", "6", "8", "8.1", "fluxcb.lock"]
    assert resolve_checkpoint(run)[0] == run / "8.1"
    assert bits(load_params(run)) == params["8"]


@changes_arguments("callbacks.Checkpointer.keep_last", "callbacks.look")
def test_damaged_checkpoints_do_not_displace_valid_ones(run: Path, params: dict[str, list[bytes]]) -> None:
    break_data(run / "8")
    break_data(run / "6")
    newest = {}

    def look(learner: Any) -> None:
        again.callbacks.get(Checkpointer).wait()
        newest[learner.progress.step] = resolve_checkpoint(run)[0].name

    again = learner(run, look, keep_last=1)
    with pytest.warns(ResumeWarning, match="Using the checkpoint 3 in"):
        again.fit(steps=8, resume=True)
    assert newest == {4: "3", 5: "3", 6: "3", 7: "6.1", 8: "6.1"}
    assert sorted(path.name for path in run.iterdir()) == ["8", "fluxcb.lock", "superseded-8"]
    assert bits(load_params(run)) == bits(again.params) == params["8"]


def test_restore_uses_last_valid_checkpoint(run: Path, params: dict[str, list[bytes]]) -> None:
    (run / "8" / MANIFEST).unlink()
    (run / "6" / "host.json").write_text("{}")
    again = learner(run)
    with pytest.warns(ResumeWarning) as told:
        again.restore(run)
    (text,) = [str(warning.message) for warning in told]
    assert text.startswith(
        f"Using the checkpoint 3 in {run}, because newer ones are damaged: 8: {run / '8' / MANIFEST} "
    )
    assert re.search(rf"; 6: {re.escape(str(run / '6' / 'host.json'))} has 2 bytes, not \d+\.$", text)
    assert (again.step, bits(again.params)) == (3, params["3"])


def test_explicit_path_never_falls_back(run: Path) -> None:
    broken = break_data(run / "8")
    again = learner(run)
    before = bits(again.state)
    for attempt in (again.restore, load_params):
        with pytest.raises(CheckpointCorruptError, match=re.escape(str(broken))):
            attempt(run / "8")
    assert bits(again.state) == before


def test_no_valid_checkpoint_raises_and_deletes_nothing(run: Path) -> None:
    broken = break_data(run / "8")
    (run / "6" / MANIFEST).write_text("")
    (run / "3" / "host.json").unlink()
    (run / ".saving-9.orbax-checkpoint-tmp").mkdir()
    before = tree_of(run)
    again = learner(run)
    state = bits(again.state)
    no_json = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    for attempt in (lambda: again.fit(steps=8, resume=True), lambda: again.restore(run), lambda: load_params(run)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert str(caught.value) == textwrap.dedent(f"""\
            All checkpoints in {run} are damaged (3 in total). No files were deleted.
              where: 8: {broken} is damaged: its checksum differs.
                     6: {run / "6" / MANIFEST} cannot be read: {no_json}
                     3: {run / "3" / "host.json"} is missing.
              why:   starting a new run instead would silently discard the earlier training
              fix:   restore valid checkpoints from a copy
                 or: start a new run in another directory""")
    assert tree_of(run) == before
    assert (again.step, bits(again.state)) == (0, state)


# -- folders that are none, or others ----------------------------------------------------------------


def test_folders_without_checkpoints_are_skipped(run: Path, params: dict[str, list[bytes]]) -> None:
    for name in (".saving-10.orbax-checkpoint-tmp", ".trash-2", "superseded-12", "010", "9.0", "-1", "1e3", "\u0663"):
        shutil.copytree(run / "6", run / name)
    (run / "12").write_text("a file of somebody's")
    assert resolve_checkpoint(run)[0] == run / "8"
    (again := learner(run)).fit(steps=12, resume=True)
    names = {path.name for path in run.iterdir()}
    foreign = {"superseded-12", "010", "9.0", "-1", "1e3", "\u0663", "12"}
    assert names == {*foreign, "9", "12.1", "12.2", "fluxcb.lock"}  # what killed saves leave is cleared away
    assert (run / "12").read_text() == "a file of somebody's"
    assert bits(load_params(run)) == bits(again.params)


@pytest.mark.parametrize("content", ["empty", "foreign"])
def test_folder_named_like_step_is_reported(run: Path, content: str) -> None:
    (run / "10").mkdir()
    if content == "foreign":
        (run / "10" / "notes.txt").write_text("mine")
    with pytest.warns(
        ResumeWarning, match=rf"Using the checkpoint 8 .* 10: {re.escape(str(run / '10' / MANIFEST))} cannot be read"
    ):
        assert resolve_checkpoint(run)[0] == run / "8"
    with pytest.raises(CheckpointCorruptError, match=f"{re.escape(str(run / '10' / MANIFEST))}"):
        load_params(run / "10")


def test_run_with_only_foreign_folders_raises(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    with pytest.raises(CheckpointError, match=r"are damaged \(1 in total\)"):
        learner(tmp_path).fit(steps=2, resume=True)
    with pytest.raises(CheckpointError, match="contains checkpoints, but their run is unknown"):
        learner(tmp_path).fit(steps=2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["2024"]


def test_renamed_checkpoint_is_detected(run: Path) -> None:
    (run / "8").rename(run / "9")
    with pytest.raises(CheckpointCorruptError, match=rf"^{re.escape(str(run / '9' / MANIFEST))} is from step 8: "):
        load_params(run / "9")
    with pytest.warns(ResumeWarning, match=r"Using the checkpoint 6 .* 9: .* is from step 8"):
        assert resolve_checkpoint(run)[0] == run / "6"


def test_swapped_checkpoints_are_detected(run: Path) -> None:
    (run / "8").rename(run / "x")
    (run / "6").rename(run / "8")
    (run / "x").rename(run / "6")
    with pytest.warns(ResumeWarning, match=r"Using the checkpoint 3 .* 8: .* is from step 6.*; 6: .* is from step 8"):
        assert resolve_checkpoint(run)[0] == run / "3"
    assert resolve_checkpoint(run / "3")[1].step == 3


def test_checkpoint_may_be_copied_under_name_without_digits(run: Path, params: dict[str, list[bytes]]) -> None:
    shutil.copytree(run / "6", run / "best-so-far")
    assert bits(load_params(run / "best-so-far")) == params["6"]


def test_run_name_may_be_number(original: Path, tmp_path: Path) -> None:
    assert resolve_checkpoint(Path(shutil.copytree(original, tmp_path / "runs" / "1")))[0].name == "8"


@pytest.mark.parametrize("part", ["params", "opt_state", "cbstate", "host.json"])
def test_file_from_other_step_is_detected(run: Path, part: str) -> None:
    for path in files_of(run / "8"):
        if part in path.relative_to(run / "8").parts:
            path.unlink()
    for path in files_of(run / "6"):
        if part in path.relative_to(run / "6").parts:
            shutil.copyfile(path, run / "8" / path.relative_to(run / "6"))
    with pytest.raises(CheckpointCorruptError, match=re.escape(str(run / "8" / part))):
        resolve_checkpoint(run / "8")


def test_manifest_of_other_step_is_detected(run: Path) -> None:
    shutil.copyfile(run / "6" / MANIFEST, run / "8" / MANIFEST)
    with pytest.raises(CheckpointCorruptError, match="is from step 6"):
        resolve_checkpoint(run / "8")


def test_missing_checkpoint_raises(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no", "there is no such directory"), (tmp_path, "a checkpoint is a folder with a")):
        for attempt in (load_params, learner(tmp_path / "x").restore):
            with pytest.raises(CheckpointError, match=rf"There is no checkpoint in {re.escape(str(path))}\.\n.*{why}"):
                attempt(path)


def test_file_instead_of_directory_raises(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "params.npz"
    other.touch()
    for path, fix in (
        (other, "use the directory that was passed to `Checkpointer`"),
        (run / "8" / MANIFEST, f"use the directory of the checkpoint: {str(run / '8')!r}"),
    ):
        for attempt in (load_params, learner(tmp_path / "x").restore):
            with pytest.raises(CheckpointError) as raised:
                attempt(path)
            assert str(raised.value) == f"{path} is a file, but a checkpoint is a directory.\n  fix:   {fix}"
    load_params(run / "8")


# -- written by somebody who can compute checksums ---------------------------------------------------


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and update its checksum."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"sha256": digest, **content}))


def forge_file(folder: Path, name: str, held: bytes) -> None:
    """Change a file and update its checksum."""
    (folder / name).write_bytes(held)
    digest = hashlib.sha256(held).hexdigest()
    forge(folder, lambda content: content["files"].update({name: [len(held), digest]}))


def test_forged_but_consistent_manifest_is_read(run: Path, params: dict[str, list[bytes]]) -> None:
    forge_file(run / "8", "host.json", (run / "8" / "host.json").read_bytes())
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
        {"../6/host.json": [1, "0" * 64]},
        {"/etc/passwd": [1, "0" * 64]},
        {"a/../../b": [1, "0" * 64]},
    ],
    "format": [0.5, "1", None, -1],
}


@pytest.mark.parametrize("field", list(FIELDS))
def test_hostile_manifest_raises(run: Path, original: Path, field: str) -> None:
    manifest = run / "8" / MANIFEST
    expected = f"{manifest} was not written by fluxcb: the field `{field}` is invalid."
    wrong = []
    for value in (*FIELDS[field], ...):
        shutil.copyfile(original / "8" / MANIFEST, manifest)
        forge(run / "8", methodcaller("pop", field) if value is ... else methodcaller("update", {field: value}))
        with pytest.raises(CheckpointCorruptError) as caught:
            resolve_checkpoint(run / "8")
        if caught.value.what != expected:
            wrong.append((value, caught.value.what))
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    ["float32", "float32[", "float32[-1]", "float32[1,2]", "float32[1e9]", f"float32[{'9' * 40}]", "x[1]; y", ""],
)
def test_hostile_array_metadata_raises(run: Path, text: str) -> None:
    forge(run / "8", lambda content: content["trees"]["params"].update(w=text))
    with pytest.raises(CheckpointCorruptError, match="the field `trees` is invalid"):
        load_params(run / "8")


@pytest.mark.parametrize(
    "text", ["float32[999999999, 999999999]", "float64[2, 3]", "float32[3, 2]", "nonsense[0]", "key<fry>[2]"]
)
def test_array_that_contradicts_manifest_raises(run: Path, text: str) -> None:
    forge(run / "8", lambda content: content["trees"]["params"].update(w=text))
    with pytest.raises(CheckpointCorruptError, match=re.escape(str(run / "8"))):
        load_params(run / "8")
    with pytest.raises(ResumeError, match=re.escape(f"params: w was {text}, and is float32[2, 3] now")):
        learner(run).restore(run / "8")


def test_unknown_manifest_fields_raise(run: Path) -> None:
    forge(run / "8", lambda content: content.update(code="import os"))
    with pytest.raises(CheckpointCorruptError, match="the field `code` is invalid"):
        resolve_checkpoint(run / "8")


@pytest.mark.parametrize("text", ["null", "[]", "1", '"x"', "{}", '{"sha256": 1}', "[" * 100_000, "9" * 5_000, "{"])
def test_manifest_of_other_type_raises(run: Path, text: str) -> None:
    (run / "8" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointCorruptError, match=re.escape(str(run / "8"))):
        resolve_checkpoint(run / "8")


def test_huge_manifest_raises(run: Path) -> None:
    os.truncate(run / "8" / MANIFEST, 1 << 40)  # a hole: it takes no space
    with pytest.raises(CheckpointCorruptError, match="is not a regular file"):
        resolve_checkpoint(run / "8")


@pytest.mark.parametrize(
    "text", ["null", "[]", "{", "[" * 100_000, "{}", '{"progress": {}}', '{"progress": 1, "at": 1}']
)
def test_hostile_host_state_raises(run: Path, text: str) -> None:
    forge_file(run / "8", "host.json", text.encode())
    with pytest.raises(CheckpointError, match=re.escape(str(run / "8"))):
        learner(run).restore(run / "8")


@pytest.mark.parametrize("cancelled", [None, 3, [1], [1, -1], [1, "2"], [0.5, 0], [True, 0]])
def test_hostile_cancelled_step_count_raises(run: Path, cancelled: Any) -> None:
    host = json.loads((run / "8" / "host.json").read_text())
    assert host["cancelled"] == [0, 0]
    forge_file(run / "8", "host.json", json.dumps({**host, "cancelled": cancelled}).encode())
    with pytest.raises(CheckpointCorruptError, match="the field `cancelled` is invalid"):
        learner(run).restore(run / "8")


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
    "a key of another kind": lambda host: host["key"].update({"as": "os.system"}),
    "an array that is not there": lambda host: host["key"].update(at="99"),
    "an array of the attacker's": lambda host: host["key"].update({"$": "array", "as": "O"}),
    "an object of the attacker's": lambda host: host["callbacks"].update(
        Checkpointer={"$": "state", "of": {"py/reduce": ["os.system", "touch pwned"], "__class__": "evil.Evil"}}
    ),
    "a class to import": lambda host: host["cbstate"].update(history={"$": "evil.Evil", "of": {"_target_": "evil"}}),
    "attributes": lambda host: host["cbstate"].update(metrics_epoch={"$": "fields", "of": {"__class__": "evil"}}),
    "data": lambda host: host["data"].update(training={"open": True, "pass": 10**9, "consumed": 0}),
    "nested": lambda host: host["cbstate"].update(history=[[[[[[]]]]]]),
}


@pytest.mark.long
def test_loading_hostile_checkpoint_runs_no_code_and_writes_no_file(run: Path, original: Path) -> None:
    folders = [run / "8"]
    for name, change in HOSTILE.items():
        folder = Path(shutil.copytree(original / "8", run / name))
        host = json.loads((folder / "host.json").read_text())
        change(host)
        forge_file(folder, "host.json", json.dumps(host).encode())
        folders.append(folder)
    for part, old, new in (
        ("", "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler", "evil.Evil"),
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


def test_manifest_of_later_version_does_not_fall_back(run: Path) -> None:
    forge(run / "8", lambda content: content.update(format=5, new=1))
    before = tree_of(run)
    for attempt in (lambda: load_params(run), lambda: learner(run).fit(steps=8, resume=True)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert str(caught.value) == (
            f"{run / '8'} was written by a later version of fluxcb (format 5; this version reads 4).\n"
            "  fix:   upgrade fluxcb"
        )
    assert tree_of(run) == before
    with pytest.raises(CheckpointError, match="later version"):
        learner(run).fit(steps=2)
    learner(run.with_name("else")).fit(steps=2)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_checkpoint_of_earlier_version_raises(run: Path, version: int) -> None:
    forge(run / "8", lambda content: (content.update(format=version), content["trees"].update(host_arrays={})))
    before = tree_of(run)
    attempts = [
        lambda: load_params(run),
        lambda: load_params(run / "8"),
        lambda: learner(run).restore(run),
        lambda: learner(run).fit(steps=8, resume=True),
        lambda: learner(run).fit(steps=8),
    ]
    for attempt in attempts:
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert not isinstance(caught.value, CheckpointCorruptError)  # a run would go back to an older checkpoint
        assert str(caught.value) == (
            f"{run / '8'} was written by an earlier version of fluxcb (format {version}; this version reads 4).\n"
            f"  where: {run / '8' / MANIFEST}\n"
            "  why:   the format of checkpoints has changed, and fluxcb does not convert old checkpoints\n"
            "  fix:   continue this run with the version of fluxcb that wrote the checkpoint\n"
            "     or: start a new run: use another directory, or delete this one"
        )
    assert tree_of(run) == before
    learner(run.with_name("else")).fit(steps=2)
    shutil.rmtree(run)
    learner(run).fit(steps=2)
