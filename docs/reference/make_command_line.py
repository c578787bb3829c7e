"""Make the page of the command line from its parser: `python docs/reference/make_command_line.py`.

A test compares the page with what this script would write.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxcb._tools.cli import _parser

PAGE = Path(__file__).with_name("command-line.md")
BEGIN, END = "<!-- commands: made by make_command_line.py -->\n", "<!-- end of commands -->\n"


def commands() -> str:
    """Return a section for each command: what it does, its usage, its arguments."""
    (subparsers,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return "\n".join(["", *(_section(name, helps[name], subparsers.choices[name]) for name in subparsers.choices), ""])


def _section(name: str, what: str, parser: argparse.ArgumentParser) -> str:
    arguments = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    # argparse's own usage is not used: its line breaks and brackets differ between versions of Python.
    usage = " ".join([f"fluxcb {name}", *map(_usage, arguments)])
    rows = "".join(f"| `{_spelled(action)}` | {_meaning(action)} |\n" for action in arguments)
    table = f"\n| argument | meaning |\n|---|---|\n{rows}" if rows else ""
    return f"## fluxcb {name}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{usage}\n```\n{table}"


def _usage(action: argparse.Action) -> str:
    if action.option_strings or action.nargs == "?":
        return f"[{_spelled(action).partition(', ')[0] if action.option_strings else action.metavar}]"
    return f"[{action.metavar} ...]" if action.nargs == "*" else str(action.metavar)


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(option + value for option in action.option_strings)


def _meaning(action: argparse.Action) -> str:
    choices = f"one of {', '.join(f'`{choice}`' for choice in action.choices)}; " if action.choices else ""
    return (choices + str(action.help)).replace("|", "\\|")


def page() -> str:
    """Return the page with the commands made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + commands() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
