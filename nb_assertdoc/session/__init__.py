"""What outlives a kernel: one private room for each notebook's kernel.

A room holds the last report, what the next kernel is to do as it starts, the replay that `verify`
runs again, and the variables that `restore` gives back. Rooms are folders of mode 0700 in a folder
of the user's own below the system's temporary folder.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .rooms import (
    folder,
    forget,
    key,
    last_key,
    leave_signs,
    nearby_key,
    notebook_path,
    of_this_process,
    room,
    size,
    tidy,
)

if TYPE_CHECKING:
    from ..model import Report

__all__ = [
    "FIX",
    "VARIABLES",
    "ask_launch_blocking",
    "begin",
    "fix_awaited",
    "folder",
    "forget",
    "key",
    "last_key",
    "launch_blocking_asked",
    "leave_signs",
    "load",
    "nearby_key",
    "notebook_path",
    "of_this_process",
    "room",
    "save",
    "size",
    "tidy",
    "waiting",
    "write",
]

VARIABLES = "variables/stored.json"  # in a room that holds variables
FIX = "fix.json"  # in a room: the cell whose success on the GPU confirms a fix
_REPORT, _BLOCKING = "report.json", "launch-blocking"


def save(report: Report, name: str) -> None:
    """Keep a report in the room `name`; what cannot be written is not kept."""
    import msgspec

    from ..model import to_json

    with contextlib.suppress(OSError, msgspec.MsgspecError, OverflowError):
        where = room(name)
        tidy(own=name)
        write(where / _REPORT, to_json(report))


def load(name: str) -> tuple[Report, float] | None:
    """The kept report of the room `name` and its age in seconds, or None."""
    import msgspec

    from ..model import Report, from_json

    with contextlib.suppress(OSError, msgspec.MsgspecError):
        path = folder() / name / _REPORT
        age = time.time() - path.stat().st_mtime
        return from_json(path.read_bytes(), Report), age
    return None


def write(path: Path, data: bytes) -> None:
    """A file that only its user can read, whole or not at all. Raises `OSError`."""
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_bytes(data)
    part.replace(path)


def waiting(name: str) -> bool:
    """The room `name` holds variables: one look at the disk."""
    with contextlib.suppress(OSError):
        return (folder() / name / VARIABLES).is_file()
    return False


def begin(name: str) -> None:
    """A crash has come: the replay of the one before it in the room `name` is of no use."""
    with contextlib.suppress(OSError):
        where = folder() / name
        shutil.rmtree(where / "replay", ignore_errors=True)
        (where / FIX).unlink(missing_ok=True)


def fix_awaited(name: str) -> bool:
    """The room `name` has a cell whose success on the GPU confirms a fix: one look at the disk."""
    with contextlib.suppress(OSError):
        return (folder() / name / FIX).is_file()
    return False


def ask_launch_blocking(name: str) -> None:
    """Let the next kernel of this notebook run CUDA synchronously. Raises `OSError`."""
    (room(name) / _BLOCKING).touch(mode=0o600)


def launch_blocking_asked(name: str) -> bool:
    """True once, in the kernel after the one that asked."""
    with contextlib.suppress(OSError):
        (folder() / name / _BLOCKING).unlink()
        return True
    return False
