"""Loading callback sets by name."""

import sys
from pathlib import Path

import pytest

from fluxcb import DeclarationError
from fluxcb._declare.signatures import shown_path
from fluxcb._tools.targets import load
from fluxcb.callbacks import ClipGradients, Recorder

MODULE = """
from fluxcb.callbacks import ClipGradients, Recorder

items = [Recorder()]
pair = (Recorder(), ClipGradients(1.0))
alone = Recorder()
number = 3
text = "Recorder"


class Sets:
    inner = [Recorder()]


def make(limit=2.0, *rest, **options):
    return [ClipGradients(limit)]


def needs(limit, *, name):
    return []


def returns_nothing():
    pass


def fails():
    raise ValueError("no data here.")
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a function that writes a module with a new name and returns the name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    count = iter(range(100))

    def write(text=MODULE, folder=tmp_path):
        name = f"sets_{tmp_path.name.replace('-', '_')}_{next(count)}"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        return name

    return write


def refusal(name, root):
    with pytest.raises(DeclarationError) as caught:
        load(name, root).get()
    return str(caught.value)


def test_list_target(project, tmp_path):
    target = load(f"{project()}:items", tmp_path)
    [recorder] = target.get()
    assert type(recorder) is Recorder
    assert not target.makes
    assert target.get()[0] is recorder


def test_iterable_becomes_list(project, tmp_path):
    assert [type(c) for c in load(f"{project()}:pair", tmp_path).get()] == [Recorder, ClipGradients]


def test_dotted_name(project, tmp_path):
    assert len(load(f"{project()}:Sets.inner", tmp_path).get()) == 1


def test_function_creates_new_callbacks(project, tmp_path):
    target = load(f"{project()}:make", tmp_path)
    assert target.makes
    assert target.get()[0] is not target.get()[0]


def test_src_folder_is_searched(project, tmp_path):
    assert load(f"{project(folder=tmp_path / 'src')}:items", tmp_path).get()


def test_learners_and_functions_that_return_learners(project, tmp_path):
    name = project("from fluxcb.testing import testlearner\nlearner = testlearner()\n")
    learner = load(f"{name}:learner", tmp_path).get()
    assert learner is sys.modules[name].learner
    assert type(load(f"{name}:testlearner", tmp_path).get()) is type(learner)


@pytest.mark.parametrize("name", ["train", "train:", ":callbacks", ""])
def test_invalid_names_raise(name, tmp_path):
    assert refusal(name, tmp_path) == (
        f"{name!r} does not name a callback set.\n  fix:   write `module:name`, e.g. `pkg.train:callbacks`"
    )


def test_suggestion_for_a_module_is_its_declared_set(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["pkg.train:make_learner"]\n')
    assert refusal("pkg.train", tmp_path) == (
        "'pkg.train' does not name a callback set.\n  fix:   write `pkg.train:make_learner`"
    )


def test_suggestion_for_a_dot_in_place_of_the_colon_is_not_what_was_written(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["pkg.train.callbacks"]\n')
    assert refusal("pkg.train.callbacks", tmp_path) == (
        "'pkg.train.callbacks' does not name a callback set.\n  fix:   write `pkg.train:callbacks`"
    )


def test_missing_name_raises_with_suggestion(project, tmp_path):
    name = project()
    assert refusal(f"{name}:item", tmp_path) == f"`{name}` has no `item`. Did you mean `items`?\n  where: {name}.py"
    assert refusal(f"{name}:Sets.iner", tmp_path) == (
        f"`{name}:Sets` has no `iner`. Did you mean `inner`?\n  where: {name}.py"
    )


def test_suggestion_for_a_missing_name_can_be_a_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(tmp_path, "one_set.py").write_text("from fluxcb.events import HostEvent\nimport pathlib\n")
    assert refusal("one_set:nonexistent", tmp_path) == "`one_set` has no `nonexistent`.\n  where: one_set.py"
    assert refusal("one_set:pathlip", tmp_path) == "`one_set` has no `pathlip`.\n  where: one_set.py"


def test_missing_module_raises(tmp_path):
    assert refusal("no_such_thing.at_all:x", tmp_path) == (
        "`no_such_thing.at_all` cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'.\n"
        "  fix:   install the package that provides `no_such_thing`, or correct the name; fluxcb also searches "
        "the project's root"
    )


@pytest.mark.parametrize("folder", ["", "src"], ids=["root", "src"])
@pytest.mark.parametrize("name", ["near_kit.trian", "naer_kit.train", "near_kit/train.py"])
def test_misspelled_module_raises_with_suggestion(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / folder / "near_kit"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text("callbacks = []")
    assert refusal(f"{name}:callbacks", tmp_path) == (
        f"There is no module `{name}`. Did you mean `near_kit.train`?\n"
        f"  where: {shown_path(str(tmp_path))}\n"
        "  fix:   write `near_kit.train:callbacks`"
    )
    sys.modules.pop("near_kit", None)


def test_error_inside_module_is_reported_with_location(project, tmp_path):
    name = project("x = 1\n\nraise RuntimeError('the data are gone')\n")
    assert refusal(f"{name}:x", tmp_path) == (
        f"`{name}` cannot be imported: RuntimeError: the data are gone.\n  where: <module>  {name}.py:3"
    )


def test_module_with_syntax_error_raises(project, tmp_path):
    name = project("x = 1\ny = = 2\n")
    assert refusal(f"{name}:x", tmp_path).splitlines() == [
        f"`{name}` cannot be imported: SyntaxError: invalid syntax ({name}.py, line 2).",
        f"  where: {name}.py:2",
    ]


def test_script_that_exits_raises(project, tmp_path):
    name = project("import sys\nsys.exit(3)\n")
    assert refusal(f"{name}:x", tmp_path) == (
        f"`{name}` cannot be imported: SystemExit: 3.\n  where: <module>  {name}.py:2"
    )


def test_function_with_required_arguments_raises(project, tmp_path):
    name = project()
    line = MODULE.splitlines().index("def needs(limit, *, name):") + 1
    assert refusal(f"{name}:needs", tmp_path) == (
        f"`{name}:needs` needs arguments: limit, name.\n"
        f"  where: {name}.py:{line}\n"
        "  why:   fluxcb calls it without arguments when it checks the set\n"
        "  fix:   declare a function without required arguments that calls it"
    )


def test_failing_function_raises(project, tmp_path):
    name = project()
    line = MODULE.splitlines().index('    raise ValueError("no data here.")') + 1
    assert refusal(f"{name}:fails", tmp_path) == (
        f"`{name}:fails` cannot be called: ValueError: no data here.\n  where: fails  {name}.py:{line}"
    )


@pytest.mark.parametrize(
    ("attribute", "shown"),
    [("number", "3"), ("text", "'Recorder'"), ("returns_nothing", "None"), ("Sets", "the class Sets")],
)
def test_other_objects_raise(project, tmp_path, attribute, shown):
    name = project()
    assert refusal(f"{name}:{attribute}", tmp_path) == (
        f"`{name}:{attribute}` is {shown}, which is not a callback set.\n"
        "  fix:   name a list of callbacks, a Learner, or a function without required arguments that returns one"
    )


@pytest.mark.parametrize(("attribute", "shown"), [("alone", "Recorder()"), ("Recorder", "the class Recorder")])
def test_single_callback_raises(project, tmp_path, attribute, shown):
    name = project()
    assert refusal(f"{name}:{attribute}", tmp_path) == (
        f"`{name}:{attribute}` is {shown}, which is not a callback set.\n  fix:   put it into a list: `callbacks = "
        "[...]`"
    )


def test_import_error_ending_in_question_mark_has_no_period(tmp_path):
    (tmp_path / "asking.py").write_text('raise ValueError("no `w`. Did you mean `ww`?")\n')
    with pytest.raises(DeclarationError) as caught:
        load("asking:callbacks", tmp_path)
    assert caught.value.what == "`asking` cannot be imported: ValueError: no `w`. Did you mean `ww`?"


TRAINS = """
from fluxcb.callbacks import Metrics
from fluxcb.testing import testlearner

learner = testlearner(Metrics())
{}learner.fit(1)
"""


def test_module_that_trains_when_it_is_imported_is_an_error_whose_fix_works(project, tmp_path):
    name = project(TRAINS.format(""))
    with pytest.raises(DeclarationError) as raised:
        load(f"{name}:learner", tmp_path)
    assert str(raised.value) == (
        f"`{name}` calls `fit` when it is imported.\n"
        f"  where: <module>  {name}.py:6\n"
        "  why:   the commands of fluxcb and its pytest plugin import the module of a set, and would train each time\n"
        '  fix:   put the call under `if __name__ == "__main__":`'
    )
    name = project(TRAINS.format('if __name__ == "__main__":\n    '))
    learner = load(f"{name}:learner", tmp_path).get()
    assert learner.step == 0
    learner.fit(1)  # after the import, any code may train
    assert learner.step > 0


def test_population_that_trains_when_its_module_is_imported_is_an_error(project, tmp_path):
    text = """
import fluxcb, optax
from fluxcb.testing import testlearner

population = fluxcb.Population(lambda seed: testlearner(key=seed), seed=[0, 1])
population.fit(1)
"""
    name = project(text)
    with pytest.raises(DeclarationError, match="calls `fit` when it is imported"):
        load(f"{name}:population", tmp_path)
