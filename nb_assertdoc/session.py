"""What outlives a kernel: the last report, and what the next kernel is to do as it starts.

All of it lies in a private folder and is found again after the restart.

A Jupyter kernel keeps its id (the name of its connection file) through every kind of restart; a
terminal has none, and is known by its working directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Report

KEPT_SECONDS = 7 * 24 * 3600.0


def folder() -> Path:
    """The folder of this user's sessions, readable by this user alone; made if absent.

    Raises `OSError` where it cannot be made, or belongs to somebody else.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"nb_assertdoc-{user}"
    path.mkdir(mode=0o700, exist_ok=True)
    state = path.lstat()
    if path.is_symlink() or (hasattr(os, "getuid") and state.st_uid != user):
        raise PermissionError(f"{path} belongs to somebody else")
    path.chmod(0o700)
    return path


def key(shell: object = None) -> str:
    """A name for this notebook's kernel that survives a restart."""
    with contextlib.suppress(Exception):  # no ipykernel, or not within a kernel
        if getattr(shell, "kernel", None) is not None:
            from ipykernel.connect import get_connection_file

            return Path(get_connection_file()).stem
    where = f"{os.getcwd()}\0{sys.executable}"
    return "terminal-" + hashlib.sha256(where.encode()).hexdigest()[:16]


def save(report: Report, name: str) -> None:
    """Keep a report for `KEPT_SECONDS`; what cannot be written is not kept."""
    import msgspec

    from .model import to_json

    with contextlib.suppress(OSError, msgspec.MsgspecError, OverflowError):
        where = folder()
        forget_old(where)
        part = where / f"{name}.part"
        part.write_bytes(to_json(report))
        part.replace(where / f"{name}.report.json")


def load(name: str) -> tuple[Report, float] | None:
    """The kept report of a kernel and its age in seconds, or None."""
    import msgspec

    from .model import Report, from_json

    with contextlib.suppress(OSError, msgspec.MsgspecError):
        path = folder() / f"{name}.report.json"
        age = time.time() - path.stat().st_mtime
        return from_json(path.read_bytes(), Report), age
    return None


def forget_old(where: Path) -> None:
    """Remove what was kept longer than promised."""
    for path in where.glob("*.report.json"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()


def ask_launch_blocking(name: str) -> None:
    """Let the next kernel of this notebook run CUDA synchronously. Raises `OSError`."""
    (folder() / f"{name}.launch-blocking").touch(mode=0o600)


def launch_blocking_asked(name: str) -> bool:
    """True once, in the kernel after the one that asked."""
    with contextlib.suppress(OSError):
        (folder() / f"{name}.launch-blocking").unlink()
        return True
    return False
