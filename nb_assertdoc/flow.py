"""What happens in a notebook once a cell has met the assert: card, diagnosis, report, controls.

The extension tells it what the shell saw; the magics ask it for what the notebook knows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .display import Shown
from .lazy import Lazy
from .recorder import Execution, LoaderWatch, Recorder
from .settings import settings

if TYPE_CHECKING:
    from . import detector, doctor, model, report, restart
    from .model import Crash, Place, Report
else:
    detector, doctor, model = Lazy("detector"), Lazy("doctor"), Lazy("model")
    report, restart = Lazy("report"), Lazy("restart")


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

    def _number(self) -> int:
        current = self.recorder.current
        return current.number if current is not None else 0

    def crashed(
        self, sighting: detector.Sighting, current: Execution, tb: TracebackType | None
    ) -> None:
        """A cell met an assert (`tb`: None where its code swallowed the error)."""
        cells = self.recorder.cells()
        crash = doctor.crash_of(sighting, current.as_source(), tb, cells)
        if tb is None:
            crash = doctor.swallowed(crash, current.as_source())
        if self.crash is not None:
            self._show_stale(sighting, current, crash.surface)
            return
        self.recorder.context_dead = True
        self.first, self.crash = current, crash
        how = restart.adapter(self.shell)
        card = report.Card(
            execution_count=current.execution_count,
            how_to_restart=how.how,
            messenger=sighting.messenger,
            lines=sum(line.count for line in sighting.assert_lines),
            will_replay=settings().replay,
            stops_queue=tb is not None,
        )
        shown = Shown(self.shell, card)
        self.shown.append(shown)
        if not settings().replay:
            return
        found = self._diagnose(current, crash, shown.progress)
        self.report = self.found = found
        shown.report(found, headless=how.headless)
        if not how.headless:
            shown.controls(found, self.actions())

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
            cwd=os.getcwd(),
            doubts=doubts,
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

    def actions(self) -> dict[str, Any]:
        """The controls below a report."""
        adapter = restart.adapter(self.shell)
        found: dict[str, Any] = {}
        if adapter.can_restart:

            def again() -> str:
                adapter.restart()
                return f"Restarting. {adapter.forewarn}".strip()

            found["restart"] = again
        return found


def _patience() -> float:
    """How many times the budget: on a busy machine a replay gets a share of the processors only."""
    try:
        return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    except (OSError, AttributeError):  # Windows has no load average
        return 1.0


def _ours(source: str) -> bool:
    """The cell did nothing for the notebook: it only asked us."""
    if source.lstrip().startswith("%%cpu_replay"):
        return True
    lines = [line for line in source.splitlines() if line.strip()]
    return bool(lines) and all(
        line.lstrip().startswith(("%assertdoc", "%cpu_replay", "%load_ext nb_assertdoc"))
        for line in lines
    )
