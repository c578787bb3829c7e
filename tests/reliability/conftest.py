"""Fixtures of the reliability tests. `FLUXCB_LONG=10 pytest tests/reliability` runs ten times as many cases."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def times():
    """Return how many times as many cases as in CI to run."""
    return int(os.environ.get("FLUXCB_LONG", "1"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an unchanged checkpoint of step 4."""
    from tests.reliability.forged_checkpoints import learner

    folder = tmp_path_factory.mktemp("original") / "run"
    learner(folder).fit(steps=4)
    return folder / "4"


@pytest.fixture(scope="module")
def before(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of step 2 of the same training."""
    from tests.reliability.forged_checkpoints import learner

    folder = tmp_path_factory.mktemp("before") / "run"
    learner(folder).fit(steps=2)
    return folder / "2"
