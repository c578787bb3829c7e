"""The complete report of an invalid set, for each kind of problem."""

import re
import shutil
import subprocess
import sys

import pytest

from fluxcb._tools.project import LEVELS
from fluxcb._tools.pytest_plugin import pytest_addoption
from tests.plugin.conftest import PLUGIN, SAMPLE, alone


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the output of pytest for all sets of the sample project, which many tests share."""
    folder = tmp_path_factory.mktemp("report")
    shutil.copytree(SAMPLE, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-m", "fluxcb"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def failure(text, name):
    """Return the text of the failure of a set, between its heading and the next one."""
    return re.search(rf"_+ callback set {re.escape(name)} _+\n(.*?)\n(_+ callback set|=+ short)", text, re.DOTALL)[
        1
    ].splitlines()


def lines_of(sample, file, *marks):
    lines = (sample.path / "kit" / file).read_text().splitlines()
    return [next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")) for mark in marks]


def defined_at(sample, file, cls, method="stateaccess"):
    lines = (sample.path / "kit" / file).read_text().splitlines()
    begin = lines.index(f"class {cls}(Callback):")
    return next(n for n in range(begin, len(lines)) if lines[n].strip().startswith(f"def {method}")) + 1


def test_conflict(report, sample):
    assert failure(report, "kit.broken:conflict") == [
        "ConflictError: WarmUp() and Decay() both write `hyperparams.learning_rate` and no order is declared.",
        f"  where: WarmUp.stateaccess  kit/train.py:{defined_at(sample, 'train.py', 'WarmUp')}",
        f"         Decay.stateaccess  kit/train.py:{defined_at(sample, 'train.py', 'Decay')}",
        "  why:   both run at ForwardBegin x TrainingPhase, and the result depends on which one is last",
        "  fix:   put them in the list as `in_order(WarmUp(), Decay())`",
        "     or: make `Decay.runafter()` return `(WarmUp,)`",
    ]


def test_cycle(report, sample):
    assert failure(report, "kit.broken:cycle") == [
        "CycleError: 2 callbacks form a cycle: Norm() -> Scale() -> Norm().",
        "  where: Norm() -> Scale(): Norm writes `step.norm`, Scale reads it",
        "         Scale() -> Norm(): Scale writes `step.grads`, Norm reads it",
        "  why:   at BackwardEnd x TrainingPhase, no order satisfies all of these",
        "  fix:   put them in the list as `in_order(Norm(), Scale())`",
        "     or: in `Norm`, declare `Read(previous=True)` if a value from an earlier moment is sufficient",
        "     or: in `Norm` or `Scale`, narrow a handler that uses less with `@on(..., access={...})`",
    ]


def test_missing_state(report, sample):
    assert failure(report, "kit.broken:missing") == [
        "MissingStateError: Report() reads `cbstate.ema`, which no callback creates.",
        f"  where: Report.stateaccess  kit/broken.py:{defined_at(sample, 'broken.py', 'Report')}",
        "  why:   it would fail at the first handler that reads it",
        "  fix:   add `ParameterEMA()` to the callbacks, which creates it",
    ]


def test_undeclared_access_found_without_running(report, sample):
    (line,) = lines_of(sample, "broken.py", "params")
    (access,) = lines_of(sample, "broken.py", "watch")
    assert failure(report, "kit.broken:undeclared") == [
        "UndeclaredAccessError: Watch() reads `params`, which its `stateaccess` does not declare.",
        f"  where: Watch.show  kit/broken.py:{line}",
        f"         Watch.stateaccess  kit/broken.py:{access}",
        "  why:   it raises AccessError when that line runs",
        '  fix:   add `{"params": Read()}` to `Watch.stateaccess`',
    ]


def test_module_with_missing_dependency(report, sample):
    (line,) = lines_of(sample, "needs_tool.py", "tool")
    assert failure(report, "kit.needs_tool:callbacks") == [
        "DeclarationError: `kit.needs_tool` cannot be imported: ModuleNotFoundError: No module named "
        "'a_tool_that_is_not_installed'.",
        f"  where: <module>  kit/needs_tool.py:{line}",
        "  fix:   install the package that provides `a_tool_that_is_not_installed`, or correct the name; fluxcb "
        "also searches the project's root",
    ]


def test_unknown_name(report, sample):
    assert failure(report, "kit.train:calbacks") == [
        "DeclarationError: `kit.train` has no `calbacks`. Did you mean `callbacks`?",
        "  where: kit/train.py",
    ]


def test_summary_starts_with_problem(report):
    pytest.LineMatcher(report.splitlines()).fnmatch_lines(
        ["FAILED pyproject.toml::kit.broken:conflict - ConflictError: WarmUp() and Decay() both write *"]
    )


def test_all_problems_of_set_are_reported(project):
    (project.path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["kit:callbacks"]\n')
    (project.path / "kit.py").write_text(
        "from fluxcb import Callback, Read\n"
        "class A(Callback):\n"
        "    def stateaccess(self):\n"
        '        return {"cbstate": {"ema": Read(), "nothing": Read()}}\n'
        "callbacks = [A()]\n"
    )
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    text = failure(result.stdout.str(), "kit:callbacks")
    assert [line for line in text if not line.startswith(" ")] == [
        "MissingStateError: A() reads `cbstate.ema`, which no callback creates.",
        "",
        "MissingStateError: A() reads `cbstate.nothing`, which no callback creates.",
    ]


def test_failure_in_the_model_of_testlearner_says_so(project):
    (project.path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["kit:callbacks"]\n')
    (project.path / "kit.py").write_text(
        "from fluxcb.callbacks import Metrics, accuracy\ncallbacks = [Metrics(accuracy)]\n"
    )
    text = project.runpytest_subprocess("--fluxcb-level", "trace").stdout.str()
    assert "DeclarationError: `accuracy` was given outputs of shape" in text
    assert (
        "advice: this list of callbacks was tested with the small model of `fluxcb.testing.testlearner`, which has one "
        "output; if the callbacks need your model and data, name a function that returns your Learner"
    ) in text


def test_failures_show_no_fluxcb_frames(report):
    assert "6 failed, 6 passed" in report
    assert "Traceback" not in report
    assert "fluxcb/_" not in report


# --- levels ---------------------------------------------------------------------------------------------------------

SHAPES = """
from fluxcb import Callback, Write, on
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import testlearner


class Shortens(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def shorten(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.grads = {"w": learner.step.grads["w"]}


class Forgets(Callback):
    def __init__(self):
        self.steps = 0

    @on
    def count(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.steps += 1


def shapes():
    return [Shortens()]


def forgets():
    return [Forgets()]


def learner():
    return testlearner(Forgets())
"""


@pytest.fixture
def levels(project):
    (project.path / "pyproject.toml").write_text(
        '[tool.fluxcb]\ncallbacks = ["kit:shapes", "kit:forgets", "kit:learner"]\n'
    )
    (project.path / "kit.py").write_text(SHAPES)
    return project


@pytest.mark.parametrize(
    ("level", "failed"),
    [("graph", set()), ("trace", {"kit:shapes"}), ("audit", {"kit:shapes", "kit:forgets", "kit:learner"})],
)
def test_higher_levels_find_more(levels, level, failed):
    result = levels.runpytest_subprocess("-rf", "--fluxcb-level", level)
    found = re.findall(r"^FAILED pyproject\.toml::(\S+)", result.stdout.str(), re.MULTILINE)
    assert set(found) == failed


def test_level_of_project(levels):
    file = levels.path / "pyproject.toml"
    file.write_text(file.read_text() + 'level = "trace"\n')
    levels.runpytest_subprocess("-k", "shapes").assert_outcomes(failed=1)


def test_unknown_level(levels):
    result = levels.runpytest_subprocess("--fluxcb-level", "deep")
    result.stderr.fnmatch_lines([f"*invalid choice: 'deep' (choose from *{LEVELS[0]}*"])


def test_options_are_documented(levels):
    text = levels.runpytest_subprocess("--help").stdout.str()
    assert "--no-fluxcb" in text
    assert "--fluxcb-level" in text
    assert pytest_addoption.__doc__


# --- warnings, fixtures, comparing ----------------------------------------------------------------------------------


def test_unused_permissions_warn(project):
    (project.path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["kit:callbacks"]\n')
    (project.path / "kit.py").write_text(
        "from fluxcb import Callback, Read, on\n"
        "from fluxcb.events import StepEnd\n"
        "class Reads(Callback):\n"
        "    def stateaccess(self):\n"
        '        return {"step": {"loss": Read()}, "params": Read()}\n'
        "    @on\n"
        "    def look(self, event: StepEnd, phase, learner):\n"
        "        print(learner.step.loss)\n"
        "callbacks = [Reads()]\n"
    )
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*FluxcbWarning: *`params`*"])
    project.runpytest_subprocess("-W", "error").assert_outcomes(failed=1)


def test_fixtures(project):
    project.makepyfile(
        """
        import pytest
        from fluxcb.callbacks import Recorder, ParameterEMA
        from fluxcb.events import StepEnd
        from fluxcb.phases import TrainingPhase

        def test_check(fluxcb_check):
            assert [type(c) for c in fluxcb_check([Recorder()]).order(StepEnd, TrainingPhase)] == [Recorder]
            with pytest.raises(AssertionError, match="which no callback creates"):
                from fluxcb import Callback, Read
                class A(Callback):
                    def stateaccess(self):
                        return {"cbstate": {"nothing": Read()}}
                fluxcb_check([A()])

        def test_learner(fluxcb_learner, fluxcb_events):
            fluxcb_learner(fluxcb_events, batches=2, validation_batches=0).fit(1)
            sequence = "FitBegin EpochBegin StepBegin StepEnd StepBegin StepEnd EpochEnd Trigger FitStopping FitEnd"
            assert fluxcb_events.names() == sequence.split()
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=2)


def test_graph_differences_are_shown_as_text(project):
    project.makepyfile(
        """
        import fluxcb
        from fluxcb import in_order
        from fluxcb.callbacks import ClipGradients

        def graph(*callbacks):
            return fluxcb.check(callbacks, default_callbacks=False)

        def test_graphs():
            a, b = (lambda: ClipGradients(1.0)), (lambda: ClipGradients(2.0))
            assert graph(in_order(a(), b())) == graph(in_order(b(), a()))
        """
    )
    result = project.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        [
            "E*assert callback graphs differ in 2 edges, 1 order",
            "E*only left: ClipGradients(1.0) -> ClipGradients(2.0) (in_order)",
            "E*only right: ClipGradients(2.0) -> ClipGradients(1.0) (in_order)",
            "E*BackwardEnd x TrainingPhase:",
            "E*left:  ClipGradients(1.0), ClipGradients(2.0)",
            "E*right: ClipGradients(2.0), ClipGradients(1.0)",
        ]
    )
