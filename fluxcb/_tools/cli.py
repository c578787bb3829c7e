"""The command line: `fluxcb demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fluxcb._declare.schedules import positive
from fluxcb._errors import FluxcbError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments, or None for the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage (argparse exits itself), 130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="fluxcb", description="A callback engine for JAX training loops.")
    parser.add_argument("--version", action="version", version=f"fluxcb {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="train a small network on handwritten digits, and show what happens")
    demo.add_argument("--epochs", type=int, default=20, help="epochs to train (default 20)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    demo.add_argument("--out", type=Path, default=Path("runs"), help="folder for results (default runs/)")
    chosen = parser.parse_args(arguments)
    try:
        positive(chosen.epochs, "--epochs")
        from fluxcb._tools.demo import run_demo

        run_demo(epochs=chosen.epochs, seed=chosen.seed, out=chosen.out)
    except FluxcbError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


def _version() -> str:
    # The package's own, which is there in a checkout that was never installed, too.
    return sys.modules["fluxcb"].__version__
