"""A file system in which changes are made beside the files, never in them.

A path that is written, renamed or deleted has its new state under `files/<absolute path>` or is
noted as gone; every other path is where it was.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Any

MOST_LINKS = 40  # of one path, as in Linux
_SYSTEM = ("/dev", "/proc", "/sys")
real = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
real_open = io.open


class Overlay:
    """Where paths are read and written. `free` folders are outside of it."""

    def __init__(self, files: str, cwd: str, free: tuple[str, ...]) -> None:
        self._files = files
        self._cwd = cwd
        self._free = (*_SYSTEM, *free)
        self._under_free = tuple(f"{root}/" for root in self._free)
        self._gone: set[str] = set()  # what they held is gone; what was made anew is in `files`
        self._held: set[str] = set()  # folders of which `files` holds something
        self._folders: dict[str, str] = {}  # known folders, links resolved: imports read thousands

    def _path(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        """The absolute path as the replay sees it, links resolved (the last one if `follow`)."""
        text = os.fsdecode(path)
        if not text:
            raise error(errno.ENOENT, path)
        start = self._cwd if dir_fd is None else real["readlink"](f"/proc/self/fd/{dir_fd}")
        if start.startswith(self._files + "/"):
            start = start.removeprefix(self._files)
        folder, _, name = os.path.join(start, text).rpartition("/")
        if name in ("", ".", ".."):
            return self._resolved(f"{folder}/{name}", text, follow)
        known = self._folders.get(folder)
        if known is None:
            known = self._folders[folder] = self._resolved(folder, text, True)
        here = os.path.join(known, name)
        if not follow or self._link(here) is None:
            return here
        return self._resolved(here, text, True)

    def _resolved(self, path: str, text: str, follow: bool) -> str:
        parts = path.split("/")[::-1]
        done, links = "/", 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = os.path.dirname(done)
                continue
            here = os.path.join(done, part)
            if (parts or follow) and (target := self._link(here)) is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                parts += target.split("/")[::-1]
                done = "/" if target.startswith("/") else done
            else:
                done = here
        return done

    def _link(self, path: str) -> str | None:
        if self._is_free(path) and path.startswith("/proc/"):
            return None  # /proc/self/fd/3 and its like mean more than their text
        try:
            target: str = real["readlink"](self._seen(path))
        except OSError:
            return None
        return target

    def _is_free(self, path: str) -> bool:
        return path.startswith(self._under_free) or path in self._free

    def _is_gone(self, path: str) -> bool:
        while self._gone and path != "/":
            if path in self._gone:
                return True
            path = os.path.dirname(path)
        return False

    def _seen(self, path: str) -> str:
        """Where the replay reads `path`; it does not exist if it is gone."""
        if self._is_free(path) or path == "/":
            return path
        copy = self._files + path
        made = os.path.dirname(path) in self._held and lexists(copy)
        return copy if made or self._is_gone(path) else path

    def _own(self, path: str, copy: bool = True) -> str:
        """Where the replay writes `path`: its copy in the scratch folder, made if need be."""
        if self._is_free(path):
            return path
        parent, own = os.path.dirname(path), self._files + path
        if not is_dir(self._seen(parent)):
            raise error(errno.ENOENT, path)
        self._hold(parent)
        real["makedirs"](self._files + parent, exist_ok=True)
        if copy and not lexists(own) and not self._is_gone(path) and lexists(path):
            if is_link(path):
                real["symlink"](real["readlink"](path), own)
            elif is_dir(path):
                real["mkdir"](own)
            else:
                self._copy_file(path, own)
        return own

    def _hold(self, folder: str) -> None:
        while folder not in self._held:
            self._held.add(folder)
            folder = os.path.dirname(folder)

    @property
    def _untouched(self) -> bool:
        """The replay has changed nothing yet: every path is what it is."""
        return not self._held and not self._gone

    def _copy_file(self, path: str, own: str) -> None:
        with real_open(path, "rb") as old, real_open(own, "wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
        real["chmod"](own, real["stat"](path).st_mode & 0o7777)

    def _exists(self, path: str) -> bool:
        return lexists(self._seen(path))

    def _names(self, path: str) -> list[str]:
        """The names in a folder, of the user's folder and of what the replay made."""
        own = path if self._is_free(path) else self._files + path
        if own == path or (lexists(own) and not is_dir(own)):
            return list(real["listdir"](own))
        below = is_dir(path) and not self._is_gone(path)
        if not below and not is_dir(own):
            return list(real["listdir"](self._seen(path)))  # raises the right error
        names = real["listdir"](path) if below else []
        kept = [name for name in names if os.path.join(path, name) not in self._gone]
        made = real["listdir"](own) if is_dir(own) else []
        return list(dict.fromkeys([*kept, *made]))

    def _drop(self, where: str) -> None:
        """Take away a file or a whole tree."""
        own = where if self._is_free(where) else self._files + where
        if is_dir(own) and not is_link(own):
            _remove_tree(own)
        elif lexists(own):
            real["unlink"](own)
        self._gone.add(where)
        self._folders.clear()

    def _own_tree(self, path: str) -> str:
        own, seen = self._own(path), self._seen(path)
        if is_dir(seen) and not is_link(seen):
            for name in self._names(path):
                self._own_tree(os.path.join(path, name))
        return own


class Entry:
    """What `os.scandir` gives for one name."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(os.fspath(folder), name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())


class Entries:
    """An iterator that is a context manager, as `os.scandir` gives it."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))


# Not `os.path`: its functions go through the replaced ones.


def mode_of(path: str, follow: bool) -> int:
    try:
        return int(real["stat" if follow else "lstat"](path).st_mode)
    except (OSError, ValueError):
        return 0


def lexists(path: str) -> bool:
    return mode_of(path, False) != 0


def is_dir(path: str) -> bool:
    return stat.S_ISDIR(mode_of(path, True))


def is_link(path: str) -> bool:
    return stat.S_ISLNK(mode_of(path, False))


def _remove_tree(path: str) -> None:
    for name in real["listdir"](path):
        below = os.path.join(path, name)
        if is_dir(below) and not is_link(below):
            _remove_tree(below)
        else:
            real["unlink"](below)
    real["rmdir"](path)
