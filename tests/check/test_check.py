"""`fluxcb.check` works without importing JAX."""

import subprocess
import sys
from textwrap import dedent

import fluxcb
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_check_does_not_import_jax() -> None:
    assert (
        run(
            """
            import sys
            import fluxcb
            from fluxcb import Callback, Read, on
            from fluxcb.events import StepEnd
            from fluxcb.phases import TrainingPhase

            class Printer(Callback):
                def stateaccess(self):
                    return {"step": {"loss": Read()}, "cbstate": {"history": Read()}}

                @on
                def show(self, event: StepEnd, phase: TrainingPhase, learner): ...

            graph = fluxcb.check([Printer()])
            names = [repr(callback) for callback in graph.order(StepEnd, TrainingPhase)]
            print(names.index("Recorder()") < names.index("Printer()"))
            print(graph.digraph.has_edge("Recorder()", "Printer()"))
            heavy = {"jax", "jaxlib", "optax", "orbax", "rich"}
            print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
            """
        )
        == "True\nTrue\n[]\n"
    )


def test_check_of_a_learner_returns_its_graph() -> None:
    from fluxcb.testing import testlearner

    learner = testlearner()
    assert fluxcb.check(learner).order(StepEnd, TrainingPhase) == learner.callbacks.graph.order(StepEnd, TrainingPhase)


def test_check_rejects_invalid_callbacks_without_importing_jax() -> None:
    assert (
        run(
            """
            import sys
            import fluxcb

            class Reader(fluxcb.Callback):
                def stateaccess(self):
                    return {"cbstate": {"history": fluxcb.Read()}}

            try:
                fluxcb.check([Reader()], default_callbacks=False)
            except fluxcb.MissingStateError as error:
                print(error)
            print("jax" in sys.modules)
            """
        )
        == """\
Reader() reads `cbstate.history`, which no callback creates.
  where: Reader.stateaccess  <string>:6
  why:   it would fail at the first handler that reads it
  fix:   add `Recorder()` to the callbacks, which creates it
False
"""
    )
