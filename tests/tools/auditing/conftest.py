"""Audits of small sets, and their findings compared by whole texts."""

import pytest

from fluxcb._tools.auditing import audit_learner
from fluxcb.testing import testlearner


@pytest.fixture
def audited():
    """Return a function that audits a set of callbacks, given by their makers, on the small Learner."""

    def audit(*makers, **kwargs):
        return audit_learner(lambda: testlearner(*(make() for make in makers), **kwargs))

    return audit


@pytest.fixture
def problems(refused):
    """Return a function that asserts which problems an audit found, by their kinds and whole texts."""

    def check(audit, *texts):
        assert len(audit.problems) == len(texts), "\n".join(map(str, audit.problems))
        for problem, text in zip(audit.problems, texts, strict=True):
            kind, _, rest = text.partition(": ")
            assert type(problem).__name__ == kind
            with refused(type(problem), rest):
                raise problem

    return check


@pytest.fixture
def advice(refused):
    """Return a function that asserts what an audit advises, by whole texts, and that it found no problem."""

    def check(audit, *texts):
        assert (audit.problems, len(audit.advice)) == ([], len(texts)), "\n".join(audit.advice)
        for found, text in zip(audit.advice, texts, strict=True):
            with refused(ValueError, text):
                raise ValueError(found)

    return check
