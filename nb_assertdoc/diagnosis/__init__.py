"""From a finding to its cause and fixes, by rules over measured facts.

A rule is a `Rule` in the list `RULES`; the match with the highest score wins, the earlier rule
among equals. Nothing here imports torch or fails on missing facts.
"""

from __future__ import annotations

import re
import textwrap

import msgspec

from nb_assertdoc import catalogue
from nb_assertdoc.model import Cause, Crash, Fix, Observed

from . import (
    arguments,
    categories,
    graphs,
    indices,
    labels,
    masks,
    positions,
    sentinels,
    tables,
    values,
)
from .driver import contradiction
from .facts import Facts
from .fixes import to_paste
from .headline import headline
from .rule import Match, Rule
from .texts import TEXTS

__all__ = [
    "RULES",
    "cause_keys",
    "contradiction",
    "diagnose",
    "explain",
    "explain_cause",
    "headline",
]

RULES: tuple[Rule, ...] = (
    *values.RULES,
    *arguments.RULES,
    *labels.RULES,
    *sentinels.RULES,
    *masks.RULES,
    *positions.RULES,
    *tables.RULES,
    *categories.RULES,
    *graphs.RULES,
    *indices.RULES,
)


def diagnose(observed: Observed, crash: Crash | None = None) -> tuple[Cause, tuple[Fix, ...]]:
    """The most specific cause that the facts allow, and what to do about it.

    There is always an answer: where little is known it says only what is certain.
    """
    facts = Facts(observed, crash)
    answers = ((rule, rule.match(facts)) for rule in RULES)
    matches: list[tuple[Rule, Match]] = [
        (rule, match) for rule, match in answers if match is not None
    ]
    rule, match = max(matches, key=lambda pair: pair[1].score)
    cause = Cause(
        key=rule.key,
        title=match.title or rule.title,
        explanation=re.sub(r"^[a-z]+(?=[ ,])", lambda m: m[0].capitalize(), match.explanation),
        because=(*facts.measured(), *match.because),
    )
    fixes = (msgspec.structs.replace(f, code=to_paste(facts, f.code)) for f in match.fixes)
    return cause, tuple(fixes)


def cause_keys() -> tuple[str, ...]:
    """Every cause key that a report or `explain` can name."""
    return (
        *(rule.key for rule in RULES),
        *(key for key in TEXTS if key not in {r.key for r in RULES}),
    )


def explain_cause(key: str) -> str | None:
    """Plain words for a cause key, in lines of at most 100 columns; None for an unknown one."""
    known = {rule.key: (rule.title, rule.about) for rule in RULES} | TEXTS
    key = re.sub(r"[\s-]+", "_", key.strip().lower())
    if key not in known:
        return None
    title, text = known[key]
    return f"{title}\n\n{textwrap.fill(text, 100, break_on_hyphens=False)}"


def explain(text: str) -> str:
    """Plain words for a cause key, or for anything that `catalogue.explain` knows."""
    return explain_cause(text) or catalogue.explain(text)
