"""Attaches to one shell: sees failures wherever they surface, and undoes itself on unload.

`set_custom_exc` is not enough: it misses the repr of the last expression, `%%time` on IPython 7.34,
`%run` and chained errors, and Colab takes its one slot. So the shell instance's `_showtraceback` is
wrapped (the original first, never raising), with `post_run_cell` as the belt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from . import commands
from .flow import Flow
from .lazy import Lazy
from .magics import AssertdocMagics
from .recorder import Execution, keep_pinned_frees_harmless
from .settings import settings, switched_off

if TYPE_CHECKING:
    from . import detector, session
else:
    detector, session = Lazy("detector"), Lazy("session")

log = logging.getLogger("nb_assertdoc")
_ATTRIBUTE = "_nb_assertdoc"
_MAGICS = ("assertdoc", "cpu_replay")


class Attached:
    """The extension in one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.flow = Flow(shell)
        self.tap = detector.StderrTap()
        self._depth = 0
        self._recording = False  # the cell that runs has an execution
        self._told = False  # that the recorder failed
        self._seen = 0  # up to where the text of fd 2 has been looked at
        self._ended = detector.ended_children()  # by then
        self._handled: BaseException | None = None  # the error that this cell's report is about
        self._was_swallowed = False
        self._advised: Execution | None = None  # told last that another process died
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
        self._magics = AssertdocMagics(shell, self.flow)
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
        for kind, names in (("line", _MAGICS), ("cell", _MAGICS)):
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop(type(self._magics).__name__, None)
        if self._magics in shell.configurables:  # IPython's `Magics` enters itself
            shell.configurables.remove(self._magics)
        self.flow.watch.uninstall()
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

    # ---- hooks

    def join(self) -> None:
        """The cell that loads the extension goes on with whatever follows in it: watch that too."""
        cell = _running_cell(self.shell)
        if cell is not None and self._is_cell(SimpleNamespace(**cell)):
            self._before(SimpleNamespace(**cell))
            if cell["silent"]:  # no event will tell of its end
                self._depth = 0
            current = self.flow.recorder.current
            if current is not None:
                current.joined = True
                if cell["store_history"]:  # its source is in the history already
                    current.execution_count = len(self.shell.history_manager.input_hist_parsed) - 1

    def _is_cell(self, info: Any) -> bool:
        """Front ends send executions without history, of their own; a terminal sends none."""
        return getattr(info, "store_history", True) or getattr(self.shell, "kernel", None) is None

    def _before(self, info: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not self._is_cell(info) or switched_off():
            return
        try:
            self._handled, self.flow.shown = None, []
            self._recording = False
            self.tap.ensure()
            self.flow.watch.install()
            if self._allocator is None:
                self._allocator = keep_pinned_frees_harmless()
            cell_id = getattr(info, "cell_id", None)
            before = self.flow.recorder.current
            try:
                _, error = self.flow.recorder.begin(info.raw_cell, cell_id, self._seen)
            finally:
                self._recording = self.flow.recorder.current is not before
            if error is not None and detector.recognise(error) is not None:
                # The copies met an assert that an earlier cell left behind without looking.
                self.flow.recorder.context_dead = True
        except KeyboardInterrupt:
            _interrupt_later(sys._getframe())  # it is meant for the user's code
        except BaseException:  # a user's object may answer with SystemExit
            if not self._told:  # what one cell's variables do to us, the next ones' do too
                log.exception("nb_assertdoc: could not record all of the cell")
            self._told = True

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
        current = self.flow.recorder.current
        info = getattr(result, "info", None)
        if self._depth or current is None or not self._is_cell(info) or not self._recording:
            return
        try:
            error = result.error_before_exec or result.error_in_exec
            if self._handled is None and not switched_off():
                if error is not None:
                    self._look(error)
                if self._handled is None and not self.flow.recorder.context_dead:
                    self._read_lines(current)
            current.ended(error is None and self._handled is None)
            if current.succeeded:
                self.flow.finished(current)
            for shown in self.flow.shown:
                shown.again()
            if self._handled is not None and error is None and not self._was_swallowed:
                # The old stack would go on with the next cell where the assert surfaced in a repr,
                # in %%time or in %%capture.
                result.error_in_exec = self._handled
        except KeyboardInterrupt:
            pass
        except BaseException:
            log.exception("nb_assertdoc: could not look back at the cell")

    def _look(self, error: BaseException | None) -> None:
        """An error was shown: act if it is an assert's."""
        if self._busy or error is None or error is self._handled or switched_off():
            return
        current = self.flow.recorder.current
        mark = current.mark if current is not None else 0
        if detector.recognise(error) is None:  # cheap, and not ours: leave no trace
            return
        sighting = detector.recognise(error, self.tap.since(mark, settings().line_seconds))
        if sighting is None or current is None:
            return
        if sighting.of_child or not detector.cuda_started():
            self._advise(sighting, current)
            return
        self._handled, self._was_swallowed = error, False
        self._act(sighting, current, error.__traceback__)

    def _read_lines(self, current: Execution) -> None:
        """Assert lines, and no error that tells of them: user code caught it, or a child died."""
        before, self._ended = self._ended, detector.ended_children()
        started = detector.cuda_started()
        if not started and before == self._ended:
            return  # nobody could have printed any
        sighting = detector.recognise(None, self.tap.since(current.mark, 0.0))
        self._seen = self.tap.mark()
        if sighting is None:
            return
        workers = any(
            loop.workers
            for loop in self.flow.watch.loops.values()
            if loop.execution == current.number
        )
        programs = (before != self._ended and not workers) or detector.runs_programs()
        if not started or (programs and detector.contexts_answer()):
            self._advise(sighting, current)
            return
        self._handled, self._was_swallowed = RuntimeError("swallowed"), True
        self._act(sighting, current, None)

    def _advise(self, sighting: detector.Sighting, current: Execution) -> None:
        """Another process died: say so, once a cell."""
        if sighting.certain and self._advised is not current:
            self._advised = current
            commands.advise(sighting)

    def _act(
        self, sighting: detector.Sighting, current: Execution, tb: TracebackType | None
    ) -> None:
        self._busy = True  # an error while the report is made is not a second crash
        try:
            self.flow.crashed(sighting, current, tb)
        finally:
            self._busy = False


def _running_cell(shell: Any) -> dict[str, Any] | None:
    """The outermost cell of the shell that runs, as the arguments of IPython's `run_cell_async`."""
    found = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run_cell_async" and frame.f_locals.get("self") is shell:
            names = ("raw_cell", "store_history", "cell_id", "silent")
            found = {name: frame.f_locals.get(name) for name in names}
        frame = frame.f_back
    return found


def _interrupt_later(hook: FrameType) -> None:
    """Send the interrupt once more, as soon as the hook is over and the user's code runs."""
    main = threading.main_thread().ident

    def wait() -> None:
        while main is not None:
            frame, names = sys._current_frames().get(main), set()
            while frame is not None and frame is not hook:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            if frame is None and "run_cell_async" not in names:
                return  # the cell has ended
            if frame is None and "run_code" in names:
                signal.pthread_kill(main, signal.SIGINT)
                return
            time.sleep(0.001)

    threading.Thread(target=wait, daemon=True).start()


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
        mine.flow.look_back()  # before anything is copied from a GPU that may be dead
        mine.join()
        mine.flow.announce()
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
