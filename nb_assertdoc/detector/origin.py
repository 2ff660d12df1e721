"""Whose assert is it? Child processes print to the same fd 2, and hand on their errors as text."""

from __future__ import annotations

import os
import sys
from typing import Any


def cuda_started() -> bool:
    """This process may have a CUDA context that could have died; no CUDA call is made."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return True
    return "cupy" in sys.modules or "numba.cuda" in sys.modules  # they start it without torch


def ended_children() -> tuple[float, ...]:
    """A mark: it differs from an earlier one if a child process has ended between the two."""
    try:
        import resource
    except ImportError:  # Windows
        return ()
    # Every process has page faults. They are counted once it has ended and been waited for.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_minflt, used.ru_majflt, used.ru_utime, used.ru_stime


def runs_programs() -> bool:
    """A child process with another command line is alive, or has ended and not been waited for.

    One with the same is a fork, as a DataLoader's workers are: torch lets none of these use CUDA
    once it has started here.
    """
    import psutil

    me = psutil.Process(os.getpid())
    try:
        return any(child.cmdline() != me.cmdline() for child in me.children())
    except psutil.Error:
        return True


def contexts_answer() -> bool:
    """Ask each CUDA context of this process whether it lives; reads no tensor, waits for nothing.

    This is a CUDA call: only for where nothing else tells a child's assert from this process's.
    """
    torch: Any = sys.modules.get("torch")
    try:
        # A device without a context must not get one: it takes memory.
        exists = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True)
        for device in range(torch.cuda.device_count()):
            if exists(device):
                torch.cuda.current_stream(device).query()
    except Exception:  # the assert's own error, as a rule
        return False
    return True


__all__ = ["contexts_answer", "cuda_started", "ended_children", "runs_programs"]
