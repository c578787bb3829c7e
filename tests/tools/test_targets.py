"""Callback sets by name."""

import sys

import pytest

from fluxcb import DeclarationError
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
    """Return a function that writes a module of a fresh name and returns that name."""
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


def test_a_list(project, tmp_path):
    target = load(f"{project()}:items", tmp_path)
    [recorder] = target.get()
    assert type(recorder) is Recorder
    assert not target.makes
    assert target.get()[0] is recorder


def test_any_iterable_becomes_a_list(project, tmp_path):
    assert [type(c) for c in load(f"{project()}:pair", tmp_path).get()] == [Recorder, ClipGradients]


def test_a_dotted_name(project, tmp_path):
    assert len(load(f"{project()}:Sets.inner", tmp_path).get()) == 1


def test_a_function_makes_new_ones(project, tmp_path):
    target = load(f"{project()}:make", tmp_path)
    assert target.makes
    assert target.get()[0] is not target.get()[0]


def test_a_source_folder_is_looked_in(project, tmp_path):
    assert load(f"{project(folder=tmp_path / 'src')}:items", tmp_path).get()


def test_learners_and_functions_that_return_one(project, tmp_path):
    name = project("from fluxcb.testing import testlearner\nlearner = testlearner()\n")
    learner = load(f"{name}:learner", tmp_path).get()
    assert learner is sys.modules[name].learner
    assert type(load(f"{name}:testlearner", tmp_path).get()) is type(learner)


@pytest.mark.parametrize("name", ["train", "train:", ":callbacks", ""])
def test_names_that_are_none(name, tmp_path):
    assert refusal(name, tmp_path) == (
        f"{name!r} does not name a callback set.\n  fix:   write `module:name`, e.g. `pkg.train:callbacks`"
    )


def test_a_missing_name(project, tmp_path):
    name = project()
    assert refusal(f"{name}:item", tmp_path) == f"`{name}` has no `item`. Did you mean `items`?\n  where: {name}.py"
    assert refusal(f"{name}:Sets.iner", tmp_path) == (
        f"`{name}:Sets` has no `iner`. Did you mean `inner`?\n  where: {name}.py"
    )


def test_a_module_that_is_not_there(tmp_path):
    assert refusal("no_such_thing.at_all:x", tmp_path) == (
        "`no_such_thing.at_all` cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'.\n"
        "  fix:   install what provides `no_such_thing`, or correct the name; the project's root is looked in, "
        "too"
    )


def test_an_error_inside_a_module_is_told_with_its_place(project, tmp_path):
    name = project("x = 1\n\nraise RuntimeError('the data are gone')\n")
    assert refusal(f"{name}:x", tmp_path) == (
        f"`{name}` cannot be imported: RuntimeError: the data are gone.\n  where: <module>  {name}.py:3"
    )


def test_a_module_that_is_no_python(project, tmp_path):
    name = project("x = 1\ny = = 2\n")
    assert refusal(f"{name}:x", tmp_path).splitlines() == [
        f"`{name}` cannot be imported: SyntaxError: invalid syntax ({name}.py, line 2).",
        f"  where: {name}.py:2",
    ]


def test_a_script_that_exits(project, tmp_path):
    name = project("import sys\nsys.exit(3)\n")
    assert refusal(f"{name}:x", tmp_path) == (
        f"`{name}` cannot be imported: SystemExit: 3.\n  where: <module>  {name}.py:2"
    )


def test_a_function_that_needs_arguments(project, tmp_path):
    name = project()
    line = MODULE.splitlines().index("def needs(limit, *, name):") + 1
    assert refusal(f"{name}:needs", tmp_path) == (
        f"`{name}:needs` needs arguments: limit, name.\n"
        f"  where: {name}.py:{line}\n"
        "  why:   nobody is there to give them when the set is checked\n"
        "  fix:   declare a function without required arguments that calls it"
    )


def test_a_function_that_fails(project, tmp_path):
    name = project()
    line = MODULE.splitlines().index('    raise ValueError("no data here.")') + 1
    assert refusal(f"{name}:fails", tmp_path) == (
        f"`{name}:fails` cannot be called: ValueError: no data here.\n  where: fails  {name}.py:{line}"
    )


@pytest.mark.parametrize(
    ("attribute", "shown"),
    [("number", "3"), ("text", "'Recorder'"), ("returns_nothing", "None"), ("Sets", "the class Sets")],
)
def test_something_else(project, tmp_path, attribute, shown):
    name = project()
    assert refusal(f"{name}:{attribute}", tmp_path) == (
        f"`{name}:{attribute}` is {shown}, which is no callback set.\n"
        "  fix:   name a list of callbacks, a Learner, or a function without required arguments that returns one"
    )


@pytest.mark.parametrize(("attribute", "shown"), [("alone", "Recorder()"), ("Recorder", "the class Recorder")])
def test_a_callback_alone(project, tmp_path, attribute, shown):
    name = project()
    assert refusal(f"{name}:{attribute}", tmp_path) == (
        f"`{name}:{attribute}` is {shown}, which is no callback set.\n  fix:   put it into a list: `callbacks = [...]`"
    )
