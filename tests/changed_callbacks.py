"""Tests of resumed runs whose callbacks get other arguments."""

import re

import pytest


def changes_arguments(*paths: str) -> pytest.MarkDecorator:
    """Mark a test that resumes a run with other arguments of its callbacks. Any other difference is still a failure.

    Args:
        *paths: The arguments that change, as the table of `ResumeWarning` names them. A path includes its parts.
    """
    # The whole message has to match. pytest separates the parts of a filter by colons, so it contains none.
    rows = "|".join(map(re.escape, paths))
    # A run that a callback has stopped has one more line.
    stopped = r"(\n  The run was stopped [^\n]*)?"
    message = rf"The run resumes from [^\n]* with differences.\n  path [^\n]*(\n  ({rows})(\.|\[| )[^\n]*)+{stopped}\Z"
    return pytest.mark.filterwarnings(f"ignore:{message}:fluxcb.checkpoints.ResumeWarning")
