"""The commands for callback sets, in separate processes, on the sample project of tests/plugin."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETS = [
    "kit.train:callbacks",
    "kit.train:make_callbacks",
    "kit.train:make_learner",
    "kit.train:two_schedules",
    "kit.train:scheduled",
    "kit.train:Sets.small",
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "sample"
    shutil.copytree(ROOT / "tests" / "plugin" / "sample", folder)
    return folder


def cli(folder, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "fluxcb", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        **options,
    )


def done(run, code=0):
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout.splitlines()


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_valid_sets(sample):
    names = ["kit.train:callbacks", "kit.train:two_schedules"]
    # There are six default callbacks, and three edges between those that print. ClipGradients writes the gradients that
    # GradientNorm reads, and `in_order` states the order of the two schedules.
    assert done(cli(sample, "check", *names)) == [
        "Sets as named, imported from ., level graph",
        "kit.train:callbacks      ok  9 callbacks, 4 edges",
        "kit.train:two_schedules  ok  8 callbacks, 4 edges",
        "",
        "2 sets valid.",
    ]


def test_check_all_sets_of_project(sample):
    lines = done(cli(sample, "check"), 1)
    assert lines[0] == "pyproject.toml, level graph"
    assert [line.split()[:2] for line in lines if line.startswith("kit.")] == [
        *([name, "ok"] for name in SETS),
        *(["kit.broken:" + name, "FAILED"] for name in ("conflict", "cycle", "missing", "undeclared")),
        ["kit.needs_tool:callbacks", "FAILED"],
        ["kit.train:calbacks", "FAILED"],
    ]
    assert lines[-1] == "6 of 12 sets failed."
    assert (
        "  ConflictError: WarmUp() and Decay() both write `hyperparams.learning_rate` and no order is declared."
        in lines
    )


def test_check_from_subfolder_of_project(sample):
    lines = done(cli(sample / "kit", "check"), 1)
    assert lines[0] == f"{sample / 'pyproject.toml'}, level graph"
    assert lines[-1] == "6 of 12 sets failed."


def test_check_json(sample):
    found = json.loads(cli(sample, "check", "kit.broken:missing", "kit.train:Sets.small", "--json").stdout)
    assert found["project"] == str(sample / "pyproject.toml")
    assert found["level"] == "graph"
    broken, small = found["sets"]
    assert (broken["set"], broken["ok"]) == ("kit.broken:missing", False)
    assert broken["problems"] == [
        {
            "type": "MissingStateError",
            "what": "Report() reads `cbstate.ema`, which no callback creates.",
            "where": ["Report.stateaccess  kit/broken.py:28"],
            "why": "it would fail at the first handler that reads it",
            "fix": ["add `ParameterEMA()` to the callbacks, which creates it"],
        }
    ]
    assert small == {
        "set": "kit.train:Sets.small",
        "level": "graph",
        "ok": True,
        "callbacks": [
            "Recorder()",
            "Metrics()",
            "ProgressBar()",
            "MetricsPrinter()",
            "StopOnNaNLoss()",
            "FitSummary()",
        ],
        "problems": [],
        "advice": [],
        "unclear": [],
    }


def test_check_does_not_import_jax(sample):
    code = 'import sys; from fluxcb._tools.cli import main; main(sys.argv[1:]); print("jax" in sys.modules)'
    run = subprocess.run(
        [sys.executable, "-c", code, "check", "kit.train:callbacks"],
        cwd=sample,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines()[-1] == "False", run.stderr


def test_check_says_that_a_list_was_tested_with_another_model(tmp_path):
    lines = "from fluxcb.callbacks import Metrics, accuracy\ncallbacks = [Metrics(accuracy)]\n"
    (tmp_path / "classes.py").write_text(lines)
    advice = (
        "  advice: this list of callbacks was tested with the small model of `fluxcb.testing.testlearner`, which has "
        "one output; if the callbacks need your model and data, name a function that returns your Learner"
    )
    assert advice in done(cli(tmp_path, "check", "classes:callbacks", "--level", "trace"), 1)
    (tmp_path / "missing.py").write_text(
        "from fluxcb.callbacks import EarlyStopping\ncallbacks = [EarlyStopping(2, 'f1')]\n"
    )
    assert advice not in done(
        cli(tmp_path, "check", "missing:callbacks", "--level", "trace"), 1
    )  # not the model's fault


def test_check_with_higher_level(sample):
    lines = done(cli(sample, "check", "kit.train:callbacks", "kit.train:make_learner", "--level", "audit"))
    assert lines[0] == "Sets as named, imported from ., level audit"
    assert lines[-1] == "2 sets valid."


def test_check_without_sets(tmp_path):
    run = cli(tmp_path, "check")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"No callback set was found: there is no pyproject.toml in {tmp_path} or above it, and no set was named.\n"
        '  fix:   add `[tool.fluxcb]` with `callbacks = ["pkg.train:callbacks"]`\n'
        "     or: name a set, e.g. `fluxcb check pkg.train:callbacks`\n"
    )
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert cli(tmp_path, "check").stderr.startswith(
        "No callback set was found: pyproject.toml has no callback sets in [tool.fluxcb], and no set was named.\n"
    )


def test_invalid_table_is_wrong_usage(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallback = ["a:b"]\n')
    for command in ("check", "graph"):
        run = cli(tmp_path, command)
        assert run.returncode == 2
        assert run.stderr.startswith("`[tool.fluxcb]` has no key 'callback'. Did you mean `callbacks`?\n")


# --- graph ----------------------------------------------------------------------------------------------------------


def test_graph_as_tree(sample):
    assert "  traced  GradientNorm()" in done(cli(sample, "graph", "kit.train:callbacks"))


def test_graph_of_one_moment(sample):
    lines = done(cli(sample, "graph", "kit.train:callbacks", "--event", "BackwardEnd"))
    assert lines[0] == "BackwardEnd x TrainingPhase: 3 callbacks, 1 edge"
    other = done(cli(sample, "graph", "kit.train:callbacks", "--event", "EpochEnd", "--phase", "validation"))
    assert other[0].startswith("EpochEnd x ValidationPhase: ")


def test_graph_of_unknown_moment(sample):
    run = cli(sample, "graph", "kit.train:callbacks", "--event", "BackwardEnds", "--phase", "trainin")
    assert run.returncode == 2
    assert run.stderr.startswith(
        "No callback runs at BackwardEnds x trainin. Did you mean `BackwardEnd`? Did you mean `training`?\n"
        "  fix:   name one of the moments: FitBegin x TrainingPhase, "
    )
    run = cli(sample, "graph", "kit.train:callbacks", "--event", "BackwardEnd", "--phase", "validation")
    assert run.stderr.startswith("No callback runs at BackwardEnd x validation.\n")


def test_graph_of_invalid_set(sample):
    run = cli(sample, "graph", "kit.broken:conflict", "--format", "dot")
    assert run.returncode == 1
    assert run.stdout.startswith("digraph ")
    assert run.stderr.startswith("ConflictError: WarmUp() and Decay() both write `hyperparams.learning_rate`")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.svg", "<svg "),
        ("a.html", "<!DOCTYPE html>"),
        ("a.dot", "digraph "),
        ("a.mmd", "graph LR"),
        ("a.txt", "Callbacks"),
    ],
)
def test_graph_files(sample, tmp_path, name, begins):
    out = tmp_path / name
    assert done(cli(sample, "graph", "kit.train:callbacks", "-o", str(out))) == [f"wrote {out}"]
    text = out.read_text()
    assert text.startswith(begins)
    if name == "a.svg":
        ElementTree.fromstring(text)


def test_graph_file_of_unknown_format(sample):
    run = cli(sample, "graph", "kit.train:callbacks", "-o", "a.png")
    assert run.returncode == 2
    assert run.stderr == (
        "The file name a.png does not determine a format.\n"
        "  fix:   use one of the extensions .svg, .html, .dot, .gv, .mmd, .txt, or pass --format\n"
    )


def test_graph_as_json(sample):
    found = json.loads(cli(sample, "graph", "kit.train:callbacks", "--json").stdout)
    printing = {"MetricsPrinter()", "ProgressBar()", "FitSummary()"}
    assert [edge for edge in found["edges"] if not {edge["earlier"], edge["later"]} <= printing] == [
        {
            "earlier": "ClipGradients(1.0)",
            "later": "GradientNorm()",
            "reasons": ["ClipGradients writes `step.grads`, GradientNorm reads it"],
            "moments": ["BackwardEnd x TrainingPhase"],
        }
    ]
    [moment] = [m for m in found["moments"] if (m["event"], m["phase"]) == ("BackwardEnd", "TrainingPhase")]
    assert (moment["kind"], [h["callback"] for h in moment["handlers"]]) == (
        "traced",
        ["ClipGradients(1.0)", "GradientNorm()", "StopOnNaNLoss()"],
    )


def test_set_must_be_named_if_several_exist(sample):
    run = cli(sample, "graph")
    assert run.returncode == 2
    assert run.stderr.splitlines()[:2] == ["pyproject.toml declares several sets; name one of", "  kit.train:callbacks"]


def test_set_that_cannot_be_loaded(sample):
    run = cli(sample, "graph", "kit.train:calbacks")
    assert run.returncode == 1
    assert run.stderr.startswith("DeclarationError: `kit.train` has no `calbacks`. Did you mean `callbacks`?\n")


@pytest.mark.parametrize("command", [("graph",), ("explain",), ("explain", "Lowest", "GradientNorm"), ("events",)])
def test_set_name_without_module(sample, command):
    run = cli(sample, *command, "kit.train.callbacks")
    if command == ("explain",):
        assert "  fix:   explain the order of all callbacks: `fluxcb explain kit.train:callbacks`\n" in run.stderr
    else:
        assert run.stderr == (
            "DeclarationError: 'kit.train.callbacks' does not name a callback set.\n"
            "  fix:   write `kit.train:callbacks`\n"
        )


# --- explain, events, list ------------------------------------------------------------------------------------------


def test_explain_edge(sample):
    assert done(cli(sample, "explain", "GradientNorm", "ClipGradients", "kit.train:callbacks")) == [
        "ClipGradients(1.0) runs before GradientNorm().",
        "  because ClipGradients writes `step.grads`, GradientNorm reads it",
        "  at BackwardEnd x TrainingPhase",
    ]


def test_explain_whole_set(sample):
    lines = done(cli(sample, "explain", "kit.train:callbacks"))
    program = "import fluxcb, kit.train; print(fluxcb.check(kit.train.callbacks).explain())"
    run = subprocess.run([sys.executable, "-c", program], cwd=sample, capture_output=True, text=True, timeout=120)
    assert lines == run.stdout.splitlines()
    assert json.loads(cli(sample, "explain", "kit.train:callbacks", "--json").stdout) == {"explanation": lines}


def test_explain_single_callback(sample):
    run = cli(sample, "explain", "ClipGradients")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "`fluxcb explain ClipGradients` names neither a callback set nor two callbacks.\n"
        "  fix:   explain the order of all callbacks: `fluxcb explain kit.train:callbacks`\n"
        "     or: name another callback: `fluxcb explain ClipGradients OTHER`\n"
    )
    assert "`fluxcb explain kit.train:make_learner`" in cli(sample, "explain", "make_learner").stderr


def test_explain_one_callback_of_a_set(sample):
    run = cli(sample, "explain", "ClipGradients", "kit.train:make_learner")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "`fluxcb explain ClipGradients kit.train:make_learner` names one callback and a callback set, and a second "
        "callback is missing.\n"
        "  fix:   name another callback: `fluxcb explain ClipGradients OTHER kit.train:make_learner`\n"
        "     or: explain the order of all callbacks: `fluxcb explain kit.train:make_learner`\n"
    )


def test_explain_conflict(sample):
    lines = done(cli(sample, "explain", "Decay", "WarmUp", "kit.broken:conflict"), 1)
    assert lines[0] == "WarmUp() and Decay() both write `hyperparams.learning_rate` and no order is declared."
    assert "  fix:   put them in the list as `in_order(WarmUp(), Decay())`" in lines


def test_explain_unknown_callback(sample):
    run = cli(sample, "explain", "GradientNorms", "ClipGradients", "kit.train:callbacks")
    assert run.returncode == 2
    assert run.stderr.startswith("There is no callback 'GradientNorms' in this set. Did you mean `GradientNorm`?\n")


def test_explain_as_json(sample):
    found = json.loads(cli(sample, "explain", "Lowest", "GradientNorm", "kit.train:callbacks", "--json").stdout)
    assert found["explanation"][0] == (
        "Lowest() and GradientNorm() never run at the same moment, so they need no order."
    )


def test_list_events(sample):
    lines = done(cli(sample, "events", "kit.train:scheduled"))
    assert [line.split()[0] for line in lines if line.split()[1] == "ValidationPhase"] == [
        "EpochBegin",
        "ComputeEnd",
        "StepEnd",
        "EpochEnd",
    ]
    [step] = [line for line in lines if line.startswith("StepEnd") and "TrainingPhase" in line]
    assert "host" in step
    assert "Lowest() at EverySteps(steps=10) [EverySteps(steps=10)]" in step


def test_list_callbacks(sample):
    import fluxcb.callbacks as library
    from fluxcb import Callback

    classes = [
        n
        for n in library.__all__
        if isinstance(getattr(library, n), type) and issubclass(getattr(library, n), Callback)
    ]
    found = json.loads(cli(sample, "list", "--json").stdout)
    assert [row["name"] for row in found] == classes
    lines = done(cli(sample, "list"))
    at = lines.index("Recorder()")
    assert lines[at + 1 : at + 3] == [
        "  Count epochs, steps and samples of every phase in `cbstate.history`.",
        "    writes  cbstate.history",
    ]


# --- plot, and what all have in common ------------------------------------------------------------------------------


def test_plot_run(tmp_path):
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {s}, "loss": {8 / s}}}\n' for s in range(1, 9)))
    lines = done(cli(tmp_path, "plot", "."))
    assert lines[0].rstrip() == "■ loss  last 1"
    assert len(lines) == 1 + 12 + 2
    assert done(cli(tmp_path, "plot", "log.jsonl", "-o", "loss.svg")) == ["wrote loss.svg"]
    assert (tmp_path / "loss.svg").read_text().startswith("<svg ")


def test_plot_missing_run(tmp_path):
    run = cli(tmp_path, "plot", "runs/x")
    assert run.returncode == 1
    assert run.stderr.startswith("DataError: There is no run at runs/x.\n")


def test_missing_folder_of_output_file(sample):
    run = cli(sample, "graph", "kit.train:callbacks", "-o", "nowhere/a.svg")
    assert run.returncode == 2
    assert run.stderr == (
        "`--out` is nowhere/a.svg, but the folder nowhere does not exist.\n  fix:   create the folder first\n"
    )
    (sample / "nowhere").mkdir()
    assert cli(sample, "graph", "kit.train:callbacks", "-o", "nowhere/a.svg").returncode == 0


def test_closed_output_pipe(sample):
    line = f"{sys.executable} -m fluxcb list | head -n 1; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", line], cwd=sample, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_unknown_commands(tmp_path):
    run = cli(tmp_path, "chek")
    assert run.returncode == 2
    assert "invalid choice: 'chek'" in run.stderr


def test_check_advises_about_handlers_that_are_never_called(tmp_path):
    lines = (
        "from fluxcb import Callback, on\nfrom fluxcb.events import Trigger\n"
        "from fluxcb.phases import ValidationPhase\nclass Late(Callback):\n    @on\n"
        "    def act(self, event: Trigger, phase: ValidationPhase, learner): pass\ncallbacks = [Late()]\n"
    )
    (tmp_path / "late.py").write_text(lines)
    advice = (
        "  advice: fluxcb does not call Late().act, because ValidationPhase does not emit Trigger. Annotate the "
        "parameter as `phase: TrainingPhase`, which emits it."
    )
    assert advice in done(cli(tmp_path, "check", "late:callbacks"))
    (tmp_path / "late.py").write_text(lines.replace("ValidationPhase", "TrainingPhase"))
    assert "advice" not in "".join(done(cli(tmp_path, "check", "late:callbacks")))
