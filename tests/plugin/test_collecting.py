"""Which sets are collected as tests, and how to select them."""

import json
import re
from xml.etree import ElementTree

import pytest

GOOD = [
    "pyproject.toml::kit.train:callbacks",
    "pyproject.toml::kit.train:make_callbacks",
    "pyproject.toml::kit.train:make_learner",
    "pyproject.toml::kit.train:two_schedules",
    "pyproject.toml::kit.train:scheduled",
    "pyproject.toml::kit.train:Sets.small",
]
BAD = [
    "pyproject.toml::kit.broken:conflict",
    "pyproject.toml::kit.broken:cycle",
    "pyproject.toml::kit.broken:missing",
    "pyproject.toml::kit.broken:undeclared",
    "pyproject.toml::kit.needs_tool:callbacks",
    "pyproject.toml::kit.train:calbacks",
]


def collected(result):
    return [line for line in result.outlines if re.fullmatch(r"\S+::\S+", line)]


def run(project, *arguments):
    return project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def chosen(project, *arguments):
    return collected(run(project, "--collect-only", "-q", *arguments))


def test_each_declared_set_is_collected(sample, autoload):
    assert chosen(sample) == GOOD + BAD
    run(sample).assert_outcomes(passed=6, failed=6)


def test_collected_id_can_be_run_again(sample):
    run(sample, GOOD[0], BAD[1]).assert_outcomes(passed=1, failed=1)


def test_sets_are_not_collected_for_other_folder(sample):
    sample.makepyfile(**{"tests/test_a": "def test_a(): pass"})
    assert chosen(sample, "tests") == ["tests/test_a.py::test_a"]


@pytest.mark.parametrize("paths", ['["tests"]', '["tests", "."]', '["."]', "[]"])
def test_testpaths_neither_hide_nor_duplicate_sets(sample, paths):
    sample.makepyfile(**{"tests/test_a": "def test_a(): pass"})
    file = sample.path / "pyproject.toml"
    file.write_text(file.read_text() + f"\n[tool.pytest.ini_options]\ntestpaths = {paths}\n")
    assert sorted(chosen(sample)) == sorted([*GOOD, *BAD, "tests/test_a.py::test_a"])


def test_nested_project(project):
    inner = project.path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["inner_sets:callbacks"]\n')
    (inner / "inner_sets.py").write_text("from fluxcb.callbacks import Recorder\ncallbacks = [Recorder()]\n")
    root = ("--rootdir", str(project.path))
    assert chosen(project, *root) == []  # it may be a vendored project
    assert not (inner / "__pycache__").exists()
    for named in ("inner", "inner/pyproject.toml", "inner/pyproject.toml::inner_sets:callbacks"):
        assert chosen(project, *root, named) == ["inner/pyproject.toml::inner_sets:callbacks"]
    run(project, *root, "inner").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "text",
    [
        "[tool]\nfluxcb = {callbacks = ['sets:callbacks']}\n",
        "[tool.'fluxcb']\ncallbacks = ['sets:callbacks']\n",
        '[tool."fluxcb"]\ncallbacks = ["sets:callbacks"]\n',
        '[ tool . fluxcb ]\ncallbacks = ["sets:callbacks"]\n',
        "tool = {fluxcb = {callbacks = ['sets:callbacks']}}\n",
    ],
)
def test_every_notation_of_table(project, text):
    (project.path / "pyproject.toml").write_text(text)
    project.makepyfile(sets="from fluxcb.callbacks import Recorder\ncallbacks = [Recorder()]\n")
    assert chosen(project) == ["pyproject.toml::sets:callbacks"]


def test_unreadable_file_does_not_end_collection(project):
    (project.path / "vendored").mkdir()
    (project.path / "vendored" / "pyproject.toml").symlink_to("/proc/self/mem")  # a regular file without content
    project.makepyfile("def test_a(): pass")
    run(project).assert_outcomes(passed=1)


def test_select_by_name(sample):
    assert chosen(sample, "-k", "make_") == GOOD[1:3]


def test_select_by_marker(sample):
    sample.makepyfile(test_a="def test_a(): pass")
    assert chosen(sample, "-m", "fluxcb", "--strict-markers") == GOOD + BAD
    assert chosen(sample, "-m", "not fluxcb") == ["test_a.py::test_a"]


def test_rerun_failed_sets(sample):
    sample.runpytest_subprocess(GOOD[0], *BAD[:2]).assert_outcomes(passed=1, failed=2)
    sample.runpytest_subprocess("--lf").assert_outcomes(failed=2)


def test_disabling_plugin(sample, autoload):
    sample.makepyfile(test_a="def test_a(): pass")
    run(sample, "--no-fluxcb").assert_outcomes(passed=1)
    run(sample, "-p", "no:fluxcb", "-W", "error", "--strict-config").assert_outcomes(passed=1)


def test_several_processes(sample, autoload):
    pytest.importorskip("xdist")
    result = run(sample, "-n", "2", GOOD[0], GOOD[3], *BAD[:3])
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        ["*WarmUp() and Decay() both write `hyperparams.learning_rate` and no order is declared.*"]
    )


def test_reports_contain_findings(sample):
    run(sample, "--junitxml=report.xml", BAD[0], GOOD[0])
    found = {}
    for case in ElementTree.parse(sample.path / "report.xml").iter("testcase"):
        [held] = [p.get("value") for p in case.iter("property") if p.get("name") == "fluxcb"]
        found[case.get("name")] = json.loads(held)
    conflict = found["kit.broken:conflict"]
    assert (conflict["ok"], conflict["level"]) == (False, "graph")
    assert [problem["type"] for problem in conflict["problems"]] == ["ConflictError"]
    assert found["kit.train:callbacks"]["ok"]
    assert found["kit.train:callbacks"]["callbacks"][:3] == ["GradientNorm()", "ClipGradients(1.0)", "Lowest()"]


def test_table_without_sets_is_reported(project):
    (project.path / "pyproject.toml").write_text("[tool.fluxcb]\n")
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "[[]tool.fluxcb] in pyproject.toml declares no callback sets.",
            '  fix:   add e.g. `callbacks = ["pkg.train:callbacks"]`',
        ]
    )


def test_invalid_table_is_reported(project):
    (project.path / "pyproject.toml").write_text('[tool.fluxcb]\ncallback = ["a:b"]\n')
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["`[[]tool.fluxcb]` has no key 'callback'. Did you mean `callbacks`[?]"])


def test_projects_without_table_are_ignored(project):
    (project.path / "pyproject.toml").write_text('[project]\nname = "fluxcb-user"\nversion = "1"\n')
    project.makepyfile("def test_a(): pass")
    run(project).assert_outcomes(passed=1)
