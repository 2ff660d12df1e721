"""Keeps a dead context from killing the kernel as pinned memory is freed.

After the death, freeing the pinned source of a non_blocking copy throws in a destructor: SIGABRT.
torch's option `pinned_free_catch_all` turns that into a warning (pytorch PR 178154). It is set
through its setter, appended to the user's settings, and only where the library knows it: an unknown
key raises, and stays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

OPTION = "pinned_free_catch_all"


def keep_pinned_frees_harmless() -> bool | None:
    """Set the option once torch is there. None: torch is not imported yet; else: it is set."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C") or not hasattr(torch, "cuda"):
        return None
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if setter is None or getter is None or not _known(torch):
        return False
    try:
        settings = str(getter() or _from_environment())
        if OPTION in settings:
            return True
        if settings and torch.cuda.is_initialized():
            return False  # the setter replaces: settings in use are not touched
        setter(f"{settings},{OPTION}:True" if settings else f"{OPTION}:True")
    except Exception:
        return False  # protection only; the user's run must not depend on it
    return True


def _from_environment() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[n] for n in names if os.environ.get(n)), "")


def _known(torch: Any) -> bool:
    """The key is among the strings of torch's own library (0.7 MB, looked at once a session)."""
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        return OPTION.encode() in library.read_bytes()
    except OSError:
        return False
