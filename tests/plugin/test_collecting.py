"""Which sets become tests, and how they are chosen."""

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


def test_each_declared_set_is_a_test(sample):
    assert chosen(sample) == GOOD + BAD
    run(sample).assert_outcomes(passed=6, failed=6)


def test_an_id_can_be_run_again(sample):
    run(sample, GOOD[0], BAD[1]).assert_outcomes(passed=1, failed=1)


def test_tests_in_a_folder_are_run_without_them_if_that_folder_is_named(sample):
    sample.makepyfile(**{"tests/test_a": "def test_a(): pass"})
    assert chosen(sample, "tests") == ["tests/test_a.py::test_a"]


@pytest.mark.parametrize("paths", ['["tests"]', '["tests", "."]', '["."]', "[]"])
def test_testpaths_do_not_hide_or_double_them(sample, paths):
    sample.makepyfile(**{"tests/test_a": "def test_a(): pass"})
    file = sample.path / "pyproject.toml"
    file.write_text(file.read_text() + f"\n[tool.pytest.ini_options]\ntestpaths = {paths}\n")
    assert sorted(chosen(sample)) == sorted([*GOOD, *BAD, "tests/test_a.py::test_a"])


def test_a_project_in_a_subfolder(project):
    inner = project.path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["inner_sets:callbacks"]\n')
    (inner / "inner_sets.py").write_text("from fluxcb.callbacks import Recorder\ncallbacks = [Recorder()]\n")
    assert chosen(project, "--rootdir", str(project.path)) == ["inner/pyproject.toml::inner_sets:callbacks"]
    run(project, "--rootdir", str(project.path)).assert_outcomes(passed=1)


def test_choosing_by_name(sample):
    assert chosen(sample, "-k", "make_") == GOOD[1:3]


def test_choosing_by_marker(sample):
    sample.makepyfile(test_a="def test_a(): pass")
    assert chosen(sample, "-m", "fluxcb", "--strict-markers") == GOOD + BAD
    assert chosen(sample, "-m", "not fluxcb") == ["test_a.py::test_a"]


def test_running_the_failed_ones_again(sample):
    sample.runpytest_subprocess(GOOD[0], *BAD[:2]).assert_outcomes(passed=1, failed=2)
    sample.runpytest_subprocess("--lf").assert_outcomes(failed=2)


def test_turning_it_off(sample):
    sample.makepyfile(test_a="def test_a(): pass")
    run(sample, "--no-fluxcb").assert_outcomes(passed=1)
    run(sample, "-p", "no:fluxcb", "-W", "error", "--strict-config").assert_outcomes(passed=1)


def test_several_processes(sample):
    pytest.importorskip("xdist")
    result = run(sample, "-n", "2", GOOD[0], GOOD[3], *BAD[:3])
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        ["*WarmUp() and Decay() both write `hyperparams.learning_rate` and no order is declared.*"]
    )


def test_reports_carry_what_was_found(sample):
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


def test_a_table_without_sets_is_an_error(project):
    (project.path / "pyproject.toml").write_text("[tool.fluxcb]\n")
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "[[]tool.fluxcb] in pyproject.toml declares no callback sets.",
            '  fix:   add e.g. `callbacks = ["pkg.train:callbacks"]`',
        ]
    )


def test_a_wrong_table_is_an_error(project):
    (project.path / "pyproject.toml").write_text('[tool.fluxcb]\ncallback = ["a:b"]\n')
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["`[[]tool.fluxcb]` has no key 'callback'. Did you mean `callbacks`[?]"])


def test_projects_without_a_table_are_left_alone(project):
    (project.path / "pyproject.toml").write_text('[project]\nname = "fluxcb-user"\nversion = "1"\n')
    project.makepyfile("def test_a(): pass")
    run(project).assert_outcomes(passed=1)
