import gc
import io
import re
import weakref

import pytest
from rich.console import Console

from fluxcb import DeclarationError
from fluxcb.logging import ConsoleBackend, Text
from fluxcb.logging.consoles import console_for, print_line

# reference: tensorpack's ScalarPrinter, which prints `{:.5g}`, sorted, the last value of each name
PUTS = [(0, 0, "lr", 0.1), (1, 1, "a", 1), (3, 1, "a", 3), (3, 1, "val/x", 123456.789), (3, 1, "b", 10)]
MORE = [(4, 2, "a", 4), (6, 2, "b", 20)]


def printed(log, *args, **kwargs):
    file = io.StringIO()
    backend = ConsoleBackend(*args, file=file, **kwargs)
    backend.open(resumes=False)
    for epoch, puts in ((1, PUTS), (2, MORE)):
        for put in puts:
            log(backend, put)
            backend.flush()
        backend.end_epoch(epoch)
    backend.close()
    return file.getvalue().splitlines()


def test_a_line_per_epoch(log):
    assert printed(log) == [
        "epoch 0, step 0  lr: 0.1",
        "epoch 1, step 3  a: 3  b: 10  val/x: 1.2346e+05",
        "epoch 2, step 6  a: 4  b: 20",
    ]


def test_a_line_per_step(log):
    file = io.StringIO()
    backend = ConsoleBackend(every_step=True, file=file)
    log(backend, *PUTS, *MORE)
    assert file.getvalue() == ""
    backend.flush()
    assert file.getvalue().splitlines() == [
        "epoch 0, step 0  lr: 0.1",
        "epoch 1, step 1  a: 1",
        "epoch 1, step 3  a: 3  b: 10  val/x: 1.2346e+05",
        "epoch 2, step 4  a: 4",
        "epoch 2, step 6  b: 20",
    ]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["a"], ["val"], ["epoch 1, step 3  a: 3", "epoch 2, step 4  a: 4"]),  # a pattern may be found anywhere
        (["^a$", "^b$"], (), ["epoch 1, step 3  a: 3  b: 10", "epoch 2, step 6  a: 4  b: 20"]),
        ([], (), []),
        (None, ["."], []),
        (None, ["^[ab]$", "val/"], ["epoch 0, step 0  lr: 0.1"]),
    ],
)
def test_patterns_say_what_is_printed(log, include, exclude, expected):
    assert printed(log, include, exclude) == expected


def test_texts_are_printed_as_they_are_and_nan_too(log):
    file = io.StringIO()
    with ConsoleBackend(file=file) as backend:
        backend.log("note", Text("[red]x[/red]"), step=1, epoch=1, seconds=0.0)
        log(backend, (1, 1, "loss", float("nan")))
    assert file.getvalue() == "epoch 1, step 1  loss: nan  note: [red]x[/red]\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"include": "loss"}, "`include` of `ConsoleBackend` takes a list of regular expressions, not 'loss'."),
        ({"exclude": 3}, "`exclude` of `ConsoleBackend` takes a list of regular expressions, not 3."),
        ({"include": ["("]}, "`include` of `ConsoleBackend` has an invalid pattern: missing ), unterminated"),
        ({"exclude": [3]}, "`exclude` of `ConsoleBackend` has an invalid pattern: first argument must be"),
    ],
)
def test_what_are_no_patterns_is_refused(given, message):
    with pytest.raises(DeclarationError, match=re.escape(message)):
        ConsoleBackend(**given)


def test_names_tell_them_apart():
    assert repr(ConsoleBackend()) == "ConsoleBackend()"
    assert repr(ConsoleBackend([], ["x"], every_step=True)) == (
        "ConsoleBackend(include=[], exclude=['x'], every_step=True)"
    )


def test_a_file_has_one_console_while_somebody_holds_it_and_none_is_kept():
    class File(io.StringIO):
        pass

    file = File()
    console = console_for(file)
    assert console_for(file) is console
    held = weakref.ref(file)
    del console, file
    gc.collect()
    assert held() is None


def test_lines_are_printed_as_they_are():
    lines = ["[bold]:smile: x[/]", "a" * 300, "[1, 2] 'text' 10%"]
    file = io.StringIO()
    for line in lines:
        print_line(console_for(file), line)
    assert file.getvalue().splitlines() == lines


def test_a_line_has_its_style_on_terminals_and_no_control_codes_anywhere():
    plain, terminal = io.StringIO(), io.StringIO()
    print_line(console_for(plain), "a\x07\x08b\tc", "bold")
    print_line(Console(file=terminal, force_terminal=True, color_system="standard"), "a\rb", "bold")
    assert (plain.getvalue(), terminal.getvalue()) == ("a\\x07\\x08b\\tc\n", "\x1b[1ma\\rb\x1b[0m\n")


def test_what_is_printed_to_a_file_can_be_recorded_as_rich_does():
    console = Console(file=io.StringIO(), record=True)
    with console.capture() as capture:
        print_line(console, "one line")
    assert capture.get() == "one line\n"
    print_line(console, "another")
    assert "another" in console.export_text()
