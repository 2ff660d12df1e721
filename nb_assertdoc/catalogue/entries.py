"""The device-side asserts of torch as data: one `Entry` for each (source file, text).

The facts were read from the GPU code of the torch 2.14.1 wheel and the sources of 2.0 and 2.4.
"""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from nb_assertdoc.errors import UsageError


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One assert. `file` is a base name or "*.py"; `assertion` is the text that the driver prints.

    A part of `assertion` in braces stands for any text. `argument` is the parameter name of the
    first of `operators` (public names, the commonest first); both are empty for an internal assert.
    """

    id: str
    family: str
    file: str
    assertion: str
    folder: str  # of the source, in torch's repository
    lines: tuple[int, ...]  # in torch 2.14.1; () where that release does not have it
    functions: tuple[str, ...]  # names of the kernels, as printed
    operators: tuple[str, ...]
    argument: str | None
    rule: str  # what must hold, in words
    user_reachable: bool
    causes: tuple[str, ...]
    explanation: str
    older: tuple[str, ...] = ()  # other texts that also mean this: older or Windows releases
    note: str | None = None


@lru_cache(1)
def _by_id() -> dict[str, Entry]:
    data: dict[str, Any] = msgspec.json.decode(
        Path(__file__).with_name("catalogue.json").read_bytes()
    )
    rows = ({**data["families"][row["family"]], **row} for row in data["entries"])
    return {row["id"]: msgspec.convert(row, Entry) for row in rows}


def entries() -> tuple[Entry, ...]:
    """All asserts that are known."""
    return tuple(_by_id().values())


def entry(id: str) -> Entry:
    """The assert with this catalogue id; raises `UsageError` when there is none."""
    try:
        return _by_id()[id]
    except KeyError:
        raise UsageError(
            f"{id!r} is no catalogue id; ids look like 'nll_target' or 'index_kernel'"
        ) from None


@lru_cache(1)
def _by_text() -> dict[str, list[tuple[Entry, bool]]]:
    """Entries by their exact text, with whether it is the entry's own text (not an older one)."""
    table: dict[str, list[tuple[Entry, bool]]] = {}
    for known in entries():
        for text in (known.assertion, *known.older):
            if "{" not in text:
                table.setdefault(text, []).append((known, text == known.assertion))
    for matches in table.values():
        matches.sort(key=lambda match: not match[1])
    return table


@lru_cache(1)
def _patterns() -> list[tuple[Entry, re.Pattern[str]]]:
    return [
        (known, re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(known.assertion)), re.DOTALL))
        for known in entries()
        if "{" in known.assertion
    ]


# Shorter texts ("false", "index >= 0") mean nothing without their file.
_TELLING = 12


@lru_cache(4096)
def candidates(file: str, text: str) -> tuple[Entry, ...]:
    """The entries that a line with this base name and assertion may be, the likeliest first.

    A known text in an unknown file (a fork, ROCm, XPU, an older layout of the sources) gives every
    entry with that text; an unknown text gives none, unless its file prints texts of its callers.
    """
    file = re.sub(r"\.hip$", ".cu", file)
    known = _by_text().get(text, [])
    exact = [match for match, _ in known if fnmatch.fnmatch(file, match.file)]
    if exact:
        return tuple(exact)
    if len(text) >= _TELLING and known:
        return tuple(match for match, _ in known)
    if file.startswith("<") or "." not in file:  # Triton without debug information
        file = "unknown.py"
    free = [
        match
        for match, pattern in _patterns()
        if fnmatch.fnmatch(file, match.file) and pattern.fullmatch(text)
    ]
    bounds = [match for match in free if match.family == "compiled"]
    return tuple(bounds[:1] or free)


def repaired(file: str, function: str | None, cut: str) -> str:
    """The whole text of a line whose end is missing, if only one is possible; else `cut`."""
    file = re.sub(r"\.hip$", ".cu", file)
    possible = [known for known in entries() if known.file == file and known.lines]
    possible = [known for known in possible if known.assertion.startswith(cut)]
    narrowed = [known for known in possible if function in known.functions] or possible
    texts = {known.assertion for known in narrowed}
    return texts.pop() if len(texts) == 1 else cut
