"""The command line: `fluxcb check`, and the other commands of `fluxcb --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fluxcb._errors import FluxcbError
from fluxcb._terminal import escape_block
from fluxcb._tools import commands
from fluxcb._tools.commands import UsageError
from fluxcb._tools.project import LEVELS

__all__ = ["main"]

_SET = "`module:name` of a list of callbacks, of a Learner, or of a function that returns one"
_ONE_SET = f"{_SET} (default: the only set in [tool.fluxcb] of pyproject.toml)"
_FORMS = ("tree", "text", "mermaid", "dot", "svg", "html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments, or None for those of the process.

    Returns:
        The exit code: 0 if a command succeeded and found no problem, 1 if it found a problem or cannot load a set, 2
        for wrong usage or if there is nothing to check, 130 if it was interrupted.
    """
    chosen = _parser().parse_args(arguments)
    try:
        code = _run(chosen)
        sys.stdout.flush()
    except UsageError as error:
        _complain(str(error))
        return 2
    except FluxcbError as error:
        _complain("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        return 1
    except BrokenPipeError:  # the reader closed the pipe, and nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _complain(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    return code


def _complain(text: str) -> None:
    sys.stderr.write(f"{escape_block(text)}\n")


def _run(chosen: argparse.Namespace) -> int:
    """Run the chosen command. Each command is imported on use, because some import JAX."""
    out = getattr(chosen, "out", None)
    if chosen.command in ("graph", "plot") and out is not None and not out.parent.is_dir():
        raise UsageError(
            f"`--out` is {out}, but the folder {out.parent} does not exist.\n  fix:   create the folder first"
        )
    if chosen.command in ("demo", "sweep") and out is not None and Path(out).is_file():
        fix = "name a folder, in which the run gets a folder of its own"
        raise UsageError(f"`--out` is the file {out}.\n  fix:   {fix}")
    if chosen.command == "demo":
        from fluxcb._tools.demo import run_demo

        run_demo(epochs=chosen.epochs, seed=chosen.seed, out=chosen.out)
        return 0
    if chosen.command == "sweep":
        from fluxcb._tools.sweep import RATES, run_sweep

        rates = chosen.learning_rates or RATES
        run_sweep(rates, epochs=chosen.epochs, seed=chosen.seed, out=chosen.out)
        return 0
    if chosen.command == "plot":
        import rich

        from fluxcb._tools.plotting import plot

        plot(chosen.run, chosen.values, chosen.out, rich.get_console())
        return 0
    if chosen.command == "ablate":
        return commands.ablate(
            chosen.target, chosen.names, chosen.epochs, chosen.steps, chosen.seeds, as_json=chosen.json
        )
    if chosen.command == "replay":
        options = chosen.learner, chosen.watch, chosen.save
        if chosen.bad_step is not None:
            return commands.replay_bad_step(chosen.run, chosen.bad_step, *options)
        return commands.replay(chosen.run, chosen.steps, *options, chosen.lineage)
    if chosen.command == "control":
        from fluxcb._tools.controlling import control

        return control(chosen.run, chosen.action, chosen.name, chosen.value, wait=chosen.wait)
    if chosen.command == "list":
        return commands.list_callbacks(as_json=chosen.json)
    if chosen.command == "check":
        return commands.check(chosen.sets, chosen.level, as_json=chosen.json)
    if chosen.command == "graph":
        return commands.graph(
            chosen.set,
            chosen.format,
            chosen.event,
            chosen.phase,
            chosen.out,
            costs=chosen.costs,
            as_json=chosen.json,
        )
    if chosen.command == "explain":
        return commands.explain(chosen.a, chosen.b, chosen.set, costs=chosen.costs, as_json=chosen.json)
    return commands.events(chosen.set, as_json=chosen.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fluxcb",
        description="Check, explain and draw sets of callbacks for JAX training loops.",
        epilog="Exit codes: 0 success, 1 a set has a problem or cannot be loaded, 2 wrong usage or nothing to check.",
    )
    parser.add_argument("--version", action="version", version=f"fluxcb {_version()}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="command")

    check = parsers.add_parser("check", help="check that the callbacks of each set work together")
    check.add_argument("sets", nargs="*", metavar="SET", help=f"{_SET} (default: all sets in [tool.fluxcb])")
    check.add_argument(
        "--level",
        choices=LEVELS,
        help="graph: check the declarations and the source; trace: also trace the step; audit: also run two steps; "
        "resume: also interrupt and resume these steps at every point (default: the level in pyproject.toml)",
    )

    graph = parsers.add_parser("graph", help="draw the callback graph")
    graph.add_argument("set", nargs="?", metavar="SET", help=_ONE_SET)
    graph.add_argument("--format", choices=_FORMS, help="default: the format of the output file's extension, or tree")
    graph.add_argument("--event", help="show only the moment with this event, e.g. StepEnd")
    graph.add_argument(
        "--phase",
        help="show only the moment with this phase, e.g. TrainingPhase or training (default: the first phase)",
    )
    graph.add_argument(
        "--costs", action="store_true", help="show what each handler of a Learner costs (formats svg and html)"
    )
    graph.add_argument("-o", "--out", type=Path, metavar="FILE", help="write to a file")

    explain = parsers.add_parser(
        "explain",
        help="explain the order of all callbacks, or of two (`explain A B`)",
    )
    explain.add_argument(
        "a",
        nargs="?",
        metavar="A",
        help="a callback: its class name, or its name in the output of `fluxcb check`. Without A and B: all callbacks",
    )
    explain.add_argument("b", nargs="?", metavar="B", help="another callback")
    explain.add_argument("set", nargs="?", metavar="SET", help=_ONE_SET)

    explain.add_argument(
        "--costs",
        action="store_true",
        help="show what the callbacks of a Learner cost, instead of their order; SET must be a Learner",
    )

    events = parsers.add_parser("events", help="show the moments, and the callbacks that run at each moment")
    events.add_argument("set", nargs="?", metavar="SET", help=_ONE_SET)

    listing = parsers.add_parser("list", help="list the callbacks that come with fluxcb")

    ablate = parsers.add_parser("ablate", help="train with and without each callback, and compare the results")
    ablate.add_argument("target", metavar="TARGET", help="`module:name` of a function that builds a Learner")
    ablate.add_argument(
        "names",
        nargs="*",
        default=(),  # without a default, argparse lists NAME among the missing arguments
        metavar="NAME",
        help="names of callbacks (default: all that can be disabled one by one)",
    )
    length = ablate.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=_positive, help="length of each training in epochs")
    length.add_argument("--steps", type=_positive, help="length of each training in steps, instead of epochs")
    ablate.add_argument("--seeds", type=int, nargs="+", help="repeat with each seed, which TARGET gets as its argument")

    replay = parsers.add_parser("replay", help="train steps of a recorded run again, and compare the results")
    replay.add_argument("run", type=Path, metavar="RUN", help="folder that was passed to Checkpointer")
    which = replay.add_mutually_exclusive_group(required=True)
    which.add_argument("--steps", type=_step_range, metavar="FIRST:LAST", help="the steps to observe, e.g. 800:820")
    which.add_argument("--bad-step", type=_positive, metavar="N", help="a skipped step that `BadSteps` has recorded")
    replay.add_argument(
        "--learner",
        metavar="SET",
        help="`module:name` of a function that builds the Learner of the run (default: the only set in [tool.fluxcb])",
    )
    replay.add_argument("--watch", nargs="+", default=(), metavar="PATH", help="values to show, e.g. step.grads")
    replay.add_argument("--lineage", metavar="PATH", help="list what writes a value, e.g. step.grads")
    replay.add_argument("--save", type=Path, metavar="DIR", help="write the values to .npz files, one for each step")

    for command in (check, graph, explain, events, listing, ablate):
        command.add_argument("--json", action="store_true", help="print JSON")

    plot = parsers.add_parser("plot", help="draw the curves of a run in the terminal or to a file")
    plot.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or its JSON, JSON Lines or CSV file")
    plot.add_argument(
        "values", nargs="*", default=(), metavar="NAME", help="names of values, e.g. accuracy or 'validation/*'"
    )
    plot.add_argument("-o", "--out", type=Path, metavar="FILE", help="write an SVG file")

    control = parsers.add_parser("control", help="send a command to a running training that has a `ControlFile`")
    control.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    control.add_argument(
        "action",
        choices=("set", "disable", "enable", "save", "stop"),
        metavar="ACTION",
        help="set: set a hyperparameter; disable, enable: switch a callback off and on after the current epoch; "
        "save: save a checkpoint; stop: save and end the fit, which can be resumed",
    )
    control.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="with set: a hyperparameter, e.g. learning_rate; with disable and enable: the name of a callback",
    )
    control.add_argument("value", nargs="?", type=float, metavar="VALUE", help="with set: its new value")
    control.add_argument(
        "--wait", type=float, default=60.0, help="how long to wait for the answer (seconds, default 60)"
    )

    demo = parsers.add_parser("demo", help="train a small network on handwritten digits, and show the results")
    demo.add_argument("--epochs", type=_positive, default=20, help="number of epochs (default 20)")
    demo.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    demo.add_argument("--out", type=Path, default=Path("runs"), help="folder for the results (default runs/)")

    sweep = parsers.add_parser("sweep", help="train the demo's network with several learning rates in one program")
    sweep.add_argument(
        "--learning-rates", type=float, nargs="+", metavar="RATE", help="default: eight rates from 0.0001 to 0.3"
    )
    sweep.add_argument("--epochs", type=_positive, default=10, help="number of epochs (default 10)")
    sweep.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    sweep.add_argument("--out", type=Path, default=Path("runs"), help="folder for the results (default runs/)")
    return parser


def _positive(text: str) -> int:
    """Return an option's value if it is a whole number of at least 1."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _step_range(text: str) -> tuple[int, int]:
    """Return the steps FIRST and LAST of an option FIRST:LAST."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            f"must be FIRST:LAST with 1 <= FIRST <= LAST, not {text!r}; write e.g. --steps 800:820"
        )
    return int(first), int(last)


def _version() -> str:
    # The version of this package rather than its metadata, which is missing in a checkout that was never installed.
    return sys.modules["fluxcb"].__version__
