"""The command line: `fluxcb check`, `graph`, `explain`, `events`, `list`, `plot`, `demo`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fluxcb._declare.schedules import positive
from fluxcb._errors import FluxcbError
from fluxcb._tools import commands
from fluxcb._tools.commands import UsageError
from fluxcb._tools.project import LEVELS

__all__ = ["main"]

_SET = "`module:name` of a list of callbacks, of a Learner, or of a function that returns one"
_ONE_SET = f"{_SET} (default: the only one in [tool.fluxcb] of pyproject.toml)"
_FORMS = ("tree", "text", "mermaid", "dot", "svg", "html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments, or None for the process's own.

    Returns:
        The exit code: 0 done and valid, 1 something is wrong with what was looked at, 2 wrong usage or nothing to look
        at, 130 interrupted.
    """
    chosen = _parser().parse_args(arguments)
    try:
        code = _run(chosen)
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except FluxcbError as error:
        sys.stderr.write("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), ""]))
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return code


def _run(chosen: argparse.Namespace) -> int:
    """Run the chosen command; each is imported when it is used, because some import JAX."""
    if chosen.command == "demo":
        positive(chosen.epochs, "--epochs")
        from fluxcb._tools.demo import run_demo

        run_demo(epochs=chosen.epochs, seed=chosen.seed, out=chosen.out)
        return 0
    if chosen.command == "plot":
        import rich

        from fluxcb._tools.plotting import plot

        plot(chosen.run, chosen.values, chosen.out, rich.get_console())
        return 0
    if chosen.command == "list":
        return commands.list_callbacks(as_json=chosen.json)
    if chosen.command == "check":
        return commands.check(chosen.sets, chosen.level, as_json=chosen.json)
    if chosen.command == "graph":
        return commands.graph(chosen.set, chosen.format, chosen.event, chosen.phase, chosen.out, as_json=chosen.json)
    if chosen.command == "explain":
        return commands.explain(chosen.a, chosen.b, chosen.set, as_json=chosen.json)
    return commands.events(chosen.set, as_json=chosen.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fluxcb",
        description="Checks, explains and draws sets of callbacks for JAX training loops.",
        epilog="Exit codes: 0 valid, 1 something is wrong with a set, 2 wrong usage or nothing to look at.",
    )
    parser.add_argument("--version", action="version", version=f"fluxcb {_version()}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="command")

    check = parsers.add_parser("check", help="check that callback sets fit together")
    check.add_argument("sets", nargs="*", metavar="SET", help=f"{_SET} (default: all in [tool.fluxcb])")
    check.add_argument(
        "--level",
        choices=LEVELS,
        help="graph: from the declarations and the source; trace: with a dry run of the step; audit: with two real "
        "steps; resume: these interrupted everywhere, and resumed (default: as in pyproject.toml)",
    )

    graph = parsers.add_parser("graph", help="draw the callback graph")
    graph.add_argument("set", nargs="?", metavar="SET", help=_ONE_SET)
    graph.add_argument("--format", choices=_FORMS, help="default: by the file's name, or tree")
    graph.add_argument("--event", help="only this moment's event, e.g. StepEnd")
    graph.add_argument("--phase", help="only this moment's phase, e.g. TrainingPhase or training (default: the first)")
    graph.add_argument("-o", "--out", type=Path, metavar="FILE", help="write to a file")

    explain = parsers.add_parser(
        "explain", help="tell why one callback runs before another, or that they are free, or in conflict"
    )
    explain.add_argument("a", metavar="A", help="a callback: its class's name, or as `fluxcb check` shows it")
    explain.add_argument("b", metavar="B", help="another one")
    explain.add_argument("set", nargs="?", metavar="SET", help=_ONE_SET)

    events = parsers.add_parser("events", help="show the moments, and who runs then")
    events.add_argument("set", nargs="?", metavar="SET", help=_ONE_SET)

    listing = parsers.add_parser("list", help="list the callbacks that come with fluxcb")

    for command in (check, graph, explain, events, listing):
        command.add_argument("--json", action="store_true", help="print JSON")

    plot = parsers.add_parser("plot", help="draw the curves of a run in the terminal, or to a file")
    plot.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its file of JSON, JSON lines or CSV")
    plot.add_argument("values", nargs="*", metavar="NAME", help="which values, e.g. accuracy or 'validation/*'")
    plot.add_argument("-o", "--out", type=Path, metavar="FILE", help="write an SVG file")

    demo = parsers.add_parser("demo", help="train a small network on handwritten digits, and show what happens")
    demo.add_argument("--epochs", type=int, default=20, help="epochs to train (default 20)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    demo.add_argument("--out", type=Path, default=Path("runs"), help="folder for results (default runs/)")
    return parser


def _version() -> str:
    # The package's own, which is there in a checkout that was never installed, too.
    return sys.modules["fluxcb"].__version__
