"""The arguments of the magics, on IPython's own parser: a typo is answered with the choices."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import MagicArgumentParser

from ..errors import UsageError, did_you_mean
from ..lazy import Lazy

if TYPE_CHECKING:
    from .. import doctor, model
else:
    doctor, model = Lazy("doctor"), Lazy("model")


class Parser(MagicArgumentParser):
    """Answers on the screen: a typo lists the choices, `--help` does not raise."""

    def __init__(self, **options: Any) -> None:
        plain: Any = super().__init__  # IPython's is not typed
        plain(**{"formatter_class": _layout, "add_help": True, **options})

    def error(self, message: str) -> Any:
        raise UsageError(f"{message}{did_you_mean(message)}\n{self.format_usage().strip()}")

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


def _bound(text: str) -> model.Bound:
    """0:10 is 0 <= value < 10; with decimal points, 0.0:1.0, both ends are valid."""
    match = re.fullmatch(r"(-?\d+):(-?\d+)", text)
    if match and int(match[1]) < int(match[2]):
        return model.Bound(low=int(match[1]), high=int(match[2]))
    number = r"(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)"
    match = None if match else re.fullmatch(f"{number}:{number}", text)
    if match and float(match[1]) <= float(match[2]):
        return model.Bound(low=float(match[1]), high=float(match[2]), high_inclusive=True)
    raise argparse.ArgumentTypeError(
        f"{text} is not LOW:HIGH, such as 0:10 (0 <= value < 10) or 0.0:1.0 (both ends are valid)"
    )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")


def assertdoc_parser() -> Parser:
    parser = _parser("%assertdoc", "Diagnosis of CUDA device-side asserts.")
    parser.epilog = (
        "%cpu_replay [N] replays the cell that failed, or In [N], on the CPU; %%cpu_replay, as the "
        "first line of a cell, the cell below it. `%cpu_replay --help` lists their options."
    )
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
    scan = commands.add_parser("scan", help="look for values out of range in all of the data")
    scan.add_argument(
        "expression", nargs="*", metavar="EXPR", help="default: the data of the loop that failed"
    )
    scan.add_argument(
        "--range",
        type=_bound,
        metavar="LOW:HIGH",
        help="LOW <= value < HIGH: 0:24 leaves 24 out; with decimal points, 0.0:1.0, both ends are "
        "valid; default: the range of the last report",
    )
    scan.add_argument("--ignore", type=int, metavar="V", help="a value that is valid as well")
    scan.add_argument("--rows", type=_positive, metavar="N", help="rows of a stream (100,000)")
    ranges = commands.add_parser(
        "ranges",
        help="minimum and maximum of what the model is given",
        description="Replay the first batches of a cell in a fresh process on the CPU, and show "
        "what each operator was given beside what is valid. %%assertdoc ranges [N], as the first "
        "line of a cell, takes the cell below it.",
    )
    ranges.add_argument(
        "batches", nargs="?", type=_positive, default=10, metavar="N", help="batches (10)"
    )
    ranges.add_argument(
        "execution",
        nargs="?",
        type=int,
        metavar="CELL",
        help="In [CELL]; default: the newest cell that looped over a DataLoader, else with a loop",
    )
    commands.add_parser(
        "verify",
        help="the failing batch on the CPU with the fix: with the cell below, else with what you "
        "changed since, else with the suggestion",
    )
    back = commands.add_parser("restore", help="variables from before the restart")
    back.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    back.add_argument(
        "--overwrite", action="store_true", help="also names that have another value here"
    )
    back.add_argument(
        "--from-folder",
        action="store_true",
        help="those of another kernel in this folder, which may be another notebook's",
    )
    drop = commands.add_parser("forget", help="delete what is stored for this notebook")
    drop.add_argument("--all", action="store_true", help="what is stored for all notebooks")
    commands.add_parser("settings", help="the settings and their values")
    commands.add_parser("help", help="this text")
    return parser


def scan_words(line: str) -> tuple[str, list[str]]:
    """The expression of `scan EXPR`, with its own quotes and spaces, and all the other words."""
    joined = re.sub(r"(--(?:range|ignore|rows))\s+(?=\S)", r"\1=", line.strip())
    options = re.findall(r"(?:(?<=\s)|^)--?[a-z][\w-]*(?:=\S*)?(?=\s|$)", joined)
    for option in options:
        joined = joined.replace(option, "", 1)
    return joined.strip()[len("scan") :].strip(), ["scan", *options]


def words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line}: {str(error).lower()}") from error
