"""ControlFile and RunControl: commands to a running training."""

import json
import os
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, DeclarationError, Learner, PeerError, on
from fluxcb._tools.cli import main
from fluxcb.callbacks import (
    Checkpointer,
    ControlFile,
    CustomCallback,
    HyperParamSetterWithFunc,
    LearningRate,
    RunControl,
    Scheduler,
)
from fluxcb.callbacks.system.run_control import ANSWERS, COMMANDS, parse_command
from fluxcb.events import EpochBegin, StepEnd
from fluxcb.phases import TrainingPhase

OFTEN = 1e-9  # seconds: look between all windows


class At(Callback):
    """Call a function at the end of a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == self.step:
            self.act()


class Counts(Callback):
    """Record the steps."""

    def __init__(self):
        self.steps = []

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        self.steps.append(learner.progress.step)


# Without windows, up to 32 calls of the step are in flight, and a second set of them may be dispatched.
AHEAD = 2 * 32


def falling(*callbacks, steps=8, optimizer=None, **options):
    """Return a Learner whose parameter falls by the learning rate, 0.5 at first, at each step."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: params["w"] + 0 * jnp.sum(batch),
        optimizer or fluxcb.inject(optax.sgd, learning_rate=0.5),
        data=[np.zeros(1, np.float32)] * steps,
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


def commands_of(learner):
    assert learner.history.commands == learner.history.to_dict()["commands"] == learner.cbstate["commands"]
    return [(c["action"], c["name"], c["value"], c["step"]) for c in learner.cbstate["commands"]]


def answers_in(folder):
    return [json.loads(line) for line in (folder / ANSWERS).read_text().splitlines()]


@pytest.mark.parametrize(("window", "latest"), [(1, 3 + AHEAD), (16, 3 + AHEAD), ("auto", 200)])
def test_set_changes_rate_after_recorded_step(tmp_path, window, latest):
    send = At(3, lambda: RunControl(tmp_path, wait=0).set("learning_rate", 0.25))
    learner = falling(ControlFile(tmp_path, [LearningRate], seconds=OFTEN), send, steps=200, steps_per_call=window)
    learner.fit(2)
    ((action, name, value, step),) = commands_of(learner)
    assert (action, name, value) == ("set", "learning_rate", 0.25)
    assert 3 <= step <= latest
    assert float(learner.params["w"]) == -(step * 0.5 + (400 - step) * 0.25)
    assert not (tmp_path / COMMANDS).exists()


def test_command_is_obeyed_after_epoch_however_rarely_training_looks(tmp_path):
    send = At(3, lambda: RunControl(tmp_path, wait=0).set("learning_rate", 0.25))
    learner = falling(ControlFile(tmp_path, ["learning_rate"], seconds=3600), send)
    learner.fit(2)
    assert commands_of(learner) == [("set", "learning_rate", 0.25, 8)]
    assert float(learner.params["w"]) == -(8 * 0.5 + 8 * 0.25)


@pytest.mark.parametrize("seconds", [OFTEN, 3600], ids=["within the epoch", "after the epoch"])
def test_killed_run_sets_rate_again_after_same_step(tmp_path, seconds):
    class KilledError(Exception):
        pass

    def kill():
        raise KilledError

    def program(act, step=0):
        return falling(
            ControlFile(tmp_path, [LearningRate], seconds=seconds),
            At(3, lambda: RunControl(tmp_path, wait=0).set("learning_rate", 0.25)) if act else At(-1, None),
            At(step, kill),
            Checkpointer(tmp_path, epochs=4),  # so that the run resumes from step 0
            steps=200,
            steps_per_call=16,
        )

    with pytest.raises(KilledError):
        program(True, step=390).fit(2)
    (answer,) = answers_in(tmp_path)
    assert (answer["step"] < 200, answer["moment"]) == ((True, "step") if seconds == OFTEN else (False, "epoch"))
    learner = program(False)
    learner.fit(2, resume=True, allow=("callbacks",))
    step = answer["step"]
    assert commands_of(learner) == [("set", "learning_rate", 0.25, step)]
    assert float(learner.params["w"]) == -(step * 0.5 + (400 - step) * 0.25)
    assert len(answers_in(tmp_path)) == 1


def test_killed_run_disables_callback_again_after_same_epoch(tmp_path):
    class KilledError(Exception):
        pass

    def kill():
        raise KilledError

    def program(act, step=0):
        counts = Counts()
        learner = falling(
            ControlFile(tmp_path, seconds=OFTEN),
            At(3, lambda: RunControl(tmp_path, wait=0).disable("Counts")) if act else At(-1, None),
            At(step, kill),
            counts,
            Checkpointer(tmp_path, epochs=4),  # so that the run resumes from step 0
            steps_per_call=1,
        )
        return learner, counts

    with pytest.raises(KilledError):
        program(True, step=14)[0].fit(3)
    learner, counts = program(False)
    learner.fit(3, resume=True, allow=("callbacks",))
    assert [command[:2] for command in commands_of(learner)] == [("disable", "Counts")]
    assert learner.callbacks.disabled == ("Counts",)
    assert counts.steps == list(range(1, 9))


def test_command_enables_callback_again(tmp_path):
    counts = Counts()
    control = RunControl(tmp_path, wait=0)
    learner = falling(
        ControlFile(tmp_path, seconds=3600),  # obeys at the ends of epochs
        At(3, lambda: control.disable("Counts")),
        At(11, lambda: control.enable("Counts")),
        counts,
    )
    learner.fit(3)
    assert counts.steps == [*range(1, 9), *range(17, 25)]
    assert [command[:2] for command in commands_of(learner)] == [("disable", "Counts"), ("enable", "Counts")]


def test_obeyed_command_is_part_of_checkpoint_and_not_repeated(tmp_path):
    def program(*callbacks):
        return falling(ControlFile(tmp_path, [LearningRate]), *callbacks, Checkpointer(tmp_path))

    program(At(3, lambda: RunControl(tmp_path, wait=0).set("learning_rate", 0.25))).fit(1)
    learner = program()
    learner.fit(2, resume=True, allow=("callbacks",))
    assert commands_of(learner) == [("set", "learning_rate", 0.25, 8)]
    assert float(learner.params["w"]) == -(8 * 0.5 + 8 * 0.25)


def test_save_writes_checkpoint_of_recorded_step(tmp_path):
    learner = falling(
        ControlFile(tmp_path, seconds=OFTEN),
        At(3, lambda: RunControl(tmp_path, wait=0).save()),
        Checkpointer(tmp_path, epochs=100),
        steps=200,
        steps_per_call=16,
    )
    learner.fit(1)
    ((action, _, _, step),) = commands_of(learner)
    assert action == "save"
    assert step <= 3 + AHEAD
    assert float(fluxcb.checkpoints.load_params(tmp_path / str(step))["w"]) == -step * 0.5


def test_stop_ends_fit_and_run_continues(tmp_path):
    def program(*callbacks):
        control = ControlFile(tmp_path, seconds=OFTEN)
        return falling(control, *callbacks, Checkpointer(tmp_path), steps=200, steps_per_call=16)

    stop = CustomCallback(lambda *_: RunControl(tmp_path, wait=0).stop(), EpochBegin)
    learner = program(stop)
    learner.fit(2)
    assert learner.stop_reason == "stopped by a command"
    assert 0 < learner.step <= AHEAD
    resumed = program()
    resumed.fit(2, resume=True, allow=("callbacks",))
    assert (resumed.step, float(resumed.params["w"])) == (400, -200.0)


def test_stop_saves_if_a_command_has_disabled_the_checkpointer(tmp_path):
    control = RunControl(tmp_path, wait=0)
    learner = falling(
        ControlFile(tmp_path, seconds=3600),  # obeys at the ends of epochs
        At(3, lambda: control.disable("Checkpointer")),
        At(20, control.stop),
        Checkpointer(tmp_path),
    )
    learner.fit(100)
    assert (learner.step, learner.stop_reason) == (24, "stopped by a command")
    assert float(fluxcb.checkpoints.load_params(tmp_path)["w"]) == -24 * 0.5


def test_refused_setting_names_what_can_be_set(tmp_path):
    control = RunControl(tmp_path, wait=0)

    def answer(name, *hyperparams):
        learner = Learner.from_loss(
            {"w": jnp.zeros(())},
            lambda params, batch: params["w"] * batch,
            fluxcb.inject(optax.sgd, learning_rate=0.5, momentum=0.5),
            data=[jnp.ones(())] * 2,
            callbacks=[ControlFile(tmp_path, hyperparams), At(1, lambda: control.set(name, 0.25))],
            default_callbacks=False,
        )
        learner.fit(1)
        found = answers_in(tmp_path)[-1]
        assert found["error"].startswith(f"Commands cannot set `hyperparams.{name}` in this training.")
        return found["error"].partition("training.")[2], found["fix"]

    restart = "to the `ControlFile`, and restart the training"
    assert answer("learning_rte", LearningRate) == (" Did you mean `learning_rate`?", ["set `learning_rate`"])
    assert answer("momentum", LearningRate) == (
        "",
        ["set `learning_rate`", f'pass `hyperparams=[LearningRate, "momentum"]` {restart}'],
    )
    assert answer("momentum") == ("", [f'pass `hyperparams=["momentum"]` {restart}'])
    assert answer("weight_decay") == ("", [f"pass the hyperparameters to set {restart}"])


def test_stop_that_preceded_kill_is_not_repeated(tmp_path):
    learner = falling(ControlFile(tmp_path), At(3, lambda: RunControl(tmp_path, wait=0).stop()))
    learner.fit(1)
    assert [answer["action"] for answer in answers_in(tmp_path)] == ["stop"]
    same = falling(ControlFile(tmp_path), At(0, None))
    same.run_epoch(TrainingPhase(), steps=1)  # not at the beginning of a run, so the answers are kept
    same.fit(1)
    assert same.stop_reason is None


def test_other_thread_gets_step_or_refusal(tmp_path):
    told = []

    def talk():
        training = RunControl(tmp_path)
        told.append(training.set("learning_rate", 0.25))
        for attempt in (lambda: training.set("momentum", 0.5), training.save):
            with pytest.raises(DeclarationError) as refused:
                attempt()
            told.append(str(refused.value))
        told.append(training.stop())

    thread = threading.Thread(target=talk)
    begin = CustomCallback(lambda *_: thread.ident or thread.start(), EpochBegin)
    learner = falling(ControlFile(tmp_path, [LearningRate], seconds=0.01), begin)
    learner.fit(1_000_000)
    thread.join()
    assert [action for action, *_ in commands_of(learner)] == ["set", "stop"]
    step = commands_of(learner)[0][3]
    assert told == [
        step,
        "Commands cannot set `hyperparams.momentum` in this training.\n  fix:   set `learning_rate`",
        'The training has no `Checkpointer`.\n  fix:   add `Checkpointer("runs/1")` to the callbacks',
        learner.step,
    ]
    assert learner.stop_reason == "stopped by a command"
    assert float(learner.params["w"]) == -(step * 0.5 + (learner.step - step) * 0.25)


@pytest.mark.parametrize("steps", [(2, 12), (20, 21)])
def test_replay_repeats_commands_and_changes_no_file(tmp_path, steps):
    control, sending = RunControl(tmp_path, wait=0), [True]

    def program():
        return Learner.from_loss(
            {"w": jnp.zeros(())},
            lambda params, batch: params["w"] * batch,
            fluxcb.inject(optax.sgd, learning_rate=0.5, momentum=0.5),
            data=[jnp.ones(())] * 8,
            callbacks=[
                ControlFile(tmp_path, [LearningRate], seconds=3600),  # obeys at the ends of epochs
                HyperParamSetterWithFunc("momentum", lambda epoch, value: value / 2),
                At(3, lambda: sending and control.set("learning_rate", 0.25)),
                At(13, lambda: sending and control.disable("HyperParamSetterWithFunc")),
                Checkpointer(tmp_path, keep_last=9),
            ],
            default_callbacks=False,
        )

    program().fit(4)
    sending.clear()
    running = tmp_path / COMMANDS  # as if the run were still training
    running.write_text(json.dumps({"id": "new", "action": "stop", "name": "", "value": None}) + "\n")
    running.chmod(0o600)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    replay = program().replay(tmp_path, steps=steps)
    assert replay.differences == ()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


# --- what is refused --------------------------------------------------------------------------------------------------


def test_declared_rate_conflicts_with_other_setters(tmp_path):
    control = ControlFile(tmp_path, [LearningRate])
    with pytest.raises(fluxcb.ConflictError):
        fluxcb.check([control, HyperParamSetterWithFunc(LearningRate, lambda epoch, rate: None)])
    with pytest.raises(fluxcb.ConflictError):
        fluxcb.check([control, Scheduler({LearningRate: 0.1})])
    fluxcb.check([ControlFile(tmp_path), Scheduler({LearningRate: 0.1})])
    with pytest.raises(fluxcb.MissingStateError):
        falling(ControlFile(tmp_path, ["momentum"]))


LINES = [
    "", "{", "[]", "null", "1", '"stop"', "{}", '{"id": "1"}', '{"id": "1", "action": "run", "name": "ls"}',
    '{"id": "1", "action": "set", "name": "learning_rate", "value": null}',
    '{"id": "1", "action": "set", "name": "learning_rate", "value": "0.1"}',
    '{"id": "1", "action": "set", "name": "learning_rate", "value": true}',
    '{"id": "1", "action": "set", "name": "learning_rate", "value": NaN}',
    '{"id": "1", "action": "set", "name": "learning_rate", "value": 1e39}',
    '{"id": "1", "action": "set", "name": ["learning_rate"], "value": 0.1}',
    '{"id": 1, "action": "stop"}', '{"id": "1", "action": "stop", "more": 1}',
    '{"id": "1", "action": "stop", "value": 1}',
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:70])
def test_line_that_is_no_command_is_ignored(line):
    assert parse_command(line) is None


def test_lines_around_invalid_ones_are_obeyed(tmp_path):
    def send():
        with (tmp_path / COMMANDS).open("a") as file:
            file.write("".join(f"{line}\n" for line in LINES[:-1]))
        RunControl(tmp_path, wait=0).set("learning_rate", 0.25)
        with (tmp_path / COMMANDS).open("a") as file:
            file.write('{"id": "2", "action": "stop"')  # a line that is being written

    learner = falling(ControlFile(tmp_path, [LearningRate]), At(3, send))
    learner.fit(1)
    assert commands_of(learner) == [("set", "learning_rate", 0.25, 8)]


@pytest.mark.parametrize("how", ["mode", "link"])
def test_file_that_others_can_write_is_not_used(tmp_path, how):
    told = []

    def send():
        path = tmp_path / COMMANDS
        if how == "mode":
            path.chmod(0o666)
        else:
            os.link(path, tmp_path / "other")
        with path.open("a") as file:
            file.write('{"id": "1", "action": "stop"}\n')
        with pytest.raises(DeclarationError) as refused:
            RunControl(tmp_path, wait=0).stop()
        told.append(str(refused.value))

    learner = falling(ControlFile(tmp_path), At(3, send))
    with pytest.warns(UserWarning, match="control.jsonl is not read: ") as warned:
        learner.fit(2)
    assert len(warned) == 1
    assert (learner.step, learner.stop_reason) == (16, None)
    why = "others may write to it; run `chmod go-w` on it" if how == "mode" else "it has more than one name"
    assert told[0].startswith(f"{tmp_path / COMMANDS} is not used for commands: {why}")


def test_answers_that_others_can_write_are_an_error(tmp_path):
    falling(ControlFile(tmp_path), At(3, lambda: RunControl(tmp_path, wait=0).stop())).fit(1)
    (tmp_path / ANSWERS).chmod(0o666)
    learner = falling(ControlFile(tmp_path))
    learner.run_epoch(TrainingPhase(), steps=1)
    with pytest.raises(fluxcb.CheckpointError) as raised:
        learner.fit(1)
    assert str(raised.value) == (
        f"{tmp_path / ANSWERS} cannot be used: others may write to it; run `chmod go-w` on it.\n"
        "  why:   it says which commands the run repeats after it was killed\n"
        "  fix:   delete the file; commands that followed the last checkpoint are then not repeated"
    )
    (tmp_path / ANSWERS).unlink()
    learner.fit(1)


def test_run_without_control_file_is_an_error(tmp_path):
    with pytest.raises(DeclarationError) as raised:
        RunControl(tmp_path).stop()
    assert str(raised.value) == (
        f"No training reads commands in {tmp_path}.\n"
        "  why:   a running training with a `ControlFile` has a file control.jsonl there\n"
        f'  fix:   add `ControlFile("{tmp_path}")` to the callbacks, and start the training'
    )


def test_file_in_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(DeclarationError) as raised:
        RunControl(tmp_path / "train.py").stop()
    assert str(raised.value) == (
        f"{tmp_path / 'train.py'} is not a directory.\n"
        "  fix:   pass the directory of the run, which contains its checkpoints"
    )


def test_training_that_does_not_answer_is_an_error(tmp_path):
    told = []

    def send():
        with pytest.raises(PeerError) as raised:
            RunControl(tmp_path, wait=0.01).stop()
        told.append(str(raised.value))

    learner = falling(ControlFile(tmp_path), At(3, send))
    learner.fit(1)
    assert told == [
        f"The training in {tmp_path} has not answered within 0.01 s.\n"
        "  why:   a training answers between two windows of steps, so a long step or a long handler delays the answer\n"
        "  fix:   wait longer; the command is still in effect if the training is alive\n"
        f"     or: if the training was killed, delete {tmp_path / COMMANDS}"
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ControlFile(3), "`ControlFile` takes a directory, not 3."),
        (
            lambda: ControlFile("runs/1", "learning_rate"),
            "`hyperparams` of `ControlFile` is a list, not 'learning_rate'.",
        ),
        (lambda: ControlFile("runs/1", [3]), "3 does not name a hyperparameter."),
        (
            lambda: RunControl("runs/1").set("learning_rate", float("nan")),
            "A hyperparameter is a finite number, not nan.",
        ),
        (lambda: RunControl("runs").enable(3), "`RunControl.enable` takes the name of a callback, not 3."),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(make, message):
    with pytest.raises(DeclarationError) as raised:
        make()
    assert raised.value.what == message


def test_negative_learning_rate_is_refused_by_the_training(tmp_path):
    def send():
        values = {"1": ("learning_rate", -0.25), "2": ("momentum", -0.5)}
        lines = [{"id": i, "action": "set", "name": name, "value": value} for i, (name, value) in values.items()]
        with (tmp_path / COMMANDS).open("a") as file:  # by another program than RunControl
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))

    optimizer = fluxcb.inject(optax.sgd, learning_rate=0.5, momentum=0.0)
    learner = falling(ControlFile(tmp_path, [LearningRate, "momentum"]), At(3, send), optimizer=optimizer)
    learner.fit(1)
    assert commands_of(learner) == [("set", "momentum", -0.5, 8)]
    assert learner.hyperparams == {"learning_rate": 0.5, "momentum": -0.5}
    assert [(answer["error"], answer["fix"]) for answer in answers_in(tmp_path)] == [
        (
            "`hyperparams.learning_rate` cannot be set to -0.25, which is negative.",
            ["set it to a number that is not negative"],
        ),
        ("", []),
    ]


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_line_shows_step_or_error(tmp_path, capsys):
    codes = []

    def talk():
        codes.append(main(["control", str(tmp_path), "set", "learning_rate", "0.25"]))
        codes.append(main(["control", str(tmp_path), "save"]))
        codes.append(main(["control", str(tmp_path), "set", "momentum", "0.25"]))
        codes.append(main(["control", str(tmp_path), "disable", "Checkpointer"]))
        codes.append(main(["control", str(tmp_path), "disable", "ControlFile"]))
        codes.append(main(["control", str(tmp_path), "stop"]))

    thread = threading.Thread(target=talk)
    begin = CustomCallback(lambda *_: thread.ident or thread.start(), EpochBegin)
    learner = falling(ControlFile(tmp_path, [LearningRate], seconds=0.01), begin, Checkpointer(tmp_path, epochs=10**6))
    learner.fit(1_000_000)
    thread.join()
    first, second, third, fourth = (step for *_, step in commands_of(learner))
    out, err = capsys.readouterr()
    assert out == (
        f"learning_rate is 0.25 after step {first}\n"
        f"the state is saved as it is after step {second}\n"
        f"Checkpointer is disabled at the end of the epoch, after step {third}\n"
        f"the fit ends after step {fourth}\n"
    )
    assert [line for line in err.splitlines() if line.startswith("DeclarationError")] == [
        "DeclarationError: Commands cannot set `hyperparams.momentum` in this training.",
        f"DeclarationError: ControlFile('{tmp_path}') cannot be disabled by a command.",
    ]
    assert codes == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["set", "learning_rate"],
            "`set` takes a hyperparameter and a value: `fluxcb control RUN set learning_rate 1e-4`",
        ),
        (["disable"], "`disable` takes the name of a callback: `fluxcb control RUN disable ThroughputTracker`"),
        (
            ["set", "momentum", "nan"],
            "`set` takes a finite number, not nan: `fluxcb control RUN set momentum 1e-4`",
        ),
        (
            ["set", "learning_rate", "-1"],
            "`set` takes a learning rate that is not negative, not -1: `fluxcb control RUN set learning_rate 1e-4`",
        ),
        (["stop", "now"], "`stop` takes no further arguments: `fluxcb control RUN stop`"),
    ],
)  # fmt: skip
def test_wrong_usage_of_command_line(tmp_path, capsys, arguments, message):
    assert main(["control", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err == f"{message}\n"
