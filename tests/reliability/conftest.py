"""How long these tests take: `FLUXCB_LONG=10 pytest tests/reliability` runs ten times as much."""

import os

import pytest


@pytest.fixture
def times():
    """How many times as much as in CI is to be run."""
    return int(os.environ.get("FLUXCB_LONG", "1"))
