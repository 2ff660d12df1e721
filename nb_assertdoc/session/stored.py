"""The list of a room's variables: `stored.json` beside their capsule."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import msgspec

from ..model import Kept, Lost, Record, Source, from_json
from . import VARIABLES, folder

SOURCES = "sources.json"  # beside it
PYTHON = sys.implementation.cache_tag or ""  # "cpython-311"


class Model(Record, frozen=True, kw_only=True):
    """A model whose weights are lost with the GPU, and what is left of it."""

    name: str
    type: str
    built: int | None = None  # In [built] made it
    config: str | None = None  # its configuration's name in the capsule: "model.config"


class Stored(Record, frozen=True, kw_only=True):
    """What one crash left. Times are in seconds since the epoch."""

    execution_count: int | None
    time: float
    kept: tuple[Kept, ...]
    lost: tuple[Lost, ...] = ()  # a variable of `kept` may have lost a part
    models: tuple[Model, ...] = ()
    imports: tuple[str, ...] = ()  # names of modules
    on_gpu: tuple[str, ...] = ()  # of `kept`: their values come from copies, and are on the CPU
    notebook: str | None = None
    python: str = PYTHON  # functions are kept as its bytecode

    @property
    def bytes(self) -> int:
        """Of the variables that can be given back."""
        return sum(k.bytes for k in self.kept)

    def origin(self) -> str:
        """ "In [6] of a.ipynb, 5 minutes ago"."""
        words = f"In [{self.execution_count}]" if self.execution_count else "an unnumbered cell"
        if self.notebook:
            words += f" of {os.path.basename(self.notebook)}"
        return f"{words}, {ago(time.time() - self.time)}"

    def line(self, nearby: bool = False) -> str:
        """What `%load_ext` says; `nearby`: of variables that may be another notebook's."""
        verb = "waits" if len(self.kept) == 1 else "wait"
        if not nearby:
            return (
                f"nb_assertdoc: {plural(len(self.kept))} {verb} from {self.origin()}: "
                "%assertdoc restore"
            )
        return (
            f"nb_assertdoc: {plural(len(self.kept))} {verb} from another kernel in this folder "
            f"({self.origin()}). If they are this notebook's: %assertdoc restore --from-folder"
        )


def read(name: str) -> Stored | None:
    """The variables of the room `name`, or None."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return from_json((folder() / name / VARIABLES).read_bytes(), Stored)
    return None


def announcement(name: str, nearby: bool = False) -> str:
    """One line about the variables that the room `name` holds."""
    stored = read(name)
    return stored.line(nearby) if stored is not None else ""


def sources(name: str) -> tuple[Source, ...]:
    """The cells that defined the functions and classes in the room `name`."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        path = (folder() / name / VARIABLES).with_name(SOURCES)
        return msgspec.json.decode(path.read_bytes(), type=tuple[Source, ...])
    return ()


def plural(count: int) -> str:
    """So many variables."""
    return f"{count} variable{'' if count == 1 else 's'}"


def ago(seconds: float) -> str:
    """An age in words."""
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "a moment ago"


def amount(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
