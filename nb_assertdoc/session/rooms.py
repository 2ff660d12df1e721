"""The rooms on disk: how they are named, found again, limited and removed.

A Jupyter kernel keeps its id (the name of its connection file) through every kind of restart; a
terminal has none, and is known by its working directory and interpreter. Where a server gave the
notebook a new kernel id, a sign that the room has left leads to it by the notebook's path. Another
sign leads to it by the place, for those who ask for it: it may be another notebook's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import StorageError
from ..settings import settings

_DAY = 24 * 3600.0
_SIGN, _TERMINAL = "at-", "terminal-"
_PROCESS = os.urandom(8).hex()  # unlike its number, no other process has had it


def folder() -> Path:
    """The folder of this user's sessions, readable by this user alone; made if absent.

    Raises `StorageError` where it cannot be made, or belongs to somebody else.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"nb_assertdoc-{user}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink() or (hasattr(os, "getuid") and path.lstat().st_uid != user):
            raise PermissionError(f"{path} belongs to somebody else")
        path.chmod(0o700)
    except OSError as error:
        raise StorageError(f"nothing can be stored: {error}") from error
    return path


def key(shell: object = None) -> str:
    """A name for this notebook's kernel that survives a restart."""
    with contextlib.suppress(Exception):  # no ipykernel, or not within a kernel
        if getattr(shell, "kernel", None) is not None:
            from ipykernel.connect import get_connection_file

            return Path(get_connection_file()).stem
    return f"{_TERMINAL}{_hashed(_place())}"


def room(name: str) -> Path:
    """The private folder of one kernel, by its `key`; made if absent. Raises `OSError`."""
    path = folder() / name
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def notebook_path(shell: object = None) -> str | None:
    """The notebook's path, where the server or VS Code tells it."""
    names = getattr(shell, "user_ns", {})
    found = names.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    return str(found) if found else None


def leave_signs(name: str, shell: object = None) -> None:
    """Let a later kernel of the same notebook find the room `name`. Raises `OSError`."""
    path = notebook_path(shell)
    texts = {folder() / name / "pid": f"{os.getpid()}\n{_PROCESS}"}
    for thing in filter(None, (path, _place())):
        texts[folder() / f"{_SIGN}{_hashed(thing)}"] = f"{os.getpid()}\n{name}\n{path or ''}"
    for file, text in texts.items():
        file.touch(mode=0o600)
        file.write_text(text)


def of_this_process(name: str) -> bool:
    """The room `name` was left by this very kernel, which still has what is kept there."""
    with contextlib.suppress(OSError):
        return (folder() / name / "pid").read_text().endswith(f"\n{_PROCESS}")
    return False


def last_key(shell: object = None) -> str:
    """The room of this notebook's last kernel: by kernel id, by the notebook's path; else `key`."""
    own = key(shell)
    with contextlib.suppress(OSError, ValueError):
        if any((folder() / own / held).exists() for held in ("report.json", "variables")):
            return own
        path = notebook_path(shell)
        return (_led_to(path, path) if path else None) or own
    return own


def nearby_key(shell: object = None) -> str | None:
    """The room that an ended kernel left in this folder, not known to be another notebook's.

    For Jupyter kernels; a terminal has its folder's room as its own.
    """
    if key(shell).startswith(_TERMINAL):
        return None
    with contextlib.suppress(OSError, ValueError):
        name = _led_to(_place(), notebook_path(shell))
        return name if name != key(shell) else None
    return None


def _led_to(thing: str, path: str | None) -> str | None:
    """The room that the sign for a path or place leads to. Raises `OSError`, `ValueError`."""
    sign = folder() / f"{_SIGN}{_hashed(thing)}"
    if not sign.is_file():
        return None
    pid, name, notebook = sign.read_text().split("\n", 2)
    another = path and notebook and path != notebook
    if another or _alive(int(pid)) or not (folder() / name).is_dir():
        return None
    return name


def size(path: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def tidy(own: str | None = None) -> None:
    """Remove what was kept longer than promised, and the oldest rooms above the promised size.

    The room `own` stays, and by size also those whose kernel still runs.
    """
    limits = settings()
    with contextlib.suppress(OSError):
        entries = sorted(_entries(folder()))  # oldest first
        total = sum(count for _, count, _ in entries)
        for touched, count, path in entries:
            if path.name == own:
                continue
            old = time.time() - touched > limits.keep_days * _DAY
            if old or (total > limits.keep_total_bytes and path.is_dir() and not _in_use(path)):
                _remove(path)
                total -= count


def forget(name: str | None) -> int:
    """Delete the room `name`, or all rooms (None), and the signs to it; the bytes that it freed."""
    freed = 0
    for _, count, path in list(_entries(folder())):
        if name is None or path.name == name or (_is_sign(path) and _leads_to(path, name)):
            freed += count
            _remove(path)
    return freed


def _entries(where: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of the last change, bytes, path."""
    for path in where.iterdir():
        with contextlib.suppress(OSError):  # another process tidies, too
            files = [path, *path.rglob("*")] if path.is_dir() else [path]
            states = [file.lstat() for file in files]
            yield max(s.st_mtime for s in states), sum(s.st_size for s in states), path


def _in_use(path: Path) -> bool:
    """The kernel that wrote this room still runs."""
    with contextlib.suppress(OSError, ValueError):
        return _alive(int((path / "pid").read_text().split("\n")[0]))
    return False


def _is_sign(path: Path) -> bool:
    return path.name.startswith(_SIGN) and path.is_file()


def _leads_to(sign: Path, name: str) -> bool:
    with contextlib.suppress(OSError):
        return sign.read_text().split("\n")[1:2] == [name]
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # of an earlier process that had this number, or of this kernel itself
    import psutil

    return bool(psutil.pid_exists(pid))


def _place() -> str:
    return f"{os.getcwd()}\0{sys.executable}"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
