"""What fluxcb shows of callbacks has only names that users can look up: no private classes or modules."""

import re
import sys

import pytest

import fluxcb
import fluxcb.callbacks as library
from fluxcb import AccessError, Callback, Read, every, on, switchable, throttle, when
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner
from tests.contract.every_callback import HOW, FakeGPU, found

PRIVATE = re.compile(r"\b_[A-Za-z]\w*\(|\bfluxcb\._\w+| object at 0x|<function ")


class Shows(Callback):
    def __init__(self, act=lambda learner: None):
        self._act = act

    def stateaccess(self):  # access
        return {"step": {"loss": Read()}}

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        self._act(learner)


@pytest.mark.parametrize("name", found())
def test_check_of_public_callback_shows_only_public_names(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeGPU)
    how = HOW.get(name, {})
    callbacks = [how.get("make", getattr(library, name))(), *(make() for make in how.get("needs", ()))]
    graph = fluxcb.check(callbacks)
    for text in (repr(callbacks), str(graph), graph.explain()):
        assert not PRIVATE.findall(text)


def test_learner_and_replay_show_only_public_names(tmp_path, capsys, refused):
    def make():
        wrapped = (
            every(library.Metrics(), epochs=2),
            when(Shows(), lambda learner: True),
            throttle(Shows(), StepEnd, freq=2),
            switchable(library.ClipGradients(1.0)),
            library.PeriodicTrigger(library.ModelSaver(tmp_path / "models"), every_k_steps=3, every_k_epochs=2),
        )
        return testlearner(*wrapped, library.Checkpointer(tmp_path / "run"), default_callbacks=True)

    learner = make()
    learner.fit(2)
    graph = fluxcb.check([*learner.callbacks])
    shown = [learner.explain(), learner.explain_windows(), repr(learner.callbacks), str(graph), graph.explain()]
    seen = []
    observed = make()
    watch = library.PrintArrays("step.loss")
    shown.append(
        str(
            observed.replay(
                tmp_path / "run", steps=(9, 10), callbacks=[watch, Shows(lambda _: seen.append(observed.explain()))]
            )
        )
    )
    for text in (*shown, *seen, capsys.readouterr().out):
        assert not PRIVATE.findall(text)

    def writes(learner):
        learner.step.loss = 1.0

    with refused(
        AccessError,
        "Shows() writes `step.loss`, which the step has computed.\n"
        "  where: Shows.stateaccess  <@access>\n"
        "  why:   the step has ended, so it would not use the new value\n"
        '  fix:   write it in a handler of BackwardBegin, and add `{"step": {"loss": Write()}}` to `stateaccess`\n'
        "     or: write to another name: `learner.step.my_loss = ...`, and add "
        '`{"step": {"my_loss": Write()}}` to `stateaccess`',
    ):
        make().replay(tmp_path / "run", steps=(9, 10), callbacks=[Shows(writes)])
