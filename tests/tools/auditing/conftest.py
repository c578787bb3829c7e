"""Fixtures that audit small sets and compare the complete texts of the findings."""

import pytest

from fluxcb._tools.auditing import audit_learner
from fluxcb.testing import testlearner


@pytest.fixture
def audited():
    """Return a function that audits callbacks, given as functions that create them, on the small Learner."""

    def audit(*makers, **kwargs):
        return audit_learner(lambda: testlearner(*(make() for make in makers), **kwargs))

    return audit


@pytest.fixture
def problems(refused):
    """Return a function that asserts the problems that an audit found, by kind and complete text."""

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
    """Return a function that asserts the complete advice of an audit without problems."""

    def check(audit, *texts):
        assert (audit.problems, len(audit.advice)) == ([], len(texts)), "\n".join(audit.advice)
        for found, text in zip(audit.advice, texts, strict=True):
            with refused(ValueError, text):
                raise ValueError(found)

    return check
