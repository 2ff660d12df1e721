"""What happens in a notebook once a cell has met the assert: card, diagnosis, report, controls.

The extension tells it what the shell saw; the magics ask it for what the notebook knows.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .aftermath import Aftermath, ours
from .display import Shown
from .errors import NothingToReplay, UsageError
from .lazy import Lazy
from .recorder import Execution, LoaderWatch, Recorder
from .settings import AssertDoc, settings

if TYPE_CHECKING:
    from . import detector, doctor, frames, history, model, report, restart, session
    from . import scan as scans
    from .model import Bound, Crash, Place, Report
else:
    detector, doctor, model = Lazy("detector"), Lazy("doctor"), Lazy("model")
    frames, history, session = Lazy("frames"), Lazy("history"), Lazy("session")
    report, restart, scans = Lazy("report"), Lazy("restart"), Lazy("scan")


_MOST_MEASURED = 3  # cells that are replayed until one has something to check


class Flow(Aftermath):
    """The state of one kernel's diagnosis."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell, Recorder(shell, settings().integer_copy_bytes))
        self.watch = LoaderWatch(self.recorder.cells, self._number)
        self.shown: list[Shown] = []  # by the cell that runs

    def _number(self) -> int:
        current = self.recorder.current
        return current.number if current is not None else 0

    def crashed(
        self, sighting: detector.Sighting, current: Execution, tb: TracebackType | None
    ) -> None:
        """A cell met an assert (`tb`: None where its code swallowed the error)."""
        current.met_dead = True
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
        self.first, self.crash, self.met = current, crash, current.number
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
        cells = self.recorder.cells()
        current.reached = doctor.reached_line(current, tb, cells)
        crash = doctor.crash_of(sighting, current.as_source(), tb, cells)
        return crash if tb is not None else doctor.swallowed(crash, current.as_source())

    def _diagnose(
        self, current: Execution, crash: Crash, progress: Callable[[str], None]
    ) -> Report:
        """Replay the cell; where it is innocent, those before it, whose work was still queued."""
        left = settings().replay_seconds * _patience()
        recent = [e for e in reversed(self.recorder.executions) if e.bindings is not None]
        suspects = [e for e in recent if e is current or doctor.replayable(e.source)]
        return self._search(suspects, current, crash, left, progress)

    def _search(
        self,
        suspects: Sequence[Execution],
        current: Execution,
        crash: Crash,
        left: float,
        progress: Callable[[str], None] = lambda text: None,
        max_steps: int | None = None,
    ) -> Report:
        """Replay one after the other in `left` seconds until one has the fault."""
        best: Report | None = None
        for number, suspect in enumerate(suspects if len(suspects) > 1 else []):
            told = crash if suspect is current else doctor.of_earlier(crash, suspect)
            case = self.case(suspect, told)
            case.others_follow, case.max_steps = True, max_steps
            found = doctor.diagnose(case, seconds=left, progress=progress)
            if found.finding is not None:
                self.first, self.crash = suspect, told
                return found
            outcomes = [replay.outcome for replay in found.replays]
            if suspect is current and outcomes != ["clean"]:
                best = found  # all has been tried, and the cell is not known to be innocent
                if not suspect.adopted:
                    return best
            left -= sum(replay.seconds for replay in found.replays)
            if left < 1:
                return doctor.go_on(best or found, suspects[number + 1 :])
        case = self.case(current, crash)
        case.max_steps = max_steps
        return best or doctor.diagnose(case, seconds=left, progress=progress)

    def search(self, seconds: float, max_steps: int | None = None) -> Report:
        """Replay the cell that met the error; where nothing tells whether it was the first to fail,
        the cells before it as well. Raises `NothingToReplay` where no error was met."""
        first, crash = self.first, self.crash
        if first is None or crash is None:
            raise NothingToReplay("no cell has met the assert so far")
        suspects = [first, *self._unknown_before(first)]
        found = self._search(suspects, first, crash, seconds, max_steps=max_steps)
        self.report = self.found = found
        return found

    def _unknown_before(self, first: Execution) -> list[Execution]:
        """The executions before the load, the newest first, that may have killed the context."""
        if not first.adopted:
            return []
        found = {first.source: first}
        for each in reversed(self.recorder.executions):
            if each.number < first.number and each.adopted and history.calls(each.source):
                found.setdefault(each.source, each)
        return list(found.values())[1:]

    def _show_stale(self, sighting: detector.Sighting, current: Execution, surface: Place) -> None:
        first = self.first
        if self.found is None or first is None:
            print(
                "nb_assertdoc: this kernel's GPU context was dead before this cell began; the cell "
                "may well be fine.\n`%cpu_replay N` replays an earlier In [N]: do so before you "
                "restart."
            )
            return
        again = doctor.stale(self.found, sighting, current, first, surface)
        shown = Shown(self.shell, None)
        self.shown.append(shown)
        shown.report(again, line_only=True)

    def look_back(self) -> None:
        """The first-time user's path: the extension is loaded after the crash."""
        error = getattr(sys, "last_value", None)
        sighting = detector.recognise_own(error)
        if sighting is None:
            self.loaded_again()
            return
        tb = getattr(sys, "last_traceback", None)
        self._adopt_history(tb)
        self.recorder.context_dead = True
        count = self.first.execution_count if self.first else None
        if self.first is not None:
            cells = self.recorder.cells()
            self.crash = doctor.crash_of(sighting, self.first.as_source(), tb, cells)
        where = f"In [{count}]" if count else "An earlier cell"
        more = ""
        if self.first is not None and self._unknown_before(self.first):
            more = " A cell before it may have killed the GPU: those are tried next."
        print(
            f"{where} died of a CUDA device-side assert: an index in the data is out of range.\n"
            "The GPU is fine; this kernel must be restarted before it can use the GPU again "
            f"({restart.adapter(self.shell).how}).\n"
            f"`%cpu_replay` finds the line and the value first.{more}"
        )

    def _adopt_history(self, tb: TracebackType | None) -> None:
        """Make executions of IPython's own history, for what ran before the load."""
        history = list(self.shell.user_ns.get("In", []))[:-1]
        for count, source in enumerate(history):
            if count and source:
                self.recorder.adopt(count, source)
        while tb is not None:  # the last cell on the traceback is the cell that failed
            name = tb.tb_frame.f_code.co_filename
            match = [e for e in self.recorder.executions if e.filename == name]
            if match and self.first is None:
                self.first, self.met = match[-1], match[-1].number
            tb = tb.tb_next

    # ---- what the magics ask for

    def case(self, execution: Execution, crash: Crash | None) -> doctor.Case:
        """All that is known about one execution."""
        now = dict(self.shell.user_ns)
        loop = self.watch.latest
        executions = list(self.recorder.executions)
        place = executions.index(execution) if execution in executions else 0
        before = executions[:place]
        start = doctor.start_of(execution, now, before, executions[place + 1 :])
        return doctor.Case(
            cell=_replayed(execution),
            sources=(*self.recorder.sources(), *execution.bodies),
            earlier=tuple(
                e.as_source() for e in before if e.succeeded is not False and not ours(e.source)
            ),
            namespace=start.namespace,
            now=now,
            gone=start.gone,
            crash=crash,
            rng=execution.rng if execution.bindings is not None else None,
            random={e.execution_count: e.rng for e in (*before, execution) if e.rng is not None},
            seconds={e.execution_count: e.seconds for e in before},
            generators=execution.bindings.generators if execution.bindings is not None else {},
            patches=start.patches,
            integers=start.integers,
            loop=loop if loop is not None and loop.execution == execution.number else None,
            loops=tuple(self.watch.loops.values()),
            cwd=os.getcwd(),
            doubts=start.doubts,
            keep_as=session.key(self.shell) if crash is not None and self.keeps() else None,
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
            earlier=tuple(e.as_source() for e in executions[:-1] if not ours(e.source)),
            namespace=dict(self.shell.user_ns),
            rng=current.rng if current is not None else None,
            random={e.execution_count: e.rng for e in executions if e.rng is not None},
            seconds={e.execution_count: e.seconds for e in executions[:-1]},
            generators=current.bindings.generators if current and current.bindings else {},
            integers=self.recorder.integers_now(),
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
        loop, first, dead = self.watch.latest, self.first, self.recorder.context_dead
        failing = loop is not None and first is not None and loop.execution == first.number
        found = scans.scan_chosen(
            valid,
            self.shell.user_ns,
            named=scans.evaluated(expression, self.shell.user_ns, dead) if expression else None,
            loop=scans.FailedLoop(loop.loader(), loop.dataset()) if loop and failing else None,
            dead=dead,
            most=most or scans.STREAM_ROWS,
            progress=progress,
        )
        return found, report.scan_bundle(found)

    # ---- measures and controls

    def ranges(
        self, batches: int = 10, count: int | None = None, body: str | None = None
    ) -> dict[str, Any]:
        """Minimum and maximum of what operators are given in the first batches of In [count], or of
        a cell's `body`.

        Without these: of the newest cell whose loop checks anything, those over a DataLoader first.
        Raises `AssertdocError`.
        """
        if body is not None:
            current = self.recorder.current
            number = current.execution_count if current is not None else None
            return self._measured(self.body_case(body), batches, number)[0]
        if count is not None:
            execution = self.recorder.by_count(count)
            if execution is None:
                raise UsageError(f"there is no In [{count}] among the recorded cells")
            return self._measured(self.case(execution, None), batches, count)[0]
        chosen = self._loops()
        if not chosen:
            raise NothingToReplay(
                "no cell has run a loop: `%assertdoc ranges N CELL` takes In [CELL], and "
                "`%%assertdoc ranges N`, as the first line of a cell, the cell below it"
            )
        for execution, why in chosen[:_MOST_MEASURED]:
            told = f"{why}; `%assertdoc ranges {batches} CELL` takes In [CELL]."
            case = self.case(execution, None)
            shown, checked = self._measured(case, batches, execution.execution_count, told)
            if checked:
                break
        return shown

    def _measured(
        self, case: doctor.Case, batches: int, count: int | None, why: str = ""
    ) -> tuple[dict[str, Any], bool]:
        """The display, and whether anything was checked."""
        found = doctor.measure(case, batches, seconds=settings().asked_seconds)
        return report.ranges_bundle(found, count, batches, why), bool(found.measured)

    def _loops(self) -> list[tuple[Execution, str]]:
        """Cells that may have something to measure, the best first, and why each is taken."""
        ran = [e for e in reversed(self.recorder.executions) if not ours(e.source)]
        known = [(self.first, "This cell failed")] if self.first is not None else []
        loaders = self.watch.executions
        over = [e for e in ran if e.number in loaders]
        known += [(e, "Taken as the newest cell that looped over a DataLoader") for e in over]
        looping = [e for e in ran if frames.loops(e.source) and e not in over]
        known += [(e, "Taken as the newest cell with a loop") for e in looping]
        failed = self.recorder.last_failed
        known += [(failed, "This cell failed")] if failed is not None and not known else []
        return known

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
    """How many times the budget: on a busy machine a replay gets a share of the processors only.

    A budget that the user has set is kept to.
    """
    if settings().replay_seconds != AssertDoc.replay_seconds.default_value:
        return 1.0
    try:
        return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    except (OSError, AttributeError):  # Windows has no load average
        return 1.0


def _replayed(execution: Execution) -> model.Source:
    """What is replayed of a cell: of one that asked us, with a cell magic, the cell below that."""
    asked = execution.source.lstrip().startswith(("%%cpu_replay", "%%assertdoc"))
    return execution.bodies[0] if asked and execution.bodies else execution.as_source()
