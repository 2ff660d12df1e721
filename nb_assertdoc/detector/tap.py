"""A copy of what is written to file descriptor 2, where the GPU driver prints its assert lines."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

_KEPT = 1 << 20  # characters
_PIPE = 1 << 20  # bytes, of Linux pipes; 64 kB (430 lines) could fill up while Python is held
_CHUNK = 1 << 16
_READ = 0.05  # seconds that ipykernel's thread gets to read what lies in its pipe
_YIELD = 0.0005  # seconds, for that thread to hand over what it has just read
_QUIET = 0.02  # seconds without text after which the driver's burst is over
_SIGN = "ssertion "  # ROCm prints "Device-side assertion"


class StderrTap:
    """Keeps the last megabyte of this process's fd 2 text; costs nothing while none is written.

    Where ipykernel captures fd 2 (a pipe whose thread calls the `write` of its stream) that
    `write` is wrapped; what Python itself writes there, a log for instance, is not kept. Elsewhere,
    except on Windows, fd 2 itself is led through a pipe, and on to where it went. Text that child
    processes write to an inherited fd 2 is seen too.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._chunks: deque[str] = deque()
        self._kept = 0  # characters in _chunks
        self._total = 0  # characters ever seen
        self._last = 0.0  # time.monotonic() of the last text
        self._stream: Any = None  # ipykernel's stream
        self._copy: _Copy | None = None  # what now counts as its `write`
        self._pipe: _Pipe | None = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Begin to copy. A second call does nothing; a process without an fd 2 is left alone."""
        if self._pipe is None and self._stream is None:
            if getattr(sys.stderr, "watch_fd_thread", None) is not None:
                self._stream = sys.stderr
            elif os.name == "posix":
                with contextlib.suppress(OSError):
                    self._pipe = _Pipe(self._keep)
                    atexit.register(self.uninstall)
        self.ensure()

    def ensure(self) -> None:
        """Wrap the stream again: IPython 9 puts the old `write` back after the cell of the load.

        ipykernel 6.17.1 ends its thread at the first invalid UTF-8 on fd 2, and with it all that
        can be seen here but for Python's own output; that is not ours to repair.
        """
        if self._stream is not None and self._stream.write is not self._copy:
            if self._copy is not None:
                self._copy.keep = None  # should it still be below, it must not keep text twice
            reader = self._stream.watch_fd_thread
            self._copy = self._stream.write = _Copy(self._stream.write, self._keep, reader)

    def uninstall(self) -> None:
        """Put everything back; text that is on its way still arrives where it should."""
        stream, copy, pipe = self._stream, self._copy, self._pipe
        self._stream = self._copy = self._pipe = None
        if copy is not None:
            copy.keep = None  # who has wrapped on top of us may put it back: it only passes on now
            if stream.write is copy:
                stream.write = copy.write
        if pipe is not None and os.getpid() == self._pid:
            atexit.unregister(self.uninstall)
            pipe.close()

    def mark(self) -> int:
        """A place in the text, for `since`."""
        self._drain()
        return self._total

    def since(self, mark: int, wait: float = 0.0) -> str:
        """The text after `mark` (as far as it is kept).

        Waits at most `wait` seconds for an assert line, and for the end of the burst that it is in.
        """
        if os.getpid() != self._pid:  # a forked child: see _keep
            return self._after(mark)
        deadline = time.monotonic() + wait
        seen = False
        self._let_ipykernel_read()
        while True:
            self._drain()
            with self._arrived:
                seen = seen or _SIGN in self._after(mark)
                now = time.monotonic()
                quiet = self._last + _QUIET
                if now >= deadline or (seen and now >= quiet):
                    return self._after(mark)
                self._arrived.wait(min(deadline, quiet if seen else deadline) - now)

    def _after(self, mark: int) -> str:
        wanted = self._total - mark
        taken: list[str] = []
        for chunk in reversed(self._chunks):
            if wanted <= 0:
                break
            taken.append(chunk[-wanted:])
            wanted -= len(chunk)
        return "".join(reversed(taken))

    def _keep(self, text: str) -> None:
        if os.getpid() != self._pid:
            return  # in a forked child: the lock may be held by a thread that is not here
        with self._arrived:
            self._total += len(text)
            self._chunks.append(text[-_KEPT:])
            self._kept += len(self._chunks[-1])
            while self._kept - len(self._chunks[0]) >= _KEPT:
                self._kept -= len(self._chunks.popleft())
            self._last = time.monotonic()
            self._arrived.notify_all()

    def _let_ipykernel_read(self) -> None:
        """Wait until the text that was written before now has come through its pipe."""
        pipe = getattr(self._stream, "_fid", None)
        if not isinstance(pipe, int) or not hasattr(select, "poll"):
            return
        unread = select.poll()
        unread.register(pipe, select.POLLIN)
        end = time.monotonic() + _READ
        time.sleep(_YIELD)
        while unread.poll(0) and time.monotonic() < end:
            time.sleep(_YIELD)

    def _drain(self) -> None:
        if self._pipe is not None and os.getpid() == self._pid:
            self._pipe.pump()


class _Copy:
    """Stands in for a stream's `write`."""

    def __init__(
        self, write: Callable[..., Any], keep: Callable[[str], None], reader: threading.Thread
    ) -> None:
        self.write = write
        self.keep: Callable[[str], None] | None = keep
        self._reader = reader  # of fd 2: what others write is Python's own, and not the driver's

    def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
        fd_2 = threading.current_thread() is self._reader
        if self.keep is not None and fd_2 and isinstance(text, str):
            self.keep(text)
        return self.write(text, *args, **kwargs)


class _Pipe:
    """Leads fd 2 through a pipe to where it went, and shows what passes.

    A child that inherits fd 2 and outlives this process loses its stderr. A process that is killed
    or aborts loses what is still in the pipe, unless it calls `pump` first.
    """

    def __init__(self, keep: Callable[[str], None]) -> None:
        self._keep = keep
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lock = threading.RLock()
        self._target = os.dup(2)
        self._read, write = os.pipe()
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE)
        os.set_blocking(self._read, False)
        os.dup2(write, 2)
        os.close(write)
        self._python: TextIO | None = None
        if os.isatty(self._target) and sys.__stderr__ and sys.stderr is sys.__stderr__:
            # Python's own output goes on straight to the terminal: colours and progress bars
            # look for one, and the driver does not print through Python.
            raw = os.fdopen(self._target, "wb", buffering=0, closefd=False)
            self._python = sys.stderr = io.TextIOWrapper(
                raw, sys.__stderr__.encoding, "backslashreplace", write_through=True
            )
        threading.Thread(target=self._watch, daemon=True, name="nb_assertdoc-fd2").start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while poll.poll() and self.pump():
            pass

    def pump(self) -> bool:
        """Pass on what has come, without waiting; False when every writer has closed."""
        with self._lock:
            for _ in range(2 * _PIPE // _CHUNK):  # a child that never stops must not hold us
                try:
                    data = os.read(self._read, _CHUNK)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                self._pass_on(data)
                self._keep(self._decoder.decode(data))
        return True

    def _pass_on(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # the terminal is set to not wait
                select.select([], [self._target], [], 1.0)
            except OSError:  # nobody reads there any more
                return

    def close(self) -> None:
        """Give fd 2 back. The thread goes on while children still write, and ends with the last."""
        if self._python is not None and sys.stderr is self._python:
            sys.stderr = sys.__stderr__
        os.dup2(self._target, 2)
        self.pump()
