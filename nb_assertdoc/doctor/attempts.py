"""Which code `%assertdoc verify` tries: the user's own edit, or the suggested fix."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import msgspec

from .. import frames, history
from ..errors import UsageError
from ..model import Fix, Order, Report, Source
from .case import check_code

_ALIKE = 0.5  # share of equal lines that makes one cell an edit of another
_ALIKE_SHORT = 0.7  # of equal characters, in cells of one or two lines
_NAMED = 3  # files that are named at most
_replaced = msgspec.structs.replace


@dataclass
class Attempt:
    """What is to be verified: edited cells, and executions to run before the failing one."""

    cell: Source
    words: str
    edits: dict[int, str] = field(default_factory=dict)  # of `earlier`, by position
    later: tuple[Source, ...] = ()


@dataclass(frozen=True)
class StoredReplay:
    """The replay in a room."""

    folder: Path
    order: Order
    earlier: tuple[Source, ...]
    iteration: int | None
    time: float = math.inf  # when it was kept, in seconds since the epoch


def choose(
    kept: StoredReplay,
    report: Report | None,
    source: str | None,
    later: Sequence[Source],
    reruns: Sequence[Source],
    stopped: Sequence[Source] = (),
    *,
    same_kernel: bool,
) -> Attempt:
    """The code to verify: the one given, what the user ran since, or the suggested fix.

    Of those that the dead GPU `stopped`, in the kernel that crashed, the edits of earlier cells
    count: how they end on the CPU is what is asked.
    """
    failing = kept.order.cell
    if source is not None:
        return _of_source(kept, source)
    own = len(kept.earlier)
    newer = [s for s in reruns if _original(kept, s) == own]
    others = [s for s in later if _original(kept, s) != own and history.acts(s.source)]
    known = {s.source.strip() for s in kept.order.sources}
    if not same_kernel:  # its first cells made again what is stored
        others = [s for s in others if s.source.strip() not in known]
    cell, words = failing, []
    if newer and newer[-1].source.strip() != failing.source.strip():
        cell = _replaced(failing, source=newer[-1].source, above=above(newer[-1].source))
        words.append(f"the edited {name_of(failing)}")
    edits: dict[int, str] = {}
    added = []
    for each in others:
        at = None if same_kernel else _original(kept, each)
        if at is None:
            added.append(each)
        else:
            edits[at] = each.source
    names = [name_of(each) for each in others]
    for at, each in _edits(kept, stopped if same_kernel else ()).items():
        edits[at] = each.source
        names.append(f"the edited {name_of(kept.earlier[at])}")
    if names:
        words.append(f"{name_of(failing)} after {', '.join(names)}")
    if words:
        return Attempt(cell, " and ".join(words), edits, tuple(added))
    if files := _edited_files(kept.time):
        return Attempt(failing, f"{name_of(failing)} with {', '.join(files)} as it is now")
    for fix in report.fixes if report is not None else ():
        found = of_fix(kept, fix)
        if found is not None:
            return found
    raise UsageError(
        "there is nothing to verify yet: no fix of the report is an edit that can be made by "
        "itself. Change a cell and run it, or put the edited cell below `%%assertdoc verify`"
    )


def _edits(kept: StoredReplay, stopped: Sequence[Source]) -> dict[int, Source]:
    """The newest changed form of each earlier cell, by its position."""
    found: dict[int, Source] = {}
    ids = {cell.cell_id for cell in (*kept.earlier, kept.order.cell)}
    for each in stopped:
        unknown = each.cell_id not in ids  # a new cell may be an edited copy of an earlier one
        at = _original(kept, _replaced(each, cell_id=None) if unknown else each)
        if at is not None and at < len(kept.earlier):
            found[at] = each
    texts = [cell.source.strip() for cell in kept.earlier]
    return {at: each for at, each in found.items() if each.source.strip() != texts[at]}


def _edited_files(since: float) -> list[str]:
    """The names of imported files that were written after a time: a fix in a module."""
    found = []
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):  # a lazy module must stay one
            path = ModuleType.__getattribute__(module, "__dict__").get("__file__")
            with contextlib.suppress(OSError, TypeError, ValueError):
                if os.stat(path).st_mtime > since:
                    found.append(os.path.basename(path))
    return found[:_NAMED]


def _of_source(kept: StoredReplay, source: str) -> Attempt:
    failing = kept.order.cell
    at = _original(kept, Source(filename="", source=source))
    if at is not None and at < len(kept.earlier):
        check_code(source)
        return Attempt(failing, f"the edited {name_of(kept.earlier[at])}", {at: source})
    cell = _replaced(failing, source=source, above=above(source))
    return Attempt(cell, f"the edited {name_of(failing)}")


def of_fix(kept: StoredReplay, fix: Fix) -> Attempt | None:
    """The suggested edit in the failing cell, else in the newest earlier one that has the line."""
    edit = fix.edit
    if edit is None:
        return None
    failing = kept.order.cell
    places = [(None, failing), *reversed(list(enumerate(kept.earlier)))]
    if edit.cell_id is not None:
        places.sort(key=lambda p: p[1].cell_id != edit.cell_id)
    for at, cell in places:
        new = _with_edit(cell.source, edit.old, edit.new)
        if new is None:
            continue
        words = f"the suggested fix in {name_of(cell)}"
        if at is None:
            return Attempt(_replaced(failing, source=new), words)
        return Attempt(failing, words, {at: new})
    return None


def _with_edit(source: str, old: str, new: str) -> str | None:
    """The cell with the line `old` replaced, at its indentation; None where it is not there."""
    lines = source.split("\n")
    for i, line in enumerate(lines):
        if line.strip() == old.strip():
            indent = line[: len(line) - len(line.lstrip())]
            lines[i] = "\n".join(indent + part for part in new.strip().split("\n"))
            return "\n".join(lines)
    return source.replace(old, new) if source.count(old) == 1 else None


def without_ours(sources: Sequence[Source]) -> list[Source]:
    """Cells without the lines that ask us."""
    ours = re.compile(r"^[ \t]*%assertdoc.*$", re.MULTILINE)
    return [_replaced(s, source=ours.sub("", s.source)) for s in sources]


def name_of(cell: Source) -> str:
    if cell.execution_count is not None:
        return f"In [{cell.execution_count}]"
    return "the cell" if cell.cell is None else f"cell {cell.cell}"


def above(source: str) -> int:
    return frames.unpadded(source)[1]


def _original(kept: StoredReplay, new: Source) -> int | None:
    """The cell that `new` is another form of: a position in `earlier`, or one past it for the
    failing cell. By its id, where front ends tell it, else by its lines."""
    cells = (*kept.earlier, kept.order.cell)
    if new.cell_id is not None and kept.order.cell.cell_id is not None:
        return next((i for i, c in reversed([*enumerate(cells)]) if c.cell_id == new.cell_id), None)
    alike = [_likeness(cell.source, new.source) for cell in cells]
    best = max(alike)
    return len(alike) - 1 - alike[::-1].index(best) if best >= 1 else None


def alike(old: str, new: str) -> bool:
    """One text may be an edit of the other."""
    return _likeness(old, new) >= 1


def _likeness(old: str, new: str) -> float:
    """1 or more: one text may be an edit of the other. Short ones are compared by characters."""
    lines = old.strip().splitlines(), new.strip().splitlines()
    if min(map(len, lines)) <= 2:
        texts = old.strip()[:2000], new.strip()[:2000]
        return difflib.SequenceMatcher(None, *texts, autojunk=False).ratio() / _ALIKE_SHORT
    return difflib.SequenceMatcher(None, *lines, autojunk=False).ratio() / _ALIKE
