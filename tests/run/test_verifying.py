"""Each checkpoint that a run reads is verified only once, because hashing a large checkpoint takes minutes."""

from pathlib import Path

import pytest

from fluxcb.checkpoints.manifest import Manifest
from tests.run.test_rewinding import Back, summing


@pytest.fixture
def verified(monkeypatch) -> list[str]:
    """Return the names of the checkpoints whose files are hashed, in order."""
    names: list[str] = []
    verify = Manifest.verify

    def noted(self: Manifest, folder: Path, part: int | None = 0, parts: int = 1) -> None:
        if part is not None:  # otherwise, only names and sizes are compared
            names.append(folder.name)
        verify(self, folder, part, parts)

    monkeypatch.setattr(Manifest, "verify", noted)
    return names


DATA = [float(i) for i in range(1, 13)]


@pytest.mark.parametrize("steps", [2, 6])
def test_resume_verifies_newest_checkpoint_once(tmp_path, verified, steps):
    summing(tmp_path, DATA).fit(steps=4)
    assert verified == []
    again = summing(tmp_path, DATA)
    again.fit(steps=steps, resume=True)  # with 2, nothing is left to train, and the fit stops where it was restored
    assert verified == ["4"]
    assert again.step == max(steps, 4)


def test_restore_verifies_newest_checkpoint_once(tmp_path, verified):
    summing(tmp_path, DATA).fit(steps=4)
    summing(tmp_path, DATA).restore(tmp_path)
    assert verified == ["4"]


def test_rewind_verifies_only_checkpoint_it_uses(tmp_path, verified):
    learner = summing(tmp_path, DATA, Back({8: 7}))
    with pytest.warns(UserWarning, match="goes back from step 8"):
        learner.fit(1)
    assert verified == ["6"]
