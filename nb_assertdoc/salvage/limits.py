"""What saving may not do: touch CUDA, free memory, take too long."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

TICK = 0.05  # seconds between two looks at the clock
TIME_UP = "the time for saving variables was used up"


class Unsaveable(Exception):
    """An object must become a placeholder; the text is the reason."""


class OutOfTime(BaseException):  # not an Exception: user code must not swallow it
    """A reducer or a variable took too long."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection (freeing a tensor can abort), no CUDA tensor in user code."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with refusing_cuda():
            yield
    finally:
        if collecting:
            gc.enable()


def refusing_cuda() -> contextlib.AbstractContextManager[Any]:
    """Make torch functions on or to CUDA raise `Unsaveable`: the user's code may call `.cpu()`."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "overrides"):
        return contextlib.nullcontext()

    def on_cuda(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(on_cuda, value))
        if isinstance(value, (str, torch.device)):
            return str(value).startswith("cuda")
        return isinstance(value, torch.Tensor) and value.is_cuda

    class Refuse(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            harmless = getattr(func, "__name__", "") in _HARMLESS
            moves = getattr(func, "__name__", "") == "cuda" or on_cuda((*args, *kwargs.values()))
            if not harmless and moves:
                raise Unsaveable("it needs what is on the GPU, which is dead after an assert")
            return func(*args, **kwargs)

    return Refuse()


# torch functions that read only metadata; "__get__" are the attributes
_HARMLESS = {
    "__get__",
    "__hash__",
    "__len__",
    "stride",
    "size",
    "dim",
    "numel",
    "is_floating_point",
}


class Clock:
    """Interrupts a reducer that does not return, and a variable that takes too long."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.each = min(1.0, seconds / 4)  # of one call into user code
        self.call_began: float | None = None
        self.armed = False  # True only where an interruption is dealt with

    def over(self) -> bool:
        return time.monotonic() > self.end

    def begin_call(self) -> None:
        self.call_began = time.monotonic()

    def end_call(self) -> None:
        self.call_began = None

    def check(self, *_: object) -> None:
        """Raise when the time is up; also the handler of SIGALRM."""
        if not self.armed:
            return
        if self.over():
            raise OutOfTime(TIME_UP)
        if self.call_began is not None and time.monotonic() > self.call_began + self.each:
            raise OutOfTime(f"pickling it took longer than {self.each:g} s")

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Check regularly, where no timer or handler of the user is in the way."""
        free = hasattr(signal, "setitimer") and (
            threading.current_thread() is threading.main_thread()
            and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        )
        old = signal.getsignal(signal.SIGALRM) if free else None
        if old is None:
            yield
            return
        signal.signal(signal.SIGALRM, self.check)
        signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
