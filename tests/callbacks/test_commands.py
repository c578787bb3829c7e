"""SendStat and SendMonitorData: what they send and when, and that a value or a failure cannot harm the training."""

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from fluxcb import Append, Callback, DeclarationError, MissingStateError, every, on
from fluxcb.callbacks import Monitors, SendMonitorData, SendStat
from fluxcb.events import StepEnd, Trigger
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Puts(Callback):
    """Puts values: those of a step at its end, those of an epoch at its Trigger."""

    def __init__(self, steps=None, epochs=None):
        self.steps, self.epochs = steps or {}, epochs or {}

    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    def put(self, learner, values):
        for name, value in values.items():
            put = learner.cbstate.monitors.put_text if isinstance(value, str) else learner.cbstate.monitors.put_scalar
            put(name, value)

    @on
    def step(self, event: StepEnd, phase: TrainingPhase, learner):
        self.put(learner, self.steps.get(learner.progress.step, {}))

    @on
    def epoch(self, event: Trigger, phase: TrainingPhase, learner):
        self.put(learner, self.epochs.get(learner.progress.epoch, {}))


def warned(learner, epochs=1):
    """Train, and return what was warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(epochs)
    return [str(warning.message) for warning in caught]


def said(command, names, values, **kwargs):
    """Run a command once, and return the warnings."""
    return warned(testlearner(SendStat(command, names, **kwargs), Puts(epochs={1: values}), Monitors()))


# --- SendStat -------------------------------------------------------------------------------------------------------

TOLD = [sys.executable, "-c", "import sys; print(sys.argv[1:], file=open('told', 'a'))"]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that returns what commands were given."""
    monkeypatch.chdir(tmp_path)
    return lambda: (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []


def test_the_latest_values_are_sent_after_each_epoch(told):
    send = SendStat([*TOLD, "loss {loss:.2f}", "{loss}", "{{{val/acc.1}}}"], ["loss", "val/acc.1"])
    values = {1: {"loss": 1 / 3, "val/acc.1": 0.5}, 2: {"loss": 0.25}}
    learner = testlearner(send, Puts(epochs=values), Monitors())
    assert warned(learner, 2) == []
    # names with dots and slashes are names; what did not change is sent again
    assert told() == ["['loss 0.33', '0.3333333333333333', '{0.5}']", "['loss 0.25', '0.25', '{0.5}']"]


def test_a_period_sends_within_epochs(told):
    send = every(SendStat([*TOLD, "{loss}"], "loss"), steps=3)
    testlearner(send, Puts({n: {"loss": n} for n in range(1, 9)}), Monitors()).fit(2)
    assert told() == ["['3.0']", "['6.0']"]


HOSTILE = [
    "; touch owned",
    "$(touch owned)",
    "`touch owned`",
    "' ; touch owned; '",
    '" ; touch owned; "',
    "a\nb  c *",
    "-x",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_value_is_always_a_single_argument(text, told, tmp_path):
    assert said([*TOLD, "{text}", "x={text}"], "text", {"text": text}) == []
    assert told() == [str([text, f"x={text}"])]
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "script", ["{text}", '"{text}"', "$(echo {text} >&2) {text}", "`echo {text} >&2` {text} # {text}"]
)
def test_a_shell_does_not_run_values_as_commands(script, text, told, tmp_path):
    program = f"{sys.executable} -c \"import sys; print(sys.argv[1:], file=open('told', 'a'))\" "
    assert said(program + script, "text", {"text": text}, shell=True) == []
    assert told() == [str([text])]
    assert not (tmp_path / "owned").exists()


def test_a_here_document_does_not_run_values_as_commands(told, tmp_path):
    assert said("cat > told <<END\n{text}\nEND", "text", {"text": "$(touch owned)\nEND\ntouch owned"}, shell=True) == []
    assert not (tmp_path / "owned").exists()


RUNS_CODE = [
    ["sh", "-c", "echo {text}"],
    ["/bin/bash", "-ec", "echo 'x' \"{text}\""],
    ["env", "A=1", "sh", "-c", "echo {text}"],
    [sys.executable, "-c", "print('{text}')"],
    ["ssh", "host", "echo {text}"],
    ["awk", "BEGIN {{ print {text} }}"],
    'sh -c "echo {text}"',
    "bash -lc {text}",
    "eval echo {text}",
    'true; eval "echo {text}"',
    "if true; then eval {text}; fi",
    "echo $(( {text} ))",
    "x=$(eval {text})",
    "[[ {text} -eq 0 ]]",
    "bash -c 'echo $(( '{text}' ))'",
    "trap {text} EXIT",
    "echo {text} | xargs -I@ sh -c {text}",
    "python3 -c {text}",
    '"$SHELL" -c {text}',
]


@pytest.mark.parametrize("command", RUNS_CODE, ids=str)
@pytest.mark.parametrize("text", ["$(touch owned)", "touch owned", "a[$(touch owned)]", "'); open('owned', 'w')#"])
def test_a_text_is_not_passed_to_a_command_that_would_run_it(command, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    send = SendStat(command, "text", shell=isinstance(command, str))
    monitors = {"text": text}
    monkeypatch.setattr("fluxcb.callbacks.logging.send_stat.latest_of", lambda *_: (monitors, ""))
    with pytest.warns(UserWarning, match="did not run the command") as caught:
        send.send(None, None, SimpleNamespace(cbstate=SimpleNamespace(monitors=monitors)))
    assert [str(warning.message) for warning in caught] == [
        "SendStat(text): did not run the command: `text` is a text, and the command would run it as code."
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_number_is_passed_to_a_command_that_runs_it(told):
    assert said('eval "echo {n:.0f} > told"', "n", {"n": 4}, shell=True) == []
    assert told() == ["4"]


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", 'printf %s "$1" > told', "sh", "{text}"],
        ["notify-send", "-e", "let us see: {text}"],
        ["cp", "-c", "{text}", "run.sh"],
        "echo {text} >> eval.txt",
        "./notify.sh {text}",
        f"{sys.executable} -c 'print(1)' {{text}}",
    ],
    ids=str,
)
def test_a_text_is_passed_to_other_commands(command):
    send = SendStat(command, "text", shell=isinstance(command, str))
    assert send.command.text_run_as_code({"text": "$(touch owned)"}) is None


def test_a_positional_argument_of_a_nested_shell_is_not_run(told, tmp_path):
    command = ["sh", "-c", 'printf %s "$1" > told', "sh", "{text}"]
    assert said(command, "text", {"text": "$(touch owned)"}) == []
    assert (told(), (tmp_path / "owned").exists()) == (["$(touch owned)"], False)


@pytest.mark.parametrize("shell", [False, True])
def test_a_warning_shows_no_argument(shell):
    command = "false --token SECRET {a}" if shell else ["false", "--token", "SECRET", "{a}"]
    program = "/bin/sh" if shell else "false"
    assert said(command, "a", {"a": 1.0}, shell=shell) == [
        f"SendStat(a): `{program}`: the command ended with exit code 1, without output."
    ]


def test_a_shell_command_can_use_pipes(told):
    assert said("echo {loss:.1f} | tr . , > told", "loss", {"loss": 2.5}, shell=True) == []
    assert told() == ["2,5"]


def test_a_missing_statistic_warns_once_and_training_continues(told):
    learner = testlearner(SendStat([*TOLD, "{los}"], "los"), Puts(epochs={1: {"loss": 1.0}, 3: {"los": 2}}), Monitors())
    assert warned(learner, 3) == [
        "SendStat(los): did not run the command: no value has been logged under `los`. Did you mean `loss`?"
    ]
    assert learner.step == 12
    assert told() == ["['2.0']"]


def test_a_statistic_that_is_neither_number_nor_text():
    class PutsImage(Puts):
        def put(self, learner, values):
            learner.cbstate.monitors.put_image("image", [[0.0]])

    learner = testlearner(SendStat(["true", "{image}"], "image"), PutsImage(), Monitors())
    assert warned(learner) == [
        "SendStat(image): did not run the command: `image` is a `Image`, and only numbers and texts can be sent."
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["no-such-program", "{a}"],
            "`no-such-program`: the command could not be started: [Errno 2] No such file or directory: "
            "'no-such-program'.",
        ),
        (
            ["sh", "-c", "echo oh no; exit 3", "{a}"],
            "`sh`: the command ended with exit code 3, with the output: oh no.",
        ),
        (["sh", "-c", "exit 4", "{a}"], "`sh`: the command ended with exit code 4, without output."),
        (
            ["sh", "-c", "printf '\\033[2Jx' >&2; false", "{a}"],
            "`sh`: the command ended with exit code 1, with the output: ?[2Jx.",
        ),
    ],
)
def test_a_failing_command_warns_once_and_training_continues(command, expected):
    learner = testlearner(SendStat(command, "a"), Puts(epochs={1: {"a": 1.0}}), Monitors())
    assert warned(learner, 3) == [f"SendStat(a): {expected}"]
    assert learner.step == 12


def test_a_value_that_cannot_be_an_argument():
    assert said(["true", "{a}"], "a", {"a": "\0"}) == [
        "SendStat(a): `true`: the command could not be started: embedded null byte."
    ]


def test_a_hanging_command_is_killed_with_its_child_processes(tmp_path, monkeypatch):
    # The child in the background holds the output open, and would outlive a shell that is killed alone.
    script = (
        f"echo begun; (sleep 3600; echo {{a}}) & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/child; wait"
    )
    wait = subprocess.Popen.wait

    def time_out(process, timeout=None):
        """Let the time limit pass when the command hangs."""
        while timeout is not None and not (tmp_path / "child").exists():
            time.sleep(0.001)
        return wait(process, 0 if timeout is not None else None)

    monkeypatch.setattr(subprocess.Popen, "wait", time_out)
    assert said(script, "a", {"a": 1}, shell=True, timeout=0.3) == [
        "SendStat(a): `/bin/sh`: the command was killed after 0.3 s, with the output: begun."
    ]
    child = int((tmp_path / "child").read_text())
    while _runs(child):  # until its new parent has reaped it
        time.sleep(0.001)


def _runs(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_training_does_not_wait_for_background_processes(tmp_path):
    script = f"(while [ ! -e {tmp_path}/end ]; do sleep 0.01; done) & echo {{a}}"
    assert said(script, "a", {"a": 1}, shell=True, timeout=3600) == []
    (tmp_path / "end").touch()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            ("notify-send 'loss {loss}'", "loss"),
            {},
            "The command of `SendStat` must be a list of arguments, not the string \"notify-send 'loss {loss}'\".\n"
            "  why:   a value that contains a space or a semicolon would become several arguments or another command\n"
            "  fix:   write `['notify-send', 'loss {loss}']`\n"
            "     or: pass `shell=True` to run the string in a shell",
        ),
        (
            (["echo", 1], "loss"),
            {},
            "The command of `SendStat` must be a list of arguments that begins with the program, not ['echo', 1].\n"
            '  fix:   write e.g. `["notify-send", "loss {loss:.3f}"]`',
        ),
        (
            (["echo", "{loss}"], "loss"),
            {"shell": True},
            "With `shell=True`, the command of `SendStat` must be a string, not ['echo', '{loss}'].\n"
            '  fix:   write e.g. `"echo {loss} >> losses.txt"`',
        ),
        (
            (["echo", "{los}"], "loss"),
            {},
            "The placeholder `{los}` in the command of `SendStat` is not in `names`. Did you mean `loss`?\n"
            "  where: echo '{los}'\n"
            "  why:   `names` contains 'loss'\n"
            "  fix:   add the missing name: `['loss', 'los']`\n"
            "     or: write `{{` and `}}` for literal braces",
        ),
        (
            (["echo", "{loss}"], ["loss", "accuracy"]),
            {},
            "The command of `SendStat` does not use the statistic 'accuracy'.\n"
            "  where: echo '{loss}'\n"
            "  fix:   write `{accuracy}` in the command\n"
            "     or: remove 'accuracy' from the names",
        ),
        (
            (["echo", "{loss:.3q}"], "loss"),
            {},
            "`{loss:.3q}` in the command of `SendStat` has an invalid format for a number: '.3q'.\n"
            "  where: echo '{loss:.3q}'\n"
            "  fix:   write e.g. `{loss:.3f}`",
        ),
        (
            (["echo", "{loss} }"], "loss"),
            {},
            "The command of `SendStat` has an unmatched `}`.\n  where: echo '{loss} }'\n"
            "  fix:   write `}}` for a literal brace",
        ),
        (
            ("echo 'loss: {loss}'", "loss"),
            {"shell": True},
            "`{loss}` is inside single quotes in the command of `SendStat`.\n"
            "  where: echo 'loss: {loss}'\n"
            "  why:   the shell does not expand variables inside single quotes\n"
            "  fix:   remove the quotes, because each value is a single argument anyway\n"
            "     or: use double quotes",
        ),
        (
            (["echo"], []),
            {},
            "`names` of `SendStat` must be the names of logged values, not [].\n"
            '  fix:   write e.g. `["validation/loss", "accuracy"]`',
        ),
        (
            (["echo", "{a}"], ["a", "a"]),
            {},
            "`names` of `SendStat` contains 'a' twice.\n  fix:   name it once",
        ),
        (
            (["echo", "{a}"], "a"),
            {"timeout": 0},
            "`timeout` of `SendStat` (seconds) must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
    ],
)
def test_send_stat_rejects_invalid_arguments(arguments, options, text, refused):
    with refused(DeclarationError, text):
        SendStat(*arguments, **options)


def test_sending_requires_monitors():
    with pytest.raises(MissingStateError, match=r"add `Monitors\(\)`"):
        testlearner(SendStat(["true", "{a}"], "a"))


# --- SendMonitorData ------------------------------------------------------------------------------------------------


# Measured on tensorpack: at steps 2, 5 and 6 all names have come anew.
def puts():
    return Puts({1: {"a": 1}, 2: {"b": 2}, 3: {"a": 3}, 5: {"b": 5}, 6: {"a": 6, "b": 7}}, {1: {"c": 4}})


RECORDS = [{"step": 2, "a": 1.0, "b": 2.0}, {"step": 5, "a": 3.0, "b": 5.0}, {"step": 6, "a": 6.0, "b": 7.0}]


def sender_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "fluxcb-outbox"]


@pytest.mark.parametrize("names", [["a", "b"], ("b", "a")], ids=["list", "tuple"])
@pytest.mark.parametrize("seconds", [1e9, 1e-9], ids=["at-the-end", "at-each-step"])
def test_a_record_is_sent_when_all_names_have_new_values(names, seconds, monkeypatch):
    monkeypatch.setattr("fluxcb._declare.schedules.EverySeconds.for_handler", lambda self: type(self)(seconds))
    records = []
    learner = testlearner(SendMonitorData(records.append, names), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == []
    assert records == RECORDS
    assert sender_threads() == []


def test_a_value_logged_just_before_the_fit_stops_is_sent():
    class Fails(Callback):
        @on
        def fail(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 2:
                raise RuntimeError("no")

    records = []
    learner = testlearner(puts(), SendMonitorData(records.append, ["a", "b"]), Monitors(), Fails(), steps_per_call=1)
    with pytest.raises(RuntimeError):
        learner.fit(1)
    assert records == RECORDS[:1]


def test_a_resumed_run_does_not_send_records_again():
    records = []
    first = testlearner(SendMonitorData(records.append, ["a", "b"]), puts(), Monitors(), batches=3)
    first.fit(1)
    again = testlearner(SendMonitorData(records.append, ["a", "b"]), puts(), Monitors(), batches=3)
    again.state = first.state
    for old, new in zip(first.callbacks, again.callbacks, strict=True):
        new.load_state_dict(old.state_dict())
    again.fit(1)
    assert records == RECORDS


@pytest.fixture
def server():
    """A server on this machine; its list `got` has what was posted, `answer` the status of its answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.server.answers.wait()
            self.send_response(self.server.answer)
            if self.server.answer == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - its name

        def log_message(self, *_):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.got, found.answer, found.answers = [], 200, threading.Event()
    found.answers.set()
    found.url = f"http://127.0.0.1:{found.server_port}/losses?run=1"
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.answers.set()
    found.shutdown()
    thread.join()
    found.server_close()


def test_records_are_posted_as_json(server):
    learner = testlearner(SendMonitorData(server.url, ["a", "b"]), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == []
    assert server.got == [("/losses?run=1", "application/json", record) for record in RECORDS]


def test_non_finite_values_are_valid_json(server):
    values = Puts({1: {"a": float("nan")}, 2: {"a": float("inf")}, 3: {"a": -float("inf")}})
    testlearner(SendMonitorData(server.url, "a"), values, Monitors()).fit(1)
    assert [body["a"] for _, _, body in server.got] == ["NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize(("answer", "reason"), [(500, "Internal Server Error"), (404, "Not Found"), (302, "Found")])
def test_an_error_response_warns_once(server, answer, reason):
    server.answer = answer
    learner = testlearner(SendMonitorData(server.url, ["a", "b"]), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == [
        f"SendMonitorData(127.0.0.1, a, b): ConnectionError: the server responded with {answer} {reason}"
    ]
    assert len(server.got) == 3  # it is tried again; a redirect is not followed
    assert learner.step == 6


def test_an_unreachable_server_warns_once():
    with socket.socket() as bound:  # without `listen`, so connections are refused; no other program can get the port
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/losses"
        learner = testlearner(SendMonitorData(url, ["a", "b"], timeout=3600), puts(), Monitors(), batches=3)
        (text,) = warned(learner, 2)
    assert text.startswith("SendMonitorData(127.0.0.1, a, b): ConnectionError: cannot reach the server: [Errno ")


def test_the_next_epoch_does_not_wait_for_a_slow_server(server):
    server.answers.clear()

    class Answers(Callback):
        """Lets the server answer at the end of the second epoch."""

        @on
        def answer(self, event: Trigger, phase: TrainingPhase, learner):
            if learner.progress.epoch == 2:
                server.answers.set()

    # With a limit of an hour, a fit that waited for the server would not end.
    learner = testlearner(Answers(), SendMonitorData(server.url, "a", timeout=3600), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == []
    assert len(server.got) == 3
    assert sender_threads() == []


def test_the_end_of_a_fit_does_not_wait_for_an_unresponsive_server(server):
    server.answers.clear()
    learner = testlearner(SendMonitorData(server.url, "a", timeout=0.3), puts(), Monitors(), batches=3)
    texts = warned(learner, 2)
    assert texts
    assert all(re.search("timed out|dropped|longer than the timeout", text) for text in texts)
    server.answers.set()
    while sender_threads():
        time.sleep(0.001)


def test_a_failing_function_warns_once():
    def send(record):
        raise ValueError("no such channel")

    learner = testlearner(SendMonitorData(send, ["a", "b"]), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == ["SendMonitorData(send, a, b): ValueError: no such channel"]


def test_a_hanging_function_does_not_block_the_training():
    go_on = threading.Event()
    learner = testlearner(SendMonitorData(lambda record: go_on.wait(), "a", timeout=0.1), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == [
        "SendMonitorData(<lambda>, a): sending a record took longer than the timeout of 0.1 s",
        "SendMonitorData(<lambda>, a): some records were dropped, because the fit ended before they were sent",
    ]
    go_on.set()
    while sender_threads():
        time.sleep(0.001)


def test_a_text_cannot_be_sent():
    learner = testlearner(SendMonitorData(print, "note"), Puts(epochs={1: {"note": "x"}}), Monitors())
    assert warned(learner) == ["SendMonitorData(print, note): `note` is a `Text`, and only numbers can be sent."]


def test_a_statistic_that_is_never_logged_warns():
    learner = testlearner(SendMonitorData(print, ["a", "bb"]), puts(), Monitors())
    assert warned(learner, 2) == [
        "SendMonitorData(print, a, bb): sent no data: no value has been logged under `bb`. Did you mean `b`?"
    ]


def test_the_url_is_never_shown():
    assert (
        repr(SendMonitorData("https://chat.example/hooks/SECRET?token=SECRET", "a"))
        == "SendMonitorData(chat.example, a)"
    )


@pytest.mark.parametrize(
    "to", ["example.org", "file:///etc/passwd", "ftp://example.org", "http://", "http://a:b/", None, 3]
)
def test_send_monitor_data_rejects_invalid_destinations(to, refused):
    text = (
        f"`SendMonitorData` sends to a URL or a function, not {to!r}.\n"
        '  fix:   write e.g. `"https://example.org/losses"`\n'
        "     or: pass a function that takes the record, e.g. `print`"
    )
    with refused(DeclarationError, text):
        SendMonitorData(to, "loss")


def test_send_monitor_data_rejects_other_invalid_arguments(refused):
    with refused(
        DeclarationError,
        "`timeout` of `SendMonitorData` (seconds) must be a number above 0, not inf.\n"
        "  fix:   give a finite number above 0",
    ):
        SendMonitorData(print, "a", timeout=float("inf"))
    text = (
        "`names` of `SendMonitorData` must be the names of logged values, not 3.\n"
        '  fix:   write e.g. `["validation/loss", "accuracy"]`'
    )
    with refused(DeclarationError, text):
        SendMonitorData(print, 3)


def test_many_fits_do_not_leak_threads(told):
    def held():
        return threading.active_count(), sorted(os.listdir("/proc/self/fd"))

    learner = testlearner(SendStat(["true", "{a}"], "a"), SendMonitorData(lambda record: None, "a"), puts(), Monitors())
    learner.fit(1)
    before = held()
    for _ in range(5):
        learner.fit(1)
    assert held() == before
