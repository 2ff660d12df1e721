"""What happens in a notebook once a cell has met the assert: card, diagnosis, report, controls.

The extension tells it what the shell saw; the magics ask it for what the notebook knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .display import Shown
from .errors import NothingToReplay, UsageError
from .lazy import Lazy
from .recorder import Execution, LoaderWatch, Recorder
from .settings import settings

if TYPE_CHECKING:
    from . import detector, doctor, model, report, restart, salvage, session
    from . import scan as scans
    from .model import Bound, Crash, Place, Report
    from .session import stored
else:
    detector, doctor, model = Lazy("detector"), Lazy("doctor"), Lazy("model")
    report, restart, scans = Lazy("report"), Lazy("restart"), Lazy("scan")
    salvage, session, stored = Lazy("salvage"), Lazy("session"), Lazy("session.stored")


class Flow:
    """The state of one kernel's diagnosis."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.recorder = Recorder(shell, settings().integer_copy_bytes)
        self.watch = LoaderWatch(self.recorder.cells, self._number)
        self.report: Report | None = None  # the last one
        self.first: Execution | None = None  # the execution that killed the context
        self.crash: Crash | None = None  # what was seen of it
        self.found: Report | None = None  # the report about it; `report` may be about another cell
        self.shown: list[Shown] = []  # by the cell that runs
        self.room = ""  # of the notebook's last kernel, where that left something
        self._met, self._kept = 0, False  # the execution that met the error; its variables
        self._fix_awaited = False  # in the kernel after it

    def _number(self) -> int:
        current = self.recorder.current
        return current.number if current is not None else 0

    def crashed(
        self, sighting: detector.Sighting, current: Execution, tb: TracebackType | None
    ) -> None:
        """A cell met an assert (`tb`: None where its code swallowed the error)."""
        if self.crash is not None:
            self._show_stale(sighting, current, self._crash(sighting, current, tb).surface)
            return
        self.recorder.context_dead = True
        how = restart.adapter(self.shell)
        card = report.Card(
            execution_count=current.execution_count,
            how_to_restart=how.how,
            messenger=sighting.messenger,
            lines=sum(line.count for line in sighting.assert_lines),
            will_replay=settings().replay,
            stops_queue=tb is not None,
            interrupt=how.interrupt,
            simulated="nb_assertdoc.simulated_gpu" in sys.modules,
        )
        shown = Shown(self.shell, card)  # before all that takes time: a person waits
        self.shown.append(shown)
        self.room = session.key(self.shell)  # not that of the notebook's last kernel any more
        session.begin(self.room)
        crash = self._crash(sighting, current, tb)
        self.first, self.crash, self._met = current, crash, current.number
        if settings().replay:
            found = self._diagnose(current, crash, shown.progress)
            self.report = self.found = found
            shown.report(found, headless=how.headless)
        self.keep(shown)
        if self.found is not None and not how.headless:
            shown.controls(self.actions())

    def _crash(
        self, sighting: detector.Sighting, current: Execution, tb: TracebackType | None
    ) -> Crash:
        crash = doctor.crash_of(sighting, current.as_source(), tb, self.recorder.cells())
        return crash if tb is not None else doctor.swallowed(crash, current.as_source())

    def _diagnose(
        self, current: Execution, crash: Crash, progress: Callable[[str], None]
    ) -> Report:
        """Replay the cell; where it is innocent, those before it, whose work was still queued."""
        left = settings().replay_seconds * _patience()
        recent = [e for e in reversed(self.recorder.executions) if e.bindings is not None]
        suspects = [e for e in recent if e is current or doctor.replayable(e.source)]
        for suspect in suspects if len(suspects) > 1 else []:
            told = crash if suspect is current else doctor.of_earlier(crash, suspect)
            case = self.case(suspect, told)
            case.others_follow = True
            found = doctor.diagnose(case, seconds=left, progress=progress)
            if found.finding is not None:
                self.first, self.crash = suspect, told
                return found
            outcomes = [replay.outcome for replay in found.replays]
            if suspect is current and outcomes != ["clean"]:
                return found  # all has been tried, and the cell is not known to be innocent
            left -= sum(replay.seconds for replay in found.replays)
            if left < 1:
                return found
        return doctor.diagnose(self.case(current, crash), seconds=left, progress=progress)

    def _show_stale(self, sighting: detector.Sighting, current: Execution, surface: Place) -> None:
        first = self.first
        if self.found is None or first is None:
            print(
                "nb_assertdoc: this kernel's GPU context was dead before this cell began; the cell "
                "may well be fine.\nRestart the kernel. `%cpu_replay N` replays an earlier In [N]."
            )
            return
        again = doctor.stale(self.found, sighting, current, first, surface)
        shown = Shown(self.shell, None)
        self.shown.append(shown)
        shown.report(again, line_only=True)

    def look_back(self) -> None:
        """The first-time user's path: the extension is loaded after the crash."""
        error = getattr(sys, "last_value", None)
        sighting = detector.recognise(error) if error is not None else None
        if sighting is None:
            return
        tb = getattr(sys, "last_traceback", None)
        self._adopt_history(tb)
        self.recorder.context_dead = True
        count = self.first.execution_count if self.first else None
        if self.first is not None:
            cells = self.recorder.cells()
            self.crash = doctor.crash_of(sighting, self.first.as_source(), tb, cells)
        where = f"In [{count}]" if count else "An earlier cell"
        print(
            f"{where} died of a CUDA device-side assert: an index in the data is out of range.\n"
            "The GPU is fine; this kernel must be restarted before it can use the GPU again "
            f"({restart.adapter(self.shell).how}).\n"
            "`%cpu_replay` finds the line and the value first."
        )

    def _adopt_history(self, tb: TracebackType | None) -> None:
        """Make executions of IPython's own history, for what ran before the load."""
        history = list(self.shell.user_ns.get("In", []))[:-1]
        for count, source in enumerate(history):
            if count and source:
                execution = Execution(count, count, source, None, self.recorder.filename)
                self.recorder.executions.append(execution)
        while tb is not None:  # the last cell on the traceback is the cell that failed
            name = tb.tb_frame.f_code.co_filename
            match = [e for e in self.recorder.executions if e.filename == name]
            if match and self.first is None:
                self.first = match[-1]
            tb = tb.tb_next

    # ---- what the magics ask for

    def case(self, execution: Execution, crash: Crash | None) -> doctor.Case:
        """All that is known about one execution."""
        now = dict(self.shell.user_ns)
        gone: tuple[str, ...] = ()
        namespace: dict[str, Any] = now
        doubts: tuple[str, ...] = ()
        patches: tuple[Any, ...] = ()
        if execution.bindings is not None:
            namespace, gone = execution.bindings.namespace(now)
            doubts = execution.bindings.doubts(execution.source)
            if execution.joined and _acts_before_the_load(execution.source):
                doubts += ("the cell loaded the extension: variables are as they were then",)
            patches = tuple(execution.bindings.patches(namespace))
        else:
            doubts = ("the cell's start was not recorded: variables are as they are now",)
        loop = self.watch.latest
        executions = list(self.recorder.executions)
        before = executions[: executions.index(execution)] if execution in executions else []
        return doctor.Case(
            cell=execution.as_source(),
            sources=(*self.recorder.sources(), *execution.bodies),
            earlier=tuple(
                e.as_source() for e in before if e.succeeded is not False and not _ours(e.source)
            ),
            namespace=namespace,
            now=now,
            gone=tuple(g for g in gone if g in execution.source),
            crash=crash,
            rng=execution.rng,
            generators=execution.bindings.generators if execution.bindings is not None else {},
            patches=patches,
            integers=execution.integers,
            loop=loop if loop is not None and loop.execution == execution.number else None,
            loops=tuple(self.watch.loops.values()),
            cwd=os.getcwd(),
            doubts=doubts,
            keep_as=session.key(self.shell) if crash is not None and self._keeps() else None,
        )

    def body_case(self, body: str) -> doctor.Case:
        """A cell's body under `%%cpu_replay`, with the notebook's state as it is now."""
        current = self.recorder.current
        source = next((b for b in current.bodies if b.source == body), None) if current else None
        if source is None:  # `run_cell_magic` called by the user's own code
            count = current.execution_count if current else None
            name = self.recorder.filename(body, count)
            source = model.Source(filename=name, source=body, execution_count=count)
        executions = list(self.recorder.executions)
        return doctor.Case(
            cell=source,
            sources=(*self.recorder.sources(), source),
            earlier=tuple(e.as_source() for e in executions[:-1] if not _ours(e.source)),
            namespace=dict(self.shell.user_ns),
            cwd=os.getcwd(),
        )

    def replayed(self, execution: Execution | None, report: Report) -> None:
        """A replay that was asked for has ended; None: of a cell's body under `%%cpu_replay`."""
        self.report = report
        if execution is not None and execution is self.first:
            self.found = report

    def scan(
        self,
        expression: str = "",
        *,
        bound: Bound | None = None,
        most: int | None = None,
        progress: Callable[[int, int | None], None] = lambda done, total: None,
    ) -> tuple[scans.Scan, dict[str, Any]]:
        """Scan what an expression gives, or the data of the loop that failed; and its display.

        Without a bound that of the last report's finding is used. `most`: rows of a stream.
        Raises `UsageError` where it is not known what to scan, or against what.
        """
        valid = scans.Range(bound, "--range") if bound is not None else scans.range_of(self.report)
        loop, first = self.watch.latest, self.first
        failing = loop is not None and first is not None and loop.execution == first.number
        found = scans.scan_chosen(
            valid,
            self.shell.user_ns,
            named=scans.evaluated(expression, self.shell.user_ns) if expression else None,
            loop=scans.Loop(loop.loader(), loop.dataset()) if loop and failing else scans.Loop(),
            dead=self.recorder.context_dead,
            most=most or scans.STREAM_ROWS,
            progress=progress,
        )
        return found, report.scan_bundle(found)

    # ---- what outlives the kernel

    def _keeps(self) -> bool:
        """After a headless run there is nobody to give anything back to."""
        return settings().keep and not restart.adapter(self.shell).headless

    def keep(self, shown: Shown) -> None:
        """Once the crash's report is shown: keep the variables, and say so in the report."""
        if self._kept or self.first is None or not self._keeps():
            return
        names = self.shell.user_ns
        hidden = {n for n in names if n.startswith("_") or salvage.hidden(n, names[n])}
        self.room = session.key(self.shell)
        left = doctor.keep_variables(
            names,
            self.room,
            own=[n for n in names if n not in hidden and n not in self.shell.user_ns_hidden],
            earlier=self.recorder.sources(),
            integers=self.recorder.integers_now(),
            execution_count=self.first.execution_count,
            shell=self.shell,
        )
        self._kept = left is not None
        if left is not None and self.found is not None and self.report is self.found:
            self.report = self.found = doctor.with_stored(self.found, left, self.room)
            shown.update(self.found, doctor.describe(self.room))

    def last_room(self) -> str:
        """The session's room of the crash: of this kernel, or of the notebook's last one."""
        self.room = self.room or session.last_key(self.shell)
        return self.room

    def announce(self) -> None:
        """At the load, in the kernel after the crash: what waits. One look at the disk."""
        if self.recorder.context_dead:
            return
        room = self.last_room()
        if session.waiting(room):
            print(stored.announcement(room))
        self._fix_awaited = session.fix_awaited(room)

    def verify(
        self, source: str | None = None, progress: Callable[[str], None] = lambda text: None
    ) -> Report:
        """Run the failing batch on the CPU with the code as it is now; `clean`: it passes.

        `source`: the edited cell; without it, what was changed since the crash, else the suggested
        fix. `progress` is first told what is verified. Raises an `AssertdocError` where nothing is
        kept, or there is nothing to verify.
        """
        room, first = self.last_room(), self.first
        kept = session.load(room) if self.found is None else None
        report = self.found if self.found is not None else kept[0] if kept else None
        since = max(self._met, first.number) if first is not None else 0
        later = [e for e in self.recorder.executions if e.number > since and not _ours(e.source)]
        return doctor.verify(
            room,
            report,
            source=source,
            later=[e.as_source() for e in later if e.succeeded is not False],
            reruns=[e.as_source() for e in later],
            same_kernel=first is not None,
            progress=progress,
        )

    def finished(self, execution: Execution) -> None:
        """A cell ended well: one line if it is the fixed one, in the kernel after the crash."""
        torch = sys.modules.get("torch")
        if not self._fix_awaited or self.recorder.context_dead or torch is None:
            return
        if not torch.cuda.is_initialized():
            return
        line = doctor.confirmation(self.last_room(), execution.as_source(), torch.cuda.synchronize)
        if line is not None:
            self._fix_awaited = False
            print(line)

    def ranges(self, batches: int = 10, count: int | None = None) -> dict[str, Any]:
        """Minimum and maximum of what operators are given in the first batches of In [count].

        Without a count: of the cell that crashed, or ran a loop last. Raises `AssertdocError`.
        """
        execution = self.recorder.by_count(count) if count is not None else self._last_loop()
        if execution is None and count is not None:
            raise UsageError(f"there is no In [{count}] among the recorded cells")
        if execution is None:
            raise NothingToReplay("no cell has run a loop: %assertdoc ranges N CELL names a cell")
        case = self.case(execution, None)
        found = doctor.measure(case, batches, seconds=settings().asked_seconds)
        return report.ranges_bundle(found, execution.execution_count, batches)

    def _last_loop(self) -> Execution | None:
        ran = [e for e in self.recorder.executions if not _ours(e.source)]
        loop = self.watch.latest
        over_loader = [e for e in ran if loop is not None and e.number == loop.execution]
        looping = [e for e in ran if re.search(r"^\s*(for|while)\b", e.source, re.MULTILINE)]
        found = [*looping[-1:], *over_loader, *([self.first] if self.first is not None else [])]
        return found[-1] if found else self.recorder.last_failed

    def actions(self) -> dict[str, report.Action]:
        """The controls below the crash's report: what can be done here and now."""
        found: dict[str, report.Action] = {}
        if self.found is not None and (finding := self.found.finding) is not None:
            with contextlib.suppress(UsageError):  # nothing is kept to verify with
                source = doctor.suggested(self.last_room(), self.found)
                found["verify"] = report.Action(self._verified, source=source)
            if finding.bound is not None and not finding.bound.high_inclusive:
                found["scan"] = report.Action(lambda: report.Html(self.scan()[1]["text/html"]))
        adapter = restart.adapter(self.shell)
        if adapter.can_restart:

            def again() -> str:
                adapter.restart()
                return report.RESTARTING

            asks = report.before_restart(self.found, adapter.forewarn)
            found["restart"] = report.Action(again, asks=asks)
        return found

    def _verified(self, source: str) -> str:
        return report.Html(report.html(self.verify(source), restart.adapter(self.shell).how))


def _patience() -> float:
    """How many times the budget: on a busy machine a replay gets a share of the processors only."""
    try:
        return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    except (OSError, AttributeError):  # Windows has no load average
        return 1.0


def _acts_before_the_load(source: str) -> bool:
    """The cell did more than import before its `%load_ext nb_assertdoc`."""
    before = source.partition("%load_ext nb_assertdoc\n")[0]
    plain = ("%", "#", "import ", "from ", "if not torch.cuda")
    return not all(line.strip().startswith(plain) for line in before.splitlines() if line.strip())


def _ours(source: str) -> bool:
    """The cell did nothing for the notebook: it only asked us."""
    if source.lstrip().startswith(("%%cpu_replay", "%%assertdoc")):
        return True
    lines = [line for line in source.splitlines() if line.strip()]
    return bool(lines) and all(
        line.lstrip().startswith(("%assertdoc", "%cpu_replay", "%load_ext nb_assertdoc"))
        for line in lines
    )
