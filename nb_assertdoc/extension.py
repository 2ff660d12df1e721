"""Attaches to one shell: sees failures wherever they surface, and undoes itself on unload.

`set_custom_exc` is not enough: it misses the repr of the last expression, `%%time` on IPython 7.34,
`%run` and chained errors, and Colab takes its one slot. So the shell instance's `_showtraceback` is
wrapped (the original first, never raising), with `post_run_cell` as the belt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import commands
from .display import Shown
from .lazy import Lazy
from .magics import AssertdocMagics
from .recorder import Execution, LoaderWatch, Recorder, keep_pinned_frees_harmless
from .settings import settings, switched_off

if TYPE_CHECKING:
    from . import detector, doctor, model, report, restart, session
    from .model import Crash, Place, Report
else:
    detector, doctor, model = Lazy("detector"), Lazy("doctor"), Lazy("model")
    report, restart, session = Lazy("report"), Lazy("restart"), Lazy("session")

log = logging.getLogger("nb_assertdoc")
_ATTRIBUTE = "_nb_assertdoc"


class Attached:
    """The extension in one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.recorder = Recorder(shell, settings().integer_copy_bytes)
        self.watch = LoaderWatch(self.recorder.cells, self._number)
        self.tap = detector.StderrTap()
        self.report: Report | None = None
        self.first: Execution | None = None  # the execution that killed the context
        self.crash: Crash | None = None  # what was seen of it
        self.found: Report | None = None  # the report about it; `report` may be about another cell
        self._depth = 0
        self._recording = False  # the cell that runs has an execution
        self._seen = 0  # up to where the text of fd 2 has been looked at
        self._handled: BaseException | None = None  # the error that this cell's report is about
        self._pending: list[Any] = []
        self._allocator: bool | None = None
        self._busy = False

    # ---- coming and going

    def attach(self) -> None:
        """Hook into the shell."""
        shell = self.shell
        self._plain_showtraceback = shell._showtraceback
        self._was_own = "_showtraceback" in vars(shell)  # not its class's: ipykernel sets it
        shell._showtraceback = self._showtraceback
        self._undo_commands = commands.watch(shell)
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)
        self._magics = AssertdocMagics(shell, self)
        shell.register_magics(self._magics)
        self.tap.install()

    def detach(self) -> None:
        """Leave the shell as it was."""
        shell = self.shell
        if shell._showtraceback == self._showtraceback:
            if self._was_own:
                shell._showtraceback = self._plain_showtraceback
            else:
                del shell._showtraceback
        self._undo_commands()
        for event, callback in (("pre_run_cell", self._before), ("post_run_cell", self._after)):
            with contextlib.suppress(ValueError):
                shell.events.unregister(event, callback)
        for kind, names in (("line", ("assertdoc", "cpu_replay")), ("cell", ("cpu_replay",))):
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop(type(self._magics).__name__, None)
        if self._magics in shell.configurables:  # IPython's `Magics` enters itself
            shell.configurables.remove(self._magics)
        self.watch.uninstall()
        self.tap.uninstall()

    def obey_the_last_kernel(self) -> None:
        """`%assertdoc restart --launch-blocking` asked for it, before this kernel began."""
        if not session.launch_blocking_asked(session.key(self.shell)):
            return
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            print("CUDA has started already: load nb_assertdoc before the first use of the GPU.")
            return
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
        print("CUDA_LAUNCH_BLOCKING=1: CUDA runs synchronously, and slowly, until a restart.")

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

    # ---- hooks

    def _number(self) -> int:
        current = self.recorder.current
        return current.number if current is not None else 0

    def _before(self, info: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not getattr(info, "store_history", True) or switched_off():
            return
        try:
            self._handled, self._pending = None, []
            self._recording = False
            self.tap.ensure()
            self.watch.install()
            if self._allocator is None:
                self._allocator = keep_pinned_frees_harmless()
            cell_id = getattr(info, "cell_id", None)
            execution, error = self.recorder.begin(info.raw_cell, cell_id, self._seen)
            self._recording = True
            if error is not None and detector.recognise(error) is not None:
                # The copies met an assert that an earlier cell left behind without looking.
                self.recorder.context_dead = execution.dead_before = True
        except Exception:
            log.exception("nb_assertdoc: could not record the cell")

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._plain_showtraceback(etype, evalue, stb, *args, **kwargs)
        try:
            self._look(evalue)
        except KeyboardInterrupt:
            pass  # the reply is still the user's own error
        except BaseException:  # a user's exception may answer with SystemExit when it is asked
            log.exception("nb_assertdoc: could not look at the error")
        return result

    def _after(self, result: Any) -> None:
        self._depth = max(0, self._depth - 1)
        current = self.recorder.current
        info = getattr(result, "info", None)
        silent = not getattr(info, "store_history", True)
        if self._depth or current is None or silent or not self._recording:
            return
        try:
            error = result.error_before_exec or result.error_in_exec
            if self._handled is None and not switched_off():
                if error is not None:
                    self._look(error)
                elif not self.recorder.context_dead and _cuda_started():
                    self._swallowed(current)
            current.ended(error is None and self._handled is None)
            for shown in self._pending:
                shown.again()
            if self._handled is not None and error is None and not self._was_swallowed:
                # The old stack would go on with the next cell where the assert surfaced in a repr,
                # in %%time or in %%capture.
                result.error_in_exec = self._handled
        except KeyboardInterrupt:
            pass
        except BaseException:
            log.exception("nb_assertdoc: could not look back at the cell")

    # ---- the flow

    _was_swallowed = False

    def _look(self, error: BaseException | None) -> None:
        """An error was shown: act if it is an assert's."""
        if self._busy or error is None or error is self._handled or switched_off():
            return
        current = self.recorder.current
        mark = current.mark if current is not None else 0
        if detector.recognise(error) is None:  # cheap, and not ours: leave no trace
            return
        sighting = detector.recognise(error, self.tap.since(mark, settings().line_seconds))
        if sighting is None or current is None:
            return
        self._handled, self._was_swallowed = error, False
        self._act(sighting, current, error.__traceback__)

    def _swallowed(self, current: Execution) -> None:
        """The driver printed assert lines, and no error came: user code caught it."""
        seen = self.tap.mark()
        sighting = detector.recognise(None, self.tap.since(current.mark, 0.0))
        self._seen = seen
        if sighting is None:
            return
        self._handled, self._was_swallowed = RuntimeError("swallowed"), True
        self._act(sighting, current, None)

    def _act(
        self, sighting: detector.Sighting, current: Execution, tb: TracebackType | None
    ) -> None:
        self._busy = True
        try:
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
            self._pending.append(shown)
            if not settings().replay:
                return
            found = self._diagnose(current, crash, shown.progress)
            self.report = self.found = found
            shown.report(found, headless=how.headless)
            if not how.headless:
                shown.controls(found, self.actions())
        finally:
            self._busy = False

    def _diagnose(
        self, current: Execution, crash: Crash, progress: Callable[[str], None]
    ) -> Report:
        """Replay the cell; where it is innocent, those before it, whose work was still queued."""
        left = settings().replay_seconds
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
        self._pending.append(shown)
        shown.report(again, line_only=True)

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
            cwd=_cwd(),
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
            cwd=_cwd(),
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


def _ours(source: str) -> bool:
    """The cell did nothing for the notebook: it only asked us."""
    if source.lstrip().startswith("%%cpu_replay"):
        return True
    lines = [line for line in source.splitlines() if line.strip()]
    return bool(lines) and all(
        line.lstrip().startswith(("%assertdoc", "%cpu_replay", "%load_ext nb_assertdoc"))
        for line in lines
    )


def _cuda_started() -> bool:
    """This process has a context that could have died; no CUDA call is made."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _cwd() -> str:
    return os.getcwd()


def attached(shell: Any) -> Attached | None:
    """The extension of a shell, if it is loaded."""
    return getattr(shell, _ATTRIBUTE, None)


def load(shell: Any) -> None:
    """`%load_ext nb_assertdoc`: silent, unless the crash has been already."""
    if settings(shell) not in shell.configurables:  # `%config AssertDoc.x = ...` finds it there
        shell.configurables.append(settings())
    if attached(shell) is not None or switched_off():
        return
    mine = Attached(shell)
    mine.attach()
    setattr(shell, _ATTRIBUTE, mine)
    try:
        mine.obey_the_last_kernel()
        mine.look_back()
    except Exception:
        log.exception("nb_assertdoc: could not look back")


def unload(shell: Any) -> None:
    """`%unload_ext nb_assertdoc`."""
    if settings() in shell.configurables:
        shell.configurables.remove(settings())
    mine = attached(shell)
    if mine is not None:
        mine.detach()
        delattr(shell, _ATTRIBUTE)


__all__ = ["Attached", "attached", "load", "unload"]
