"""`%assertdoc`, `%cpu_replay` and `%%cpu_replay`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.magic import Magics, line_cell_magic, magics_class

from ..display import Shown
from ..errors import AssertdocError, NothingToReplay, UsageError
from ..files import check_writable
from ..lazy import Lazy
from ..settings import AssertDoc, settings
from .arguments import Answered, assertdoc_parser, replay_parser, scan_words, words

if TYPE_CHECKING:
    from .. import diagnosis, doctor, report, restart, session
    from ..model import Bound, Crash, Report
    from ..recorder import Execution, Recorder
    from ..session import stored
    from . import aftermath, data
else:
    aftermath = Lazy("magics.aftermath")
    data, diagnosis, doctor = Lazy("magics.data"), Lazy("diagnosis"), Lazy("doctor")
    report, restart, session = Lazy("report"), Lazy("restart"), Lazy("session")
    stored = Lazy("session.stored")


class Host(Protocol):
    """What the magics need of the extension."""

    recorder: Recorder
    report: Report | None
    first: Execution | None
    crash: Crash | None
    found: Report | None

    def case(self, execution: Execution, crash: Crash | None) -> doctor.Case: ...
    def body_case(self, body: str) -> doctor.Case: ...
    def scan(
        self, expression: str, *, bound: Bound | None, most: int | None, progress: Any
    ) -> tuple[Any, dict[str, Any]]: ...
    def ranges(
        self, batches: int, count: int | None = None, body: str | None = None
    ) -> dict[str, Any]: ...
    def replayed(self, execution: Execution | None, report: Report) -> None: ...
    def keep(self, shown: Shown) -> None: ...
    def last_room(self) -> str: ...
    def verify(self, source: str | None = None, progress: Any = ...) -> Report: ...
    def restore(self, names: Sequence[str], *, overwrite: bool, nearby: bool) -> str: ...
    def search(self, seconds: float, max_steps: int | None) -> Report: ...


@magics_class
class AssertdocMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any, host: Host) -> None:
        super().__init__(shell)
        self._host = host

    @line_cell_magic
    def assertdoc(self, line: str, cell: str | None = None) -> None:
        """Steer nb_assertdoc: `%assertdoc help` lists the sub-commands."""
        parser = assertdoc_parser()
        first = line.split()[:1]
        if first == ["explain"]:  # an error text may hold quotes and dashes
            rest = line.strip()[len("explain") :].strip()
            if rest not in ("-h", "--help"):
                self._answer(lambda: self._explain(rest))
                return
        try:
            plain = first != ["scan"]  # an expression keeps its quotes
            expression, given_words = ("", words(line)) if plain else scan_words(line)
            given = parser.parse_args(given_words)
        except Answered:
            return
        except UsageError as error:
            print(f"%assertdoc: {error}")
            return
        command = given.command or "status"
        if cell is not None and command not in ("verify", "ranges"):
            print("%%assertdoc: takes a cell for `verify` and `ranges` alone")
            return
        if command == "help":
            parser.print_help()
        elif command == "restart":
            self._answer(lambda: self._restart(given.launch_blocking))
        elif command == "save":
            self._answer(lambda: self._save(given.file))
        elif command == "scan":
            self._answer(lambda: self._scan(expression, given))
        elif command == "ranges":
            self._answer(lambda: data.ranges(self.shell, self._host, given, cell))
        elif command == "verify":
            self._answer(lambda: aftermath.verify(self.shell, self._host, cell))
        elif command == "restore":
            self._answer(lambda: aftermath.restore(self._host, given))
        elif command == "forget":
            self._answer(lambda: aftermath.forget(self._host, given.all))
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
        except Answered:
            return
        except AssertdocError as error:
            print(f"nb_assertdoc: {error}")

    # ---- replay

    def _replay(self, line: str, body: str | None) -> None:
        given = replay_parser().parse_args(words(line))
        doctor.check_torch()
        if body is not None:
            if given.execution is not None:
                raise UsageError("%%cpu_replay takes the cell below it, not a number")
            doctor.check_code(body)
            execution, crash, case = None, None, self._host.body_case(body)
        else:
            execution, crash = self._chosen(given.execution)
            doctor.check_code(execution.source)
            case = self._host.case(execution, crash)
        if given.report is not None:
            check_writable(given.report)
        seconds = given.timeout or settings().asked_seconds
        shown = Shown(self.shell, None)
        if given.execution is None and given.engine is None and execution is not None and crash:
            found = self._host.search(seconds, given.max_steps)
        else:
            case.max_steps = given.max_steps
            found = doctor.diagnose(case, engine=given.engine, seconds=seconds)
            self._host.replayed(execution, found)
        shown.report(found)
        if execution is not None:
            self._host.keep(shown)
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
            if host.report is not None and host.report.finding is not None:
                print(f"A replay found ({host.report.confidence}): {host.report.headline}")
                print("`%assertdoc report` shows it again.")
            first = next(iter(host.recorder.executions), None)
            if first is not None and (first.execution_count or 0) > 1:
                print("A cell from before the load that failed: `%cpu_replay N` replays In [N].")
            self._stored()
            return
        since = f"since In [{host.first.execution_count}]" if host.first is not None else "already"
        print(f"This kernel's GPU state is dead {since}. Your GPU is fine.")
        if host.found is not None:
            print(f"Found ({host.found.confidence}): {host.found.headline}")
            print("`%assertdoc report` shows it again.")
        else:
            print("`%cpu_replay` finds the line and the value.")
        print(f"Restart: {adapter.how}. {adapter.forewarn}".strip())
        self._stored()

    def _stored(self) -> None:
        described = doctor.describe(self._host.last_room())
        print(described, end="\n" if described else "")

    def _report(self) -> None:
        last = self._last()
        past = not self._host.recorder.context_dead
        Shown(self.shell, None).report(last, save=False, past=past)

    def _last(self) -> Report:
        if self._host.report is None:
            kept = session.load(self._host.last_room())
            if kept is None:
                raise NothingToReplay("there is no report yet; `%cpu_replay` makes one")
            self._host.report, age = kept
            if not self._host.recorder.context_dead:
                print(f"From before the restart, {stored.ago(age)}; this kernel is fresh:")
        return self._host.report

    def _explain(self, text: str) -> None:
        last = self._host.report
        if not text and last is not None and last.cause is not None:
            print(diagnosis.explain(last.cause.key), end="\n\n")
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
        check_writable(path)
        path.write_bytes(writers[path.suffix]())
        print(f"saved {path}")

    def _scan(self, expression: str, given: Any) -> None:
        if given.range is None:
            with contextlib.suppress(NothingToReplay):
                self._last()  # its finding says what is valid, also after a restart
        data.scan(self.shell, self._host, expression, given)

    def _settings(self) -> None:
        current = settings()
        for name, trait in sorted(AssertDoc.class_own_traits(config=True).items()):
            print(f"AssertDoc.{name} = {getattr(current, name)!r:<12} {trait.help}")
        print("Change one with `%config AssertDoc.name = value`.")
