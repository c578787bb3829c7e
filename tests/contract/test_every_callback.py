"""Every public callback passes `fluxcb.testing.check_callback`."""

import sys
import warnings

import jax
import pytest

import fluxcb.callbacks as library
from fluxcb._tools.auditing import audit_learner
from fluxcb.testing import check_callback, testlearner
from tests.contract.every_callback import HOW, FakeGPU, found
from tests.shared_programs import shared_programs


@pytest.fixture(scope="module", autouse=True)
def _shared():
    with shared_programs():
        yield


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeGPU)


@pytest.mark.parametrize("name", found())
def test_public_callback_passes_check_callback(name):
    how = HOW.get(name, {})
    check_callback(**{"make": getattr(library, name), **how})


@pytest.mark.parametrize("name", found())
def test_public_callback_passes_audit_with_default_callbacks(name):
    how = HOW.get(name, {})
    makers = [how.get("make", getattr(library, name)), *how.get("needs", ())]
    learner = how.get("learner", testlearner)
    audit = audit_learner(lambda: learner(*(make() for make in makers), default_callbacks=True))
    assert [str(problem) for problem in audit.problems] == []


@pytest.mark.parametrize("name", found())
def test_public_callback_trains_without_implicit_promotion(name):
    how = HOW.get(name, {})
    makers = [*how.get("needs", ()), how.get("make", getattr(library, name))]
    with jax.numpy_dtype_promotion("strict"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the fit may be too short for the callback
        how.get("learner", testlearner)(*(make() for make in makers), default_callbacks=False).fit(1)


def test_test_data_covers_only_public_callbacks():
    assert set(HOW) <= set(found())


def test_default_callbacks_pass_check():
    learner = testlearner(default_callbacks=True)
    classes = [type(callback) for callback in learner.callbacks]
    assert classes == [type(callback) for callback in library.default_callbacks()]
