"""The arguments of the magics, on IPython's own parser: `--help` and typos answer with the choices."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import MagicArgumentParser

from ..errors import UsageError
from ..lazy import Lazy

if TYPE_CHECKING:
    from .. import doctor
else:
    doctor = Lazy("doctor")


class Parser(MagicArgumentParser):
    """Answers on the screen: a typo lists the choices, `--help` does not raise."""

    def __init__(self, **options: Any) -> None:
        plain: Any = super().__init__  # IPython's is not typed
        plain(**{"formatter_class": _layout, "add_help": True, **options})

    def error(self, message: str) -> Any:
        raise UsageError(f"{message}\n{self.format_usage().strip()}")

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        raise Answered

    def print_help(self, file: Any = None) -> None:
        print(self.format_help())


def _layout(prog: str) -> argparse.HelpFormatter:
    """Plain text; IPython's own makes reStructuredText, for docstrings."""
    return argparse.HelpFormatter(prog, max_help_position=30, width=100)


def _parser(name: str, description: str) -> Parser:
    make: Any = Parser  # traitlets' parser is not typed
    parser: Parser = make(prog=name, description=description)
    return parser


class Answered(Exception):
    """The help was printed: there is nothing more to do."""


def replay_parser() -> Parser:
    parser = _parser("%cpu_replay", REPLAY_HELP)
    parser.add_argument(
        "execution", nargs="?", type=int, metavar="N", help="In [N]; default: the cell that failed"
    )
    parser.add_argument("--engine", choices=doctor.ENGINES, help="the one way to replay")
    parser.add_argument(
        "--max-steps", type=_positive, metavar="N", help="iterations of the cell's outer loops"
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="seconds; default: AssertDoc.asked_seconds"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON")
    return parser


REPLAY_HELP = (
    "Replay a cell on the CPU in a fresh kernel with the notebook's state, and say which value was "
    "out of range. %%cpu_replay takes the cell below it; the notebook's own state is not changed."
)


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")


def assertdoc_parser() -> Parser:
    parser = _parser("%assertdoc", "Diagnosis of CUDA device-side asserts.")
    commands = parser.add_subparsers(dest="command", parser_class=Parser, metavar="COMMAND")
    commands.add_parser("status", help="what has happened, and what to do next (the default)")
    commands.add_parser("report", help="show the last report again")
    explain = commands.add_parser("explain", help="plain words for an error, a line or a topic")
    explain.add_argument("text", nargs="*", help="the text, a cause's key or a topic")
    again = commands.add_parser("restart", help="restart this kernel, where that is possible")
    again.add_argument(
        "--launch-blocking",
        action="store_true",
        help="the next kernel runs CUDA synchronously: the traceback then names the true line",
    )
    save = commands.add_parser("save", help="write the last report to a .json, .html or .txt file")
    save.add_argument("file", type=Path)
    commands.add_parser("settings", help="the settings and their values")
    commands.add_parser("help", help="this text")
    return parser


def words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line}: {str(error).lower()}") from error
