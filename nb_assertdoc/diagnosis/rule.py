"""What a rule is, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nb_assertdoc.model import Fix

from .facts import Facts


@dataclass(frozen=True)
class Match:
    """A rule's answer. `score`: how specific the evidence is; the highest of all rules wins.

    90 and more: the values alone prove it. 70 to 89: values and the names in the very call.
    40 to 69: hints from the code around. Below 40: a guess where nothing better is known.
    """

    score: int
    explanation: str
    fixes: tuple[Fix, ...]
    because: tuple[str, ...] = ()  # added to what `Facts.measured` says
    title: str | None = None  # a more exact one than the rule's


@dataclass(frozen=True)
class Rule:
    """One cause: its key, its words for `explain`, and the function that recognises it."""

    key: str
    title: str
    about: str
    match: Callable[[Facts], Match | None]
