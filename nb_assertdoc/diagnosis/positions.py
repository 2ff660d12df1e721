"""Causes in tables of positions: the sequence is longer than the table."""

from __future__ import annotations

import ast
import re

from nb_assertdoc.model import Edit, Fix

from .facts import Facts, vocabulary
from .fixes import edit_line, keep, name_of
from .reading import Spot
from .rule import Match, Rule
from .sizes import edit_size
from .tables import config_says, is_table

ROTARY = vocabulary("rope rotary freqs freqs_cis cos_cached sin_cached cos_cache sin_cache")
POSITION = ROTARY | vocabulary(
    "pos position positions positional position_ids wpe pe posemb pos_emb cache_position"
)
TEXT = r"tokens?\b|input_ids|vocab|\btexts?\b|sentence|\bwords?\b"
ENCODERS = ("encode", "encode_plus", "batch_encode_plus")  # methods that take `truncation`


def position(facts: Facts) -> Match | None:
    if not facts.too_large or facts.high is None:
        return None
    arange = facts.arange_like
    lengths = ("max_position_embeddings", "n_positions", "max_target_positions")
    of_config = facts.high in {facts.observed.config.get(name) for name in lengths}
    numbered = {"positions", "position_ids", "cache_position"} & facts.index_words
    of_positions = of_config or numbered or POSITION & facts.table_words
    rows = is_table(facts) or ROTARY & facts.table_words
    if not (rows or (facts.indexes and arange and of_positions)):
        return None
    words = facts.names
    full = {"position", "positions", "position_ids", "positional", "wpe"} & words
    named = full or (POSITION & words and not {"tag", "tags", "upos", "xpos"} & words)
    if not (named and (full or arange or not facts.mentions(r"pos_?tag"))) and not arange:
        return None
    if {"rel", "relative"} & facts.table_words:
        return _relative(facts)
    offset = first_position(facts) if arange else 0
    usable = facts.high - offset
    field = next((n for n in lengths if facts.observed.config.get(n) in (facts.high, usable)), None)
    need = int(max(facts.bad)) + 1
    length = need - offset
    padded = arange and length < facts.observed.shape[-1]
    tokenized = bool(facts.observed.tokenizers) or facts.mentions(r"tokenizer")
    texts = tokenized or bool(facts.observed.config) or facts.mentions(TEXT)
    unit = "tokens" if texts else "positions"
    because = config_says(facts, *lengths)
    if arange:
        start = f", positions start at {offset}, so {usable} {unit} fit" if offset else ""
        because.append(f"the longest row has {length:,} {unit}{start}")
    because += [
        f"`{t.name}.model_max_length` is {t.model_max_length:,}, more than the {usable} that fit"
        for t in facts.observed.tokenizers
        if t.model_max_length is not None and t.model_max_length > usable
    ]
    warns = " A tokenizer only warns." if tokenized else ""
    short: str | None = keep(name_of(facts, "positions"), facts.high)
    longer: str | None = keep(name_of(facts, "positions"), need)
    more, uncounted, size = f"{need} rows", 0, need
    if field is not None:
        uncounted = facts.high - int(facts.observed.config[field] or 0)  # rows beside the config's
        # Columns that only hold padding need no positions: their number says nothing.
        ids = None if padded else "assert input_ids.size(-1) <= "
        less = f" - {offset - uncounted}" if offset > uncounted else ""
        short = ids and f"{ids}{usable}, f'{{input_ids.size(-1)}} tokens > {usable}'"
        longer = ids and f"{ids}model.config.{field}{less}"
        size = need - uncounted
        more = f"{field}={size} in the config"
    return Match(
        score=84 if named or (arange and of_config) else 45,
        explanation=f"The sequence is longer than the {facts.high} positions of "
        f"{facts.table}: nothing cut it to {usable} {unit}.{warns}",
        because=tuple(because),
        fixes=(
            Fix(
                title=f"Cut {'texts' if texts else 'sequences'} to {usable} {unit}",
                explanation=f"Give the tokenizer truncation=True, max_length={usable}, or cut "
                "or split the rows."
                if tokenized
                else "Cut them or split them into several before they reach the model.",
                code=short,
                edit=_truncation(facts, usable),
            ),
            Fix(
                title="Or make the position table longer",
                explanation=f"Only for a model trained from scratch: at least {more}.",
                code=longer,
                edit=edit_line(
                    facts, rf"\b{field}(\s*=\s*){facts.high - uncounted}\b", rf"{field}\g<1>{size}"
                )
                if field
                else edit_size(facts, need),
            ),
        ),
    )


def first_position(facts: Facts) -> int:
    """The position of a row's first token: each stands at its column plus this.

    Where no place is known, the row is taken for one without padding.
    """
    starts = [
        int(e.value) - e.position[-1]
        for e in facts.observed.finding.examples
        if e.position and isinstance(e.value, int) and e.value >= e.position[-1]
    ]
    largest = facts.observed.values.maximum
    whole = int(largest) - facts.observed.shape[-1] + 1 if isinstance(largest, int) else 0
    return max(starts, default=whole)


def _relative(facts: Facts) -> Match:
    """A table of distances: 2n - 1 rows for n positions, a square of that for a window."""
    return Match(
        score=84,
        explanation=f"{facts.table} has {facts.high} rows, one for each distance between two "
        f"positions; distance index {facts.found} is of a longer sequence or a larger window.",
        fixes=(
            Fix(
                title="Cut the sequence, or make the table for the longest one",
                explanation="n positions have 2 n - 1 distances; a window of n by n has "
                "(2 n - 1) squared. Or clamp distances that are too long, as T5 does.",
                code=keep(name_of(facts, "distances"), facts.high),
            ),
        ),
    )


def _truncation(facts: Facts, usable: int) -> Edit | None:
    """The edit of the one call of a tokenizer, if it does not truncate yet."""
    calls = [(c, at) for c, at in facts.reading.calls() if _calls_tokenizer(facts, c, at)]
    if len(calls) != 1 or {k.arg for k in calls[0][0].keywords} & {
        "truncation",
        "max_length",
        None,
    }:
        return None
    ((call, at),) = calls
    lines = at.replaced(call, f", truncation=True, max_length={usable})", end_only=True)
    return Edit(cell_id=None, old=lines[0], new=lines[1]) if lines is not None else None


def _calls_tokenizer(facts: Facts, call: ast.Call, at: Spot) -> bool:
    """True if what is called is known to be a tokenizer; a name alone tells nothing."""
    called = call.func
    if isinstance(called, ast.Attribute) and called.attr in ENCODERS:
        called = called.value
    known = {t.name for t in facts.observed.tokenizers}
    return any(
        (isinstance(value, ast.Name) and value.id in known)
        or (isinstance(value, ast.Call) and re.search(r"Tokenizer", ast.unparse(value.func)))
        for value, _ in facts.reading.origins(called, at, known)
    )


RULES = (
    Rule(
        "position_ge_max",
        "The sequence is longer than the position table",
        "A model has a row for each position (512 for BERT; RoBERTa-like models lose two of "
        "them). The tokenizer only warns about longer texts: use truncation=True, "
        "max_length=..., or split the text.",
        position,
    ),
)
