"""The replay harms nothing: writes go to a scratch folder, commands and uploads are skipped.

An overlay over the whole file system. A path that the replay writes, renames or deletes has its new
state under `scratch/files/<absolute path>` or is noted as gone; every other path is read in place.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import pathlib
import shutil
import sqlite3
import stat
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nb_assertdoc.errors import AssertdocError
from nb_assertdoc.worker import landlock
from nb_assertdoc.worker.skips import Skips

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev", "/proc", "/sys")
_WRITABLE = ("/dev", "/proc")  # null, terminals, shared memory of loader workers
MOST_LINKS = 40  # of one path, as in Linux
_real = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
_real_open = io.open
_real_rmtree = shutil.rmtree
_real_connect = sqlite3.connect


class Sandbox:
    """Keeps this process from changing the user's files and from starting commands.

    `scratch` takes what is written (made if absent), `cwd` becomes the working directory, `free`
    are further folders that may be written to. Covers Python's own functions and the libraries
    named in `skips`; against libraries that open files in C, `install` asks the kernel (Landlock),
    where it can.
    """

    def __init__(self, scratch: Path, cwd: Path, free: Iterable[Path] = ()) -> None:
        self._files = os.path.join(os.path.realpath(scratch), "files")
        self._temporary = os.path.join(os.path.realpath(scratch), "tmp")
        self._free = (*_SYSTEM, os.path.realpath(scratch), *map(os.path.realpath, free))
        self._cwd = os.path.realpath(cwd)
        self._gone: set[str] = set()  # what they held is gone; what was made anew is in scratch
        self._installed = False
        self.skips = Skips(lambda path: self._seen(self._path(path)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was skipped, in words, each once."""
        return tuple(self.skips.notes)

    def install(self) -> None:
        """Patch this process, for good. Raises `AssertdocError` when called again."""
        if self._installed:
            raise AssertdocError("the sandbox is installed in this process already")
        self._installed = True
        for folder in (self._files, self._temporary):
            _real["makedirs"](folder, mode=0o700, exist_ok=True)
        _real["chdir"](self._cwd)
        sys.dont_write_bytecode = True
        tempfile.tempdir = os.environ["TMPDIR"] = self._temporary
        replaced: dict[Any, Any] = {_real_open: self._open, _real_rmtree: self._rmtree}
        replaced[_real_connect] = self._connect
        for name, new in self._os_functions():
            if name in _real:
                replaced[_real[name]] = new
                for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                    able |= {new} if _real[name] in able else set()
        self._put_everywhere(replaced)
        self.skips.install()
        if not landlock.only_write_below((*_WRITABLE, *self._free[len(_SYSTEM) :])):
            self.skips.note("the kernel could not be asked to refuse writes (no Landlock)")

    def _put_everywhere(self, replaced: dict[Any, Any]) -> None:
        """Also in modules that took a function by `from os import remove` before."""
        builtins.open = self._open
        for module in list(sys.modules.values()):
            if module is sys.modules[__name__] or not isinstance(module, type(sys)):
                continue
            for name, value in list(vars(module).items()):
                try:
                    new = replaced.get(value)
                except TypeError:  # not hashable, so not a function
                    continue
                if new is not None:
                    setattr(module, name, new)
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10
        for name, value in list(vars(accessor).items()) if accessor else ():
            old = getattr(value, "__func__", value)
            if callable(old) and old in replaced:
                setattr(accessor, name, staticmethod(replaced[old]))

    # ---- paths

    def _path(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        """The absolute path as the replay sees it, links resolved (the last one if `follow`)."""
        text = os.fsdecode(path)
        if not text:
            raise _error(errno.ENOENT, path)
        start = self._cwd if dir_fd is None else _real["readlink"](f"/proc/self/fd/{dir_fd}")
        if start.startswith(self._files + "/"):
            start = start.removeprefix(self._files)
        parts = os.path.join(start, text).split("/")[::-1]
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
            target: str = _real["readlink"](self._seen(path))
        except OSError:
            return None
        return target

    def _is_free(self, path: str) -> bool:
        return any(path == root or path.startswith(root + "/") for root in self._free)

    def _is_gone(self, path: str) -> bool:
        while path != "/":
            if path in self._gone:
                return True
            path = os.path.dirname(path)
        return False

    def _seen(self, path: str) -> str:
        """Where the replay reads `path`; it does not exist if it is gone."""
        if self._is_free(path) or path == "/":
            return path
        copy = self._files + path
        return copy if _lexists(copy) or self._is_gone(path) else path

    def _own(self, path: str, copy: bool = True) -> str:
        """Where the replay writes `path`: its copy in the scratch folder, made if need be."""
        if self._is_free(path):
            return path
        parent, own = os.path.dirname(path), self._files + path
        if not _is_dir(self._seen(parent)):
            raise _error(errno.ENOENT, path)
        _real["makedirs"](self._files + parent, exist_ok=True)
        if copy and not _lexists(own) and not self._is_gone(path) and _lexists(path):
            if _is_link(path):
                _real["symlink"](_real["readlink"](path), own)
            elif _is_dir(path):
                _real["mkdir"](own)
            else:
                self._copy_file(path, own)
        return own

    def _copy_file(self, path: str, own: str) -> None:
        with _real_open(path, "rb") as old, _real_open(own, "wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
        _real["chmod"](own, _real["stat"](path).st_mode & 0o7777)

    def _exists(self, path: str) -> bool:
        return _lexists(self._seen(path))

    def _names(self, path: str) -> list[str]:
        """The names in a folder, of the user's folder and of what the replay made."""
        own = path if self._is_free(path) else self._files + path
        if own == path or (_lexists(own) and not _is_dir(own)):
            return list(_real["listdir"](own))
        below = _is_dir(path) and not self._is_gone(path)
        if not below and not _is_dir(own):
            return list(_real["listdir"](self._seen(path)))  # raises the right error
        names = _real["listdir"](path) if below else []
        kept = [name for name in names if os.path.join(path, name) not in self._gone]
        made = _real["listdir"](own) if _is_dir(own) else []
        return list(dict.fromkeys([*kept, *made]))

    # ---- what replaces `open` and the functions of `os`

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        if not isinstance(file, int) and opener is None:
            opener = self._open_fd  # keeps the user's path as the file's name
        return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def _open_fd(
        self, path: Any, flags: int, mode: int = 0o666, *, dir_fd: int | None = None
    ) -> int:
        where = self._path(path, dir_fd, not flags & os.O_NOFOLLOW)
        if not flags & _WRITES:
            return int(_real["open"](self._seen(where), flags, mode))
        exists = self._exists(where)
        if exists and flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if not exists and not flags & os.O_CREAT:
            raise _error(errno.ENOENT, path)
        if exists:  # it is made anew in the scratch folder, with the rights it has
            mode, flags = _mode(self._seen(where), True) & 0o7777, flags | os.O_CREAT
        own = self._own(where, not flags & os.O_TRUNC)
        return int(_real["open"](own, flags & ~os.O_EXCL, mode))

    def _os_functions(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield "open", self._open_fd
        for name in ("stat", "access", "getxattr", "listxattr", "statvfs"):
            yield name, self._reader(name)
        for name in ("lstat", "readlink"):
            yield name, self._reader(name, follow=False)
        for name in ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr"):
            if name in _real:
                yield name, self._writer(name)
        for name in ("lchmod", "lchown"):
            if name in _real:
                yield name, self._writer(name, follow=False)
        for name in ("mkfifo", "mknod", "mkdir"):
            yield name, self._maker(name)
        for name in ("remove", "unlink"):
            yield name, self._remove
        for name in ("rename", "replace"):
            yield name, self._rename
        for name in ("fchmod", "fchown"):
            yield name, lambda *args: None
        yield "rmdir", self._rmdir
        yield "link", self._hard_link
        yield "symlink", self._symlink
        yield "listdir", self._listdir
        yield "scandir", self._scandir
        yield "chdir", self._chdir
        yield "getcwd", lambda: self._cwd
        yield "getcwdb", lambda: os.fsencode(self._cwd)

    def _reader(self, name: str, follow: bool = True) -> Callable[..., Any]:
        @functools.wraps(_real[name])
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return _real[name](path, *args, **kwargs)
            where = self._path(path, dir_fd, follow and kwargs.get("follow_symlinks", True))
            return _real[name](self._seen(where), *args, **kwargs)

        return call

    def _writer(self, name: str, follow: bool = True) -> Callable[..., Any]:
        @functools.wraps(_real[name])
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return _real[name](path, *args, **kwargs) if name == "truncate" else None
            where = self._path(path, dir_fd, follow and kwargs.get("follow_symlinks", True))
            if not self._exists(where):
                raise _error(errno.ENOENT, path)
            return _real[name](self._own(where), *args, **kwargs)

        return call

    def _maker(self, name: str) -> Callable[..., Any]:
        @functools.wraps(_real[name])
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            where = self._path(path, dir_fd, follow=False)
            if self._exists(where):
                raise _error(errno.EEXIST, path)
            return _real[name](self._own(where, copy=False), *args, **kwargs)

        return call

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self._path(path, dir_fd, follow=False)
        seen = self._seen(where)
        if not _lexists(seen):
            raise _error(errno.ENOENT, path)
        if _is_dir(seen) and not _is_link(seen):
            raise _error(errno.EISDIR, path)
        self._drop(where)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self._path(path, dir_fd, follow=False)
        if self._names(where):
            raise _error(errno.ENOTEMPTY, path)
        self._drop(where)

    def _rmtree(self, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        where = self._path(path, kwargs.get("dir_fd"), follow=False)
        if _is_dir(self._seen(where)) and not _is_link(self._seen(where)):
            self._drop(where)
        elif not ignore_errors:
            raise _error(errno.ENOTDIR if self._exists(where) else errno.ENOENT, path)

    def _drop(self, where: str) -> None:
        """Take away a file or a whole tree."""
        own = where if self._is_free(where) else self._files + where
        if _is_dir(own) and not _is_link(own):
            _remove_tree(own)
        elif _lexists(own):
            _real["unlink"](own)
        self._gone.add(where)

    def _rename(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        old, new = self._path(src, src_dir_fd, False), self._path(dst, dst_dir_fd, False)
        if not self._exists(old):
            raise _error(errno.ENOENT, src)
        if old == new:
            return
        if _is_dir(self._seen(new)) and self._names(new):
            raise _error(errno.ENOTEMPTY, dst)
        own = self._own_tree(old)
        target = self._own(new, copy=False)
        self._drop(new)
        _real["rename"](own, target)
        self._gone.add(old)

    def _own_tree(self, path: str) -> str:
        own, seen = self._own(path), self._seen(path)
        if _is_dir(seen) and not _is_link(seen):
            for name in self._names(path):
                self._own_tree(os.path.join(path, name))
        return own

    def _hard_link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        """A copy: a true link would reach the user's file."""
        where = self._path(dst, kwargs.get("dst_dir_fd"), False)
        if self._exists(where):
            raise _error(errno.EEXIST, dst)
        old = self._seen(self._path(src, kwargs.get("src_dir_fd")))
        self._copy_file(old, self._own(where, copy=False))

    def _symlink(
        self,
        src: Any,
        dst: Any,
        target_is_directory: bool = False,
        *,
        dir_fd: int | None = None,
    ) -> None:
        where = self._path(dst, dir_fd, False)
        if self._exists(where):
            raise _error(errno.EEXIST, dst)
        _real["symlink"](os.fsdecode(src), self._own(where, copy=False))

    def _listdir(self, path: Any = ".") -> list[Any]:
        if isinstance(path, int):
            path = self._path(".", path)
        names = self._names(self._path(path if path is not None else "."))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = ".") -> Any:
        base = "." if path is None else path
        if isinstance(base, int):
            base = self._path(".", base)
        return _Entries([_Entry(base, name) for name in self._listdir(base)])

    def _chdir(self, path: Any) -> None:
        where = self._path(".", path) if isinstance(path, int) else self._path(path)
        _real["chdir"](where if _is_dir(where) and not self._is_gone(where) else self._seen(where))
        self._cwd = where

    def _connect(self, database: Any, *args: Any, **kwargs: Any) -> Any:
        """SQLite on a copy: it opens its files by itself."""
        text = os.fsdecode(database)
        if kwargs.get("uri") and text.startswith("file:"):
            text = urllib.parse.unquote(text.removeprefix("file:").partition("?")[0])
            kwargs["uri"] = ":memory:" in text or "mode=memory" in str(database)
            if kwargs["uri"]:
                return _real_connect(database, *args, **kwargs)
        if text in ("", ":memory:"):
            return _real_connect(database, *args, **kwargs)
        where = self._path(text)
        for suffix in ("-wal", "-journal"):
            if self._exists(where + suffix):
                self._own(where + suffix)
        return _real_connect(self._own(where), *args, **kwargs)


class _Entry:
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


class _Entries:
    """An iterator that is a context manager, as `os.scandir` gives it."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))


# Not `os.path`: its functions go through the replaced ones.


def _mode(path: str, follow: bool) -> int:
    try:
        return int(_real["stat" if follow else "lstat"](path).st_mode)
    except (OSError, ValueError):
        return 0


def _lexists(path: str) -> bool:
    return _mode(path, False) != 0


def _is_dir(path: str) -> bool:
    return stat.S_ISDIR(_mode(path, True))


def _is_link(path: str) -> bool:
    return stat.S_ISLNK(_mode(path, False))


def _remove_tree(path: str) -> None:
    for name in _real["listdir"](path):
        below = os.path.join(path, name)
        if _is_dir(below) and not _is_link(below):
            _remove_tree(below)
        else:
            _real["unlink"](below)
    _real["rmdir"](path)
