"""SendStat and SendMonitorData: what is sent when, that no value is a command, and that nothing stops the training."""

import http.server
import json
import os
import sys
import threading
import time
import warnings

import pytest

from fluxcb import Append, Callback, DeclarationError, MissingStateError, every, on
from fluxcb.callbacks import Monitors, SendMonitorData, SendStat
from fluxcb.events import FitEnd, StepEnd, Trigger
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
def test_a_value_is_one_argument_whatever_it_is(text, told, tmp_path):
    assert said([*TOLD, "{text}", "x={text}"], "text", {"text": text}) == []
    assert told() == [str([text, f"x={text}"])]
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "script", ["{text}", '"{text}"', "$(echo {text} >&2) {text}", "`echo {text} >&2` {text} # {text}"]
)
def test_no_value_is_a_command_of_a_shell(script, text, told, tmp_path):
    program = f"{sys.executable} -c \"import sys; print(sys.argv[1:], file=open('told', 'a'))\" "
    assert said(program + script, "text", {"text": text}, shell=True) == []
    assert told() == [str([text])]
    assert not (tmp_path / "owned").exists()


def test_a_here_document_is_no_place_for_commands_either(told, tmp_path):
    assert said("cat > told <<END\n{text}\nEND", "text", {"text": "$(touch owned)\nEND\ntouch owned"}, shell=True) == []
    assert not (tmp_path / "owned").exists()


def test_a_shell_has_pipes(told):
    assert said("echo {loss:.1f} | tr . , > told", "loss", {"loss": 2.5}, shell=True) == []
    assert told() == ["2,5"]


def test_a_missing_statistic_is_told_once_and_training_goes_on(told):
    learner = testlearner(SendStat([*TOLD, "{los}"], "los"), Puts(epochs={1: {"loss": 1.0}, 3: {"los": 2}}), Monitors())
    assert warned(learner, 3) == [
        "SendStat(los): nothing is sent: nothing was put under `los` yet. Did you mean `loss`?"
    ]
    assert learner.step == 12
    assert told() == ["['2.0']"]


def test_a_statistic_that_is_neither_number_nor_text():
    class PutsImage(Puts):
        def put(self, learner, values):
            learner.cbstate.monitors.put_image("image", [[0.0]])

    learner = testlearner(SendStat(["true", "{image}"], "image"), PutsImage(), Monitors())
    assert warned(learner) == [
        "SendStat(image): nothing is sent: `image` is of the kind Image, and only numbers and texts can be sent."
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["no-such-program", "{a}"],
            "`no-such-program '{a}'`: it could not be started: [Errno 2] No such file or directory: 'no-such-program'.",
        ),
        (
            ["sh", "-c", "echo oh no; exit 3", "{a}"],
            "`sh -c 'echo oh no; exit 3' '{a}'`: it ended with exit code 3, and said: oh no.",
        ),
        (["sh", "-c", "exit 4", "{a}"], "`sh -c 'exit 4' '{a}'`: it ended with exit code 4, and said nothing."),
        (
            ["sh", "-c", "printf '\\033[2Jx' >&2; false", "{a}"],
            "`sh -c 'printf '\"'\"'\\033[2Jx'\"'\"' >&2; false' '{a}'`: it ended with exit code 1, and said: ?[2Jx.",
        ),
    ],
)
def test_a_command_that_fails_is_told_once_and_training_goes_on(command, expected):
    learner = testlearner(SendStat(command, "a"), Puts(epochs={1: {"a": 1.0}}), Monitors())
    assert warned(learner, 3) == [f"SendStat(a): {expected}"]
    assert learner.step == 12


def test_a_value_that_cannot_be_an_argument():
    assert said(["true", "{a}"], "a", {"a": "\0"}) == [
        "SendStat(a): `true '{a}'`: it could not be started: embedded null byte."
    ]


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    # The child in the background holds the output open, and would outlive a shell that is killed alone.
    script = f"echo begun; (sleep 60; echo {{a}}) & echo $! > {tmp_path}/child; sleep 60"
    began = time.monotonic()
    assert said(script, "a", {"a": 1}, shell=True, timeout=0.3) == [
        f"SendStat(a): `{script}`: it was killed after 0.3 s, and said: begun."
    ]
    assert time.monotonic() - began < 10
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # until whoever inherited it has reaped it
        if not _runs(child):
            break
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_in_the_background_is_not_waited_for(tmp_path):
    began = time.monotonic()
    assert said("sleep 3 & echo {a}", "a", {"a": 1}, shell=True) == []
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            ("notify-send 'loss {loss}'", "loss"),
            {},
            "The command of `SendStat` is a list of arguments, not the string \"notify-send 'loss {loss}'\".\n"
            "  why:   with a blank or a semicolon in it, a value would become several arguments, or a command\n"
            "  fix:   write `['notify-send', 'loss {loss}']`\n"
            "     or: `shell=True`, if a shell is to run it",
        ),
        (
            (["echo", 1], "loss"),
            {},
            "The command of `SendStat` is a list of arguments, the program first, not ['echo', 1].\n"
            '  fix:   e.g. `["notify-send", "loss {loss:.3f}"]`',
        ),
        (
            (["echo", "{loss}"], "loss"),
            {"shell": True},
            "With `shell=True`, the command of `SendStat` is a string, not ['echo', '{loss}'].\n"
            '  fix:   e.g. `"echo {loss} >> losses.txt"`',
        ),
        (
            (["echo", "{los}"], "loss"),
            {},
            "`{los}` in the command of `SendStat` names no statistic in `names`. Did you mean `loss`?\n"
            "  where: echo '{los}'\n"
            "  why:   `names` has 'loss'\n"
            "  fix:   name it there, too\n"
            "     or: write `{{` and `}}` for braces",
        ),
        (
            (["echo", "{loss}"], ["loss", "accuracy"]),
            {},
            "The command of `SendStat` has no place for the statistic 'accuracy'.\n"
            "  where: echo '{loss}'\n"
            "  fix:   write `{accuracy}` in it\n"
            "     or: leave it out of `names`",
        ),
        (
            (["echo", "{loss:.3q}"], "loss"),
            {},
            "`{loss:.3q}` in the command of `SendStat` has no format for a number: '.3q'.\n"
            "  where: echo '{loss:.3q}'\n"
            "  fix:   e.g. `{loss:.3f}`",
        ),
        (
            (["echo", "{loss} }"], "loss"),
            {},
            "The command of `SendStat` has a lonely `}`.\n  where: echo '{loss} }'\n  fix:   write `}}` for a brace",
        ),
        (
            ("echo 'loss: {loss}'", "loss"),
            {"shell": True},
            "`{loss}` stands within single quotes in the command of `SendStat`.\n"
            "  where: echo 'loss: {loss}'\n"
            "  why:   a shell fills in nothing there\n"
            "  fix:   leave the quotes out: a value is one argument without them\n"
            "     or: use double quotes",
        ),
        (
            (["echo"], []),
            {},
            "`names` of `SendStat` must be names under which values are put, not [].\n"
            '  fix:   e.g. `"validation/loss"`, or `["loss", "accuracy"]`',
        ),
        (
            (["echo", "{a}"], ["a", "a"]),
            {},
            "`names` of `SendStat` has 'a' twice.\n  fix:   name it once",
        ),
        (
            (["echo", "{a}"], "a"),
            {"timeout": 0},
            "`timeout` of `SendStat` (seconds) must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
    ],
)
def test_what_send_stat_refuses(arguments, options, text, refused):
    with refused(DeclarationError, text):
        SendStat(*arguments, **options)


def test_without_monitors_there_is_nothing_to_send():
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
def test_a_record_is_sent_each_time_that_all_names_came_anew(names, seconds, monkeypatch):
    monkeypatch.setattr("fluxcb._declare.schedules.EverySeconds.for_handler", lambda self: type(self)(seconds))
    records = []
    learner = testlearner(SendMonitorData(records.append, names), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == []
    assert records == RECORDS
    assert sender_threads() == []


def test_a_value_of_the_last_moment_before_a_stop_is_sent():
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


def test_what_was_sent_is_not_sent_again_after_a_resume():
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
            time.sleep(self.server.delay)
            self.send_response(self.server.answer)
            if self.server.answer == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - its name

        def log_message(self, *_):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.got, found.answer, found.delay = [], 200, 0.0
    found.url = f"http://127.0.0.1:{found.server_port}/losses?run=1"
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_records_are_posted_as_json(server):
    learner = testlearner(SendMonitorData(server.url, ["a", "b"]), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == []
    assert server.got == [("/losses?run=1", "application/json", record) for record in RECORDS]


def test_values_that_are_not_finite_are_json_still(server):
    values = Puts({1: {"a": float("nan")}, 2: {"a": float("inf")}, 3: {"a": -float("inf")}})
    testlearner(SendMonitorData(server.url, "a"), values, Monitors()).fit(1)
    assert [body["a"] for _, _, body in server.got] == ["NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize(("answer", "reason"), [(500, "Internal Server Error"), (404, "Not Found"), (302, "Found")])
def test_a_server_that_refuses_is_told_once(server, answer, reason):
    server.answer = answer
    learner = testlearner(SendMonitorData(server.url, ["a", "b"]), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == [
        f"SendMonitorData(127.0.0.1, a, b): ConnectionError: the server answers {answer} {reason}"
    ]
    assert len(server.got) == 3  # it is tried again; a redirect is not followed
    assert learner.step == 6


def test_a_server_that_is_not_there_is_told_once(server):
    url = server.url
    server.server_close()
    learner = testlearner(SendMonitorData(url, ["a", "b"]), puts(), Monitors(), batches=3)
    (text,) = warned(learner, 2)
    assert text.startswith("SendMonitorData(127.0.0.1, a, b): ConnectionError: the server cannot be reached: [Errno ")


def test_a_slow_server_holds_up_the_end_of_a_fit_only_and_not_for_long(server):
    server.delay = 1.0
    times = []

    class Times(Callback):
        @on
        def note(self, event: Trigger | FitEnd, phase: TrainingPhase, learner):
            times.append(time.monotonic())

    learner = testlearner(Times(), SendMonitorData(server.url, "a", timeout=0.3), puts(), Monitors(), batches=3)
    began = time.monotonic()
    texts = warned(learner, 2)
    assert times[1] - times[0] < 0.3  # the second epoch did not wait for what the first one sent
    assert time.monotonic() - began < 3
    assert texts[-1].endswith(": records are lost: not all could be sent before the fit ended") or len(server.got) == 3
    assert all("timed out" in text or "records are lost" in text for text in texts)
    assert sender_threads() == []


def test_a_function_that_fails_is_told_once():
    def send(record):
        raise ValueError("no such channel")

    learner = testlearner(SendMonitorData(send, ["a", "b"]), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == ["SendMonitorData(send, a, b): ValueError: no such channel"]


def test_a_function_that_hangs_does_not_hold_up_the_training():
    go_on = threading.Event()
    learner = testlearner(SendMonitorData(lambda record: go_on.wait(), "a", timeout=0.1), puts(), Monitors(), batches=3)
    assert warned(learner, 2) == [
        "SendMonitorData(<lambda>, a): a record is still being sent after 0.1 s, and is not waited for",
        "SendMonitorData(<lambda>, a): records are lost: not all could be sent before the fit ended",
    ]
    go_on.set()
    for _ in range(100):
        if not sender_threads():
            break
        time.sleep(0.02)
    assert sender_threads() == []


def test_a_text_cannot_be_sent():
    learner = testlearner(SendMonitorData(print, "note"), Puts(epochs={1: {"note": "x"}}), Monitors())
    assert warned(learner) == [
        "SendMonitorData(print, note): `note` is of the kind Text, and only numbers can be sent."
    ]


def test_a_statistic_that_never_comes_is_told():
    learner = testlearner(SendMonitorData(print, ["a", "bb"]), puts(), Monitors())
    assert warned(learner, 2) == [
        "SendMonitorData(print, a, bb): nothing is sent: nothing was put under `bb` yet. Did you mean `b`?"
    ]


def test_its_address_is_shown_nowhere():
    assert (
        repr(SendMonitorData("https://chat.example/hooks/SECRET?token=SECRET", "a"))
        == "SendMonitorData(chat.example, a)"
    )


@pytest.mark.parametrize(
    "to", ["example.org", "file:///etc/passwd", "ftp://example.org", "http://", "http://a:b/", None, 3]
)
def test_where_nothing_can_be_sent_to(to, refused):
    text = (
        f"`SendMonitorData` sends to an address or a function, not {to!r}.\n"
        '  fix:   e.g. `"https://example.org/losses"`\n'
        "     or: a function of the record, e.g. `print`"
    )
    with refused(DeclarationError, text):
        SendMonitorData(to, "loss")


def test_what_else_send_monitor_data_refuses(refused):
    with refused(
        DeclarationError,
        "`timeout` of `SendMonitorData` (seconds) must be a number above 0, not inf.\n"
        "  fix:   give a finite number above 0",
    ):
        SendMonitorData(print, "a", timeout=float("inf"))
    text = (
        "`names` of `SendMonitorData` must be names under which values are put, not 3.\n"
        '  fix:   e.g. `"validation/loss"`, or `["loss", "accuracy"]`'
    )
    with refused(DeclarationError, text):
        SendMonitorData(print, 3)


def test_many_fits_leave_nothing_behind(told):
    def held():
        return threading.active_count(), sorted(os.listdir("/proc/self/fd"))

    learner = testlearner(SendStat(["true", "{a}"], "a"), SendMonitorData(lambda record: None, "a"), puts(), Monitors())
    learner.fit(1)
    before = held()
    for _ in range(5):
        learner.fit(1)
    assert held() == before
