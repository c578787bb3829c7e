"""Reading the checkpoints of a run that is still training and deletes checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb._errors import CheckpointCorruptError, CheckpointError
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import load_model, load_model_state, load_params
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.reading import FolderCheckpoint
from fluxcb.checkpoints.run_folder import RunFolder
from tests.changed_callbacks import changes_arguments


def apply(params: Any, xs: Any) -> Any:
    return params["w"] * xs


MODEL = (lambda key, xs: {"w": jnp.zeros(())}, apply)


def learner(folder: Path, **options: Any) -> fluxcb.Learner:
    return fluxcb.Learner(
        MODEL,
        lambda outputs, ys: jnp.mean(outputs - ys),
        optax.sgd(1.0),
        data=[(jnp.ones(1), jnp.zeros(1))] * 4,
        callbacks=[Checkpointer(folder, steps=1, **options)],
        default_callbacks=False,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose parameter `w` after step n is -n."""
    folder = tmp_path_factory.mktemp("original")
    learner(folder, keep_last=10).fit(steps=4)
    return folder


class Live:
    """A run with `keep_last=1` that is at step 1 of 4."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.original, self.folder, self.step = original, RunFolder(folder), 1
        folder.mkdir()
        shutil.copyfile(original / "fluxcb.lock", folder / "fluxcb.lock")
        shutil.copytree(original / "1", folder / "1")

    def train(self) -> None:
        """Write the next checkpoint and delete the previous one, in the order of `Checkpointer`."""
        (before,) = self.folder.entries()
        self.step += 1
        shutil.copytree(self.original / str(self.step), self.folder.path / ".copied")
        (self.folder.path / ".copied").rename(self.folder.path / str(self.step))
        self.folder.remove(before)


@pytest.fixture
def live(original: Path, tmp_path: Path) -> Live:
    return Live(original, tmp_path / "live")


def restored(folder: Path) -> Any:
    again = learner(folder)
    again.restore(folder)
    assert again.step == -float(again.params["w"])
    return again.params["w"]


READERS: dict[str, Callable[[Path], Any]] = {
    "load_params": lambda folder: load_params(folder)["w"],
    "load_model": lambda folder: load_model(folder, MODEL)(jnp.ones(())),
    "restore": restored,
}

MOMENTS: dict[str, tuple[Any, str]] = {
    "the manifest is read": (Manifest, "read"),
    "the files are compared": (Manifest, "verify"),
    "the arrays are read": (FolderCheckpoint, "read_arrays"),
}


@pytest.fixture
def train_before(live: Live, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let the run write a checkpoint before a moment of the reader, at its first occurrences."""

    def before(moment: str, times: int) -> None:
        owner, name = MOMENTS[moment]
        left, original = [None] * times, getattr(owner, name)

        def train_first(*arguments: Any, **options: Any) -> Any:
            if left:
                left.pop()
                live.train()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, train_first)

    return before


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("reader", list(READERS))
@changes_arguments("callbacks.Checkpointer.keep_last")
def test_deleted_checkpoint_is_replaced_by_newest(
    live: Live, train_before: Callable[[str, int], None], reader: str, moment: str, times: int
) -> None:
    train_before(moment, times)
    assert float(READERS[reader](live.folder.path)) == -live.step == -(1 + times)


def test_model_state_is_read_again(live: Live, train_before: Callable[[str, int], None]) -> None:
    train_before("the files are compared", 1)
    assert load_model_state(live.folder.path) == {}


def test_damaged_checkpoint_that_still_exists_raises(live: Live) -> None:
    (live.folder.path / "1" / "host.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"All checkpoints in .* are damaged"):
        load_params(live.folder.path)


def test_explicitly_named_checkpoint_is_not_replaced(live: Live, train_before: Callable[[str, int], None]) -> None:
    train_before("the arrays are read", 1)
    with pytest.raises(CheckpointCorruptError):
        load_params(live.folder.path / "1")
