"""Runs one order in a fresh kernel, within limits of time and memory, and reads its evidence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import msgspec

from .errors import WorkerError
from .model import Evidence, Order, from_json, to_json

START_SECONDS = 60.0  # for the kernel itself: a cold disk is slow, a broken one never answers
_GRACE = 2.0  # between an interrupt and the kill
_FINISH = 10.0  # for writing the evidence on a busy machine
_POLL = 0.1

Progress = Callable[[str], None]

# The folder that holds us may also hold files named as modules of Python's own are, and a folder
# before it on the path another nb_assertdoc, which the kernel's configuration may have loaded.
_FIND_US = """
def _find_us(home, init):
    import importlib.util, sys
    if home not in sys.path:
        sys.path.append(home)
    if getattr(sys.modules.get("nb_assertdoc"), "__file__", None) != init:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nb_assertdoc"]:
            del sys.modules[name]
        spec = importlib.util.spec_from_file_location("nb_assertdoc", init)
        sys.modules["nb_assertdoc"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["nb_assertdoc"])
_find_us({home!r}, {init!r})
del _find_us
"""


def run(
    order: Order,
    folder: Path,
    *,
    memory_bytes: int | None = None,
    progress: Progress = lambda text: None,
) -> Evidence:
    """Replay `order` in `folder` (which holds the capsule, if any) and return what was found.

    `order.seconds` counts from the moment the cell begins: starting a kernel and importing torch
    are the floor of every replay. A KeyboardInterrupt ends the worker and is raised again.

    Raises `WorkerError` when the kernel does not start, or dies without evidence.
    """
    (folder / "order.json").write_bytes(to_json(order))
    (folder / "evidence.json").unlink(missing_ok=True)
    with _own_loop(), _Kernel(folder) as kernel:
        kernel.begin(f"import nb_assertdoc.worker as _w; _w.prepare({str(folder)!r})")
        progress("loading the notebook's state")
        started = time.monotonic()
        limit = _Limit(kernel.pid, memory_bytes)
        prepared = kernel.wait(time.monotonic() + max(START_SECONDS, order.seconds), limit)
        if not prepared:
            return _evidence(folder, order, limit, started, kernel)
        deadline = time.monotonic() + order.seconds
        for source in order.history:
            progress(f"running In [{source.execution_count}] again for what it made")
            kernel.request(f"_w.begin_earlier({source.execution_count})")
            kernel.wait(deadline, limit)
            kernel.request(source.source, history=True)
            if not kernel.wait(deadline, limit, stop_on_error=False):
                return _evidence(folder, order, limit, started, kernel)
        if order.history:
            kernel.request("_w.begin_cell()")
            kernel.wait(deadline, limit)
        progress("replaying the cell on the CPU")
        kernel.request(order.cell.source, history=True)
        kernel.wait(deadline, limit, stop_on_error=False)
        if kernel.alive():
            kernel.request("_w.finish()")
            kernel.wait(time.monotonic() + _FINISH, limit)
        return _evidence(folder, order, limit, started, kernel)


def interrupted(folder: Path, engine: str) -> Evidence:
    """What a replay in `folder` that ended with a KeyboardInterrupt had found by then."""
    path = folder / "evidence.json"
    if path.is_file():  # a fault is written down as it is found
        return from_json(path.read_bytes(), Evidence)
    return Evidence(engine=engine, outcome="stopped", seconds=0.0, differences=("interrupted",))


def _evidence(
    folder: Path, order: Order, limit: _Limit, started: float, kernel: _Kernel
) -> Evidence:
    path = folder / "evidence.json"
    if path.is_file():
        found = from_json(path.read_bytes(), Evidence)
        if not limit.reason or found.outcome == "fault":
            return found
        differences = (limit.reason, *found.differences)  # the KeyboardInterrupt in it was ours
        replace = msgspec.structs.replace
        return replace(found, outcome="stopped", error=None, differences=differences)
    if limit.reason:
        return Evidence(
            engine=order.engine,
            outcome="stopped",
            seconds=time.monotonic() - started,
            cell_seconds=order.seconds,
            differences=(limit.reason,),
            peak_rss_bytes=limit.peak or None,
        )
    raise WorkerError(kernel.how_it_ended())


def try_out(code: str, folder: Path) -> float:
    """Run `code` in a kernel as a replay would have it; the seconds until that kernel answered.

    Raises `WorkerError` when it does not start, or `code` fails there.
    """
    started = time.monotonic()
    with _own_loop(), _Kernel(folder) as kernel:
        ready = time.monotonic() - started
        kernel.begin(code)
        if not kernel.wait(time.monotonic() + START_SECONDS, _Limit(kernel.pid, None)):
            raise WorkerError(kernel.how_it_ended())
        return ready


class _Limit:
    """Memory of the worker, looked at now and then."""

    def __init__(self, pid: int, most: int | None) -> None:
        self._pid = pid
        self._most = most
        self.peak = 0
        self.reason = ""

    def exceeded(self) -> bool:
        """True when the worker holds more memory than allowed."""
        if self._most is None:
            return False
        import psutil

        try:
            now = psutil.Process(self._pid).memory_info().rss
        except psutil.Error:
            return False
        self.peak = max(self.peak, now)
        if now > self._most:
            self.reason = f"the replay needed more than {self._most / 1e9:.1f} GB of memory"
        return bool(self.reason)


@contextlib.contextmanager
def _own_loop() -> Iterator[None]:
    """Keep jupyter_client before 8 out of the loop that runs, which is that of the user's kernel.

    It would run its calls nested in that loop, and with them the kernel's own messages; the loop
    then misses handles that it had counted (`IndexError: pop from an empty deque`), and the kernel
    dies.
    """
    from jupyter_client._version import version_info

    running = asyncio._get_running_loop()
    if running is None or version_info >= (8,):
        yield
        return
    own = asyncio.new_event_loop()
    try:
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(own)
        yield
    finally:
        with _no_interrupt():
            asyncio.set_event_loop(running)
            asyncio._set_running_loop(running)
            with contextlib.suppress(Exception):
                own.close()


class _Kernel:
    """A fresh kernel of this interpreter, over ipc where the system has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sockets = ""
        self._log: Any = None
        self._manager: Any = None

    def __enter__(self) -> _Kernel:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        self._sockets = tempfile.mkdtemp(prefix="nba-")  # a socket's path has 107 bytes at most
        options: dict[str, Any] = {}
        if os.name == "posix":
            options = {"transport": "ipc", "ip": os.path.join(self._sockets, "k")}
        self._manager = KernelManager(
            connection_file=os.path.join(self._sockets, "c.json"), **options
        )
        self._manager._kernel_spec = KernelSpec(
            argv=[
                sys.executable,
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
                "--HistoryManager.enabled=False",
            ],
            display_name="nb_assertdoc replay",
            language="python",
        )
        self._log = open(self._folder / "kernel.log", "wb")
        try:
            with _no_interrupt():
                self._manager.start_kernel(
                    env=_environment(), cwd=str(self._folder), stdout=self._log, stderr=self._log
                )
            self._client = self._manager.blocking_client()
            self._client.start_channels()
            self._client.wait_for_ready(timeout=START_SECONDS)
        except KeyboardInterrupt:
            self.__exit__()
            raise
        except Exception as error:
            words = self.last_words()
            self.__exit__()
            raise WorkerError(f"the replay's kernel did not start: {error} {words}") from error
        return self

    def __exit__(self, *exc: object) -> None:
        with _no_interrupt():
            client = getattr(self, "_client", None)
            if client is not None:
                client.stop_channels()
            if self._manager.has_kernel:
                self._manager.shutdown_kernel(now=True)
            self._manager.cleanup_resources()
            self._log.close()
            shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        return int(getattr(self._manager.provisioner, "pid", None) or -1)

    def alive(self) -> bool:
        """The worker runs; it leaves by itself once it has found a fault."""
        return bool(self._manager.is_alive())

    def begin(self, code: str) -> None:
        """The first request: `code` finds the very package that this one is, wherever it lies."""
        init = Path(__file__).resolve().parent / "__init__.py"
        self.request(_FIND_US.format(home=str(init.parents[1]), init=str(init)) + code)

    def request(self, code: str, history: bool = False) -> None:
        """Execute `code`; `wait` waits for it."""
        self._asked = self._client.execute(
            code, silent=False, store_history=history, allow_stdin=False, stop_on_error=False
        )

    def wait(self, deadline: float, limit: _Limit, stop_on_error: bool = True) -> bool:
        """Wait for the reply; False when the worker ended, broke a limit, or (where that matters)
        the request failed."""
        interrupted = False
        while True:
            try:
                reply = self._client.get_shell_msg(timeout=_POLL)
            except Empty:
                reply = None
            if reply is not None and reply["parent_header"].get("msg_id") == self._asked:
                failed = reply["content"]["status"] == "error"
                if failed and stop_on_error:
                    content = reply["content"]
                    self._words = f"{content.get('ename')}: {content.get('evalue')}"
                return not interrupted and not (failed and stop_on_error)
            self._drain()
            if not self.alive():
                return False
            if limit.exceeded():
                self._manager.shutdown_kernel(now=True)
                return False
            if time.monotonic() > deadline:
                limit.reason = limit.reason or "the replay's time was up"
                if interrupted:
                    self._manager.shutdown_kernel(now=True)
                    return False
                interrupted = True
                deadline = time.monotonic() + _GRACE
                self._manager.interrupt_kernel()

    def _drain(self) -> None:
        """Throw away what the worker published, so that nothing piles up."""
        while True:
            try:
                self._client.get_iopub_msg(timeout=0)
            except Empty:
                return

    _words = ""

    def how_it_ended(self) -> str:
        """Why there is no evidence, in words."""
        words = self.last_words()
        if self.alive():
            return f"the replay could not be prepared: {words or 'it gave no reason'}"
        process = getattr(self._manager.provisioner, "process", None)
        code = process.poll() if process is not None else None
        how = "died"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (as the system does when memory runs out)"
        elif code is not None:
            how = f"ended by itself with exit code {code}"
        return f"the replay's process {how}" + (f": {words}" if words else "")

    def last_words(self) -> str:
        """The last line that the kernel wrote before it died: of a traceback, the error."""
        try:
            log = (self._folder / "kernel.log").read_text(errors="replace")[-2000:]
        except OSError:
            log = ""
        return self._words or log.strip().rpartition("\n")[2]


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Hold a KeyboardInterrupt back: half a start, or half an end, would leave a kernel behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if came:
        raise KeyboardInterrupt


def _environment() -> dict[str, str]:
    """The host's environment with CUDA hidden and everything off that would cost or harm."""
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    env.update(
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
        TORCHDYNAMO_DISABLE="1",
        PYTORCH_JIT="0",
        TOKENIZERS_PARALLELISM="false",
        NB_ASSERTDOC="off",
        MPLBACKEND="agg",  # a replay draws nothing
        PYDEVD_DISABLE_FILE_VALIDATION="1",
    )
    return env
