"""If XLA rejects a compiler option, programs are compiled without it."""

import jax
import numpy as np
import pytest

from fluxcb._compile import program
from fluxcb.testing import testlearner


class Lowered:
    """A lowered program that records the options of each compilation, and fails like XLA if one is in `refuses`."""

    def __init__(self, refuses=()):
        self.refuses, self.tried = set(refuses), []

    def compile(self, compiler_options):
        self.tried.append(compiler_options)
        if self.refuses & set(compiler_options or ()):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")
        return "compiled"


@pytest.fixture
def compiled(monkeypatch):
    """A function that compiles with given options."""

    def compile_with(lowered, options):
        monkeypatch.setattr(program, "_options", lambda step, platform, *, fuses: options)
        return program.compiled_for(lowered, None, "cpu", fuses=True)

    return compile_with


KNOWN = {"xla_cpu_copy_insertion_use_region_analysis": True}
UNKNOWN = {"xla_was_renamed": True, "xla_was_removed": "VALUE"}


def test_accepted_xla_options_are_used(compiled):
    lowered = Lowered()
    assert compiled(lowered, KNOWN) == "compiled"
    assert lowered.tried == [KNOWN]


def test_rejected_xla_options_are_dropped(compiled):
    lowered = Lowered(refuses=UNKNOWN)
    assert compiled(lowered, {**UNKNOWN, **KNOWN}) == "compiled"
    assert lowered.tried == [{**UNKNOWN, **KNOWN}, KNOWN]


def test_no_compiler_options_if_all_are_rejected(compiled):
    lowered = Lowered(refuses=UNKNOWN)
    assert compiled(lowered, UNKNOWN) == "compiled"
    assert lowered.tried == [UNKNOWN, None]


@pytest.mark.parametrize("options", [{}, KNOWN])
def test_other_compile_errors_are_raised(compiled, options):
    class Failing(Lowered):
        def compile(self, compiler_options):
            super().compile(compiler_options)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    lowered = Failing()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^RESOURCE_EXHAUSTED: Out of memory$"):
        compiled(lowered, options)
    assert lowered.tried == [options or None]


def test_rejected_option_does_not_change_training(monkeypatch):
    own, weights = program._options, []
    for more in ({}, UNKNOWN):
        monkeypatch.setattr(program, "_options", lambda *args, more=more, **options: {**own(*args, **options), **more})
        learner = testlearner()
        learner.fit(2)
        weights.append(np.asarray(learner.params["w"]))
    np.testing.assert_array_equal(*weights)
