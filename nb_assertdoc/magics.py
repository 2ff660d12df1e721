"""`%assertdoc`, `%cpu_replay` and `%%cpu_replay`."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from .display import Shown
from .errors import AssertdocError, NothingToReplay, UsageError
from .lazy import Lazy
from .settings import AssertDoc, settings

if TYPE_CHECKING:
    from . import diagnosis, doctor, report, restart, session
    from .model import Crash, Report
    from .recorder import Execution, Recorder
else:
    diagnosis, doctor = Lazy("diagnosis"), Lazy("doctor")
    report, restart, session = Lazy("report"), Lazy("restart"), Lazy("session")


class Host(Protocol):
    """What the magics need of the extension."""

    recorder: Recorder
    report: Report | None
    first: Execution | None
    crash: Crash | None
    found: Report | None

    def case(self, execution: Execution, crash: Crash | None) -> doctor.Case: ...
    def body_case(self, body: str) -> doctor.Case: ...
    def replayed(self, execution: Execution | None, report: Report) -> None: ...


class _Parser(MagicArgumentParser):
    """Answers on the screen: a typo lists the choices, `--help` does not raise."""

    def __init__(self, **options: Any) -> None:
        plain: Any = super().__init__  # IPython's is not typed
        plain(**{"formatter_class": _layout, "add_help": True, **options})

    def error(self, message: str) -> Any:
        raise UsageError(f"{message}\n{self.format_usage().strip()}")

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        raise _Answered

    def print_help(self, file: Any = None) -> None:
        print(self.format_help())


def _layout(prog: str) -> argparse.HelpFormatter:
    """Plain text; IPython's own makes reStructuredText, for docstrings."""
    return argparse.HelpFormatter(prog, max_help_position=30, width=100)


def _parser(name: str, description: str) -> _Parser:
    make: Any = _Parser  # traitlets' parser is not typed
    parser: _Parser = make(prog=name, description=description)
    return parser


class _Answered(Exception):
    """The help was printed: there is nothing more to do."""


def _replay_parser() -> _Parser:
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


def _assertdoc_parser() -> _Parser:
    parser = _parser("%assertdoc", "Diagnosis of CUDA device-side asserts.")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser, metavar="COMMAND")
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


@magics_class
class AssertdocMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any, host: Host) -> None:
        super().__init__(shell)
        self._host = host

    @line_magic
    def assertdoc(self, line: str) -> None:
        """Steer nb_assertdoc: `%assertdoc help` lists the sub-commands."""
        parser = _assertdoc_parser()
        words = line.split()
        if words[:1] == ["explain"]:  # an error text may hold quotes and dashes
            rest = line.strip()[len("explain") :].strip()
            if rest not in ("-h", "--help"):
                self._answer(lambda: self._explain(rest))
                return
        try:
            given = parser.parse_args(_words(line))
        except _Answered:
            return
        except UsageError as error:
            print(f"%assertdoc: {error}")
            return
        command = given.command or "status"
        if command == "help":
            parser.print_help()
        elif command == "restart":
            self._answer(lambda: self._restart(given.launch_blocking))
        elif command == "save":
            self._answer(lambda: self._save(given.file))
        else:
            self._answer(getattr(self, f"_{command}"))

    @line_cell_magic
    def cpu_replay(self, line: str, cell: str | None = None) -> None:
        """Replay a cell on the CPU: `%cpu_replay [N]`, or `%%cpu_replay` above a cell."""
        self._answer(lambda: self._replay(line, cell))

    def _answer(self, action: Any) -> None:
        """Run an action; its errors are an answer, not a traceback."""
        try:
            action()
        except _Answered:
            return
        except AssertdocError as error:
            print(f"nb_assertdoc: {error}")

    # ---- replay

    def _replay(self, line: str, body: str | None) -> None:
        given = _replay_parser().parse_args(_words(line))
        doctor.check_torch()
        if body is not None:
            if given.execution is not None:
                raise UsageError("%%cpu_replay takes the cell below it, not a number")
            doctor.check_code(body)
            execution, case = None, self._host.body_case(body)
        else:
            execution, crash = self._chosen(given.execution)
            doctor.check_code(execution.source)
            case = self._host.case(execution, crash)
        if given.report is not None:
            _writable(given.report)
        case.max_steps = given.max_steps
        shown = Shown(self.shell, None)
        found = doctor.diagnose(
            case,
            engine=given.engine,
            seconds=given.timeout or settings().asked_seconds,
            progress=lambda text: None,
        )
        self._host.replayed(execution, found)
        shown.report(found)
        if given.report is not None:
            given.report.write_bytes(report.json_bytes(found))

    def _chosen(self, count: int | None) -> tuple[Execution, Crash | None]:
        host = self._host
        if count is not None:
            execution = host.recorder.by_count(count)
        else:
            execution = host.first or host.recorder.last_failed
        if execution is None and count is None:
            raise NothingToReplay("no cell has failed so far; name one: %cpu_replay N")
        if execution is None:
            raise UsageError(f"there is no In [{count}] among the recorded cells")
        return execution, host.crash if execution is host.first else None

    # ---- sub-commands

    def _status(self) -> None:
        host = self._host
        adapter = restart.adapter(self.shell)
        if not host.recorder.context_dead:
            print(f"nb_assertdoc watches this kernel ({adapter.name}). No assert so far.")
            return
        since = f"since In [{host.first.execution_count}]" if host.first is not None else "already"
        print(f"This kernel's GPU state is dead {since}. Your GPU is fine.")
        if host.found is not None:
            print(f"Found ({host.found.confidence}): {host.found.headline}")
            print("`%assertdoc report` shows it again.")
        else:
            print("`%cpu_replay` finds the line and the value.")
        print(f"Restart: {adapter.how}. {adapter.forewarn}".strip())

    def _report(self) -> None:
        Shown(self.shell, None).report(self._last())

    def _last(self) -> Report:
        if self._host.report is None:
            kept = session.load(session.key(self.shell))
            if kept is None:
                raise NothingToReplay("there is no report yet; `%cpu_replay` makes one")
            self._host.report, age = kept
            print(f"From before the restart, {_ago(age)}; this kernel is fresh:")
        return self._host.report

    def _explain(self, text: str) -> None:
        last = self._host.report
        if not text and last is not None and last.cause is not None:
            text = last.cause.key
        print(diagnosis.explain(text))

    def _restart(self, launch_blocking: bool = False) -> None:
        adapter = restart.adapter(self.shell)
        if launch_blocking:
            session.ask_launch_blocking(session.key(self.shell))
            print("`%load_ext nb_assertdoc` in the next kernel sets CUDA_LAUNCH_BLOCKING=1.")
        if adapter.can_restart and adapter.forewarn:
            print(adapter.forewarn)
        adapter.restart()

    def _save(self, path: Path) -> None:
        last = self._last()
        writers = {
            ".json": lambda: report.json_bytes(last),
            ".html": lambda: report.html(last).encode(),
            ".txt": lambda: report.text(last).encode(),
        }
        if path.suffix not in writers:
            raise UsageError(f"{path}: the file must end in {', '.join(writers)}")
        _writable(path)
        path.write_bytes(writers[path.suffix]())
        print(f"saved {path}")

    def _settings(self) -> None:
        current = settings()
        for name, trait in sorted(AssertDoc.class_own_traits(config=True).items()):
            print(f"AssertDoc.{name} = {getattr(current, name)!r:<12} {trait.help}")
        print("Change one with `%config AssertDoc.name = value`.")


def _ago(seconds: float) -> str:
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "a moment ago"


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line}: {str(error).lower()}") from error


def _writable(path: Path) -> None:
    """Refuse a path that cannot be written, before the work is done."""
    try:
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
