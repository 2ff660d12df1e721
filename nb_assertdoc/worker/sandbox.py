"""The replay harms nothing: writes go to a scratch folder, commands and uploads are skipped.

An overlay over the whole file system. A path that the replay writes, renames or deletes has its new
state under `scratch/files/<absolute path>` or is noted as gone; every other path is read in place.
"""

from __future__ import annotations

import builtins
import errno
import functools
import os
import pathlib
import shutil
import sqlite3
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nb_assertdoc.errors import AssertdocError
from nb_assertdoc.worker import landlock
from nb_assertdoc.worker.overlay import (
    Entries,
    Entry,
    Overlay,
    error,
    is_dir,
    is_link,
    lexists,
    mode_of,
    real,
    real_open,
)
from nb_assertdoc.worker.skips import Skips

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_WRITABLE = ("/dev", "/proc")  # null, terminals, shared memory of loader workers
_real_rmtree = shutil.rmtree
_real_connect = sqlite3.connect


class Sandbox(Overlay):
    """Keeps this process from changing the user's files and from starting commands.

    `scratch` takes what is written (made if absent), `cwd` becomes the working directory, `free`
    are further folders that may be written to. Covers Python's own functions and the libraries
    named in `skips`; against libraries that open files in C, `install` asks the kernel (Landlock),
    where it can.
    """

    def __init__(self, scratch: Path, cwd: Path, free: Iterable[Path] = ()) -> None:
        root = os.path.realpath(scratch)
        allowed = (root, *map(os.path.realpath, free))
        super().__init__(os.path.join(root, "files"), os.path.realpath(cwd), allowed)
        self._temporary = os.path.join(root, "tmp")
        self._allowed = allowed
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
            real["makedirs"](folder, mode=0o700, exist_ok=True)
        real["chdir"](self._cwd)
        sys.dont_write_bytecode = True
        tempfile.tempdir = os.environ["TMPDIR"] = self._temporary
        replaced: dict[Any, Any] = {real_open: self._open, _real_rmtree: self._rmtree}
        replaced[_real_connect] = self._connect
        replaced.update(self.skips.commands())
        for name, new in self._os_functions():
            if name in real:
                replaced[real[name]] = new
                for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                    able |= {new} if real[name] in able else set()
        self._put_everywhere(replaced)
        self.skips.install()
        if not landlock.only_write_below((*_WRITABLE, *self._allowed)):
            self.skips.note("the kernel could not be asked to refuse writes (no Landlock)")

    def _put_everywhere(self, replaced: dict[Any, Any]) -> None:
        """Also in modules that took a function by `from os import remove` before."""
        own = sys.modules[__name__], sys.modules[Overlay.__module__]
        by_id = {id(old): new for old, new in replaced.items()}  # hashing a user's value may fail
        builtins.open = self._open
        for module in list(sys.modules.values()):
            if module in own or not isinstance(module, type(sys)):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10
        for name, value in list(vars(accessor).items()) if accessor else ():
            old = getattr(value, "__func__", value)
            if id(old) in by_id:
                setattr(accessor, name, staticmethod(by_id[id(old)]))

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
        return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def _open_fd(
        self, path: Any, flags: int, mode: int = 0o666, *, dir_fd: int | None = None
    ) -> int:
        if not flags & _WRITES and dir_fd is None and self._untouched:
            return int(real["open"](path, flags, mode))
        where = self._path(path, dir_fd, not flags & os.O_NOFOLLOW)
        if not flags & _WRITES:
            return int(real["open"](self._seen(where), flags, mode))
        exists = self._exists(where)
        if exists and flags & os.O_CREAT and flags & os.O_EXCL:
            raise error(errno.EEXIST, path)
        if not exists and not flags & os.O_CREAT:
            raise error(errno.ENOENT, path)
        if exists:  # it is made anew in the scratch folder, with the rights it has
            mode, flags = mode_of(self._seen(where), True) & 0o7777, flags | os.O_CREAT
        own = self._own(where, not flags & os.O_TRUNC)
        return int(real["open"](own, flags & ~os.O_EXCL, mode))

    def _os_functions(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield "open", self._open_fd
        for name in ("stat", "access", "getxattr", "listxattr", "statvfs"):
            yield name, self._reader(name)
        for name in ("lstat", "readlink"):
            yield name, self._reader(name, follow=False)
        for name in ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr"):
            if name in real:
                yield name, self._writer(name)
        for name in ("lchmod", "lchown"):
            if name in real:
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
        @functools.wraps(real[name])
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int) or (dir_fd is None and self._untouched):
                return real[name](path, *args, **kwargs)
            where = self._path(path, dir_fd, follow and kwargs.get("follow_symlinks", True))
            return real[name](self._seen(where), *args, **kwargs)

        return call

    def _writer(self, name: str, follow: bool = True) -> Callable[..., Any]:
        @functools.wraps(real[name])
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return real[name](path, *args, **kwargs) if name == "truncate" else None
            where = self._path(path, dir_fd, follow and kwargs.get("follow_symlinks", True))
            if not self._exists(where):
                raise error(errno.ENOENT, path)
            return real[name](self._own(where), *args, **kwargs)

        return call

    def _maker(self, name: str) -> Callable[..., Any]:
        @functools.wraps(real[name])
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            where = self._path(path, dir_fd, follow=False)
            if self._exists(where):
                raise error(errno.EEXIST, path)
            return real[name](self._own(where, copy=False), *args, **kwargs)

        return call

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self._path(path, dir_fd, follow=False)
        seen = self._seen(where)
        if not lexists(seen):
            raise error(errno.ENOENT, path)
        if is_dir(seen) and not is_link(seen):
            raise error(errno.EISDIR, path)
        self._drop(where)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self._path(path, dir_fd, follow=False)
        if self._names(where):
            raise error(errno.ENOTEMPTY, path)
        self._drop(where)

    def _rmtree(self, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        where = self._path(path, kwargs.get("dir_fd"), follow=False)
        if is_dir(self._seen(where)) and not is_link(self._seen(where)):
            self._drop(where)
        elif not ignore_errors:
            raise error(errno.ENOTDIR if self._exists(where) else errno.ENOENT, path)

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
            raise error(errno.ENOENT, src)
        if old == new:
            return
        if is_dir(self._seen(new)) and self._names(new):
            raise error(errno.ENOTEMPTY, dst)
        own = self._own_tree(old)
        target = self._own(new, copy=False)
        self._drop(new)
        real["rename"](own, target)
        self._gone.add(old)
        self._folders.clear()

    def _hard_link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        """A copy: a true link would reach the user's file."""
        where = self._path(dst, kwargs.get("dst_dir_fd"), False)
        if self._exists(where):
            raise error(errno.EEXIST, dst)
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
            raise error(errno.EEXIST, dst)
        real["symlink"](os.fsdecode(src), self._own(where, copy=False))
        self._folders.clear()

    def _listdir(self, path: Any = ".") -> list[Any]:
        if isinstance(path, int):
            path = self._path(".", path)
        names = self._names(self._path(path if path is not None else "."))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = ".") -> Any:
        base = "." if path is None else path
        if isinstance(base, int):
            base = self._path(".", base)
        return Entries([Entry(base, name) for name in self._listdir(base)])

    def _chdir(self, path: Any) -> None:
        where = self._path(".", path) if isinstance(path, int) else self._path(path)
        real["chdir"](where if is_dir(where) and not self._is_gone(where) else self._seen(where))
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
