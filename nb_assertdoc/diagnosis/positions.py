"""Causes in tables of positions: the sequence is longer than the table."""

from __future__ import annotations

import re

from nb_assertdoc.model import Edit, Fix

from .facts import Facts, vocabulary
from .fixes import edit_line, keep, name_of
from .rule import Match, Rule
from .tables import config_says, is_table

ROTARY = vocabulary("rope rotary freqs freqs_cis cos_cached sin_cached cos_cache sin_cache")
POSITION = ROTARY | vocabulary(
    "pos position positions positional position_ids wpe pe posemb pos_emb cache_position"
)


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
    values, shape = facts.observed.values, facts.observed.shape
    length = shape[-1] if shape else values.count
    offset = int(values.maximum) - length + 1 if arange and isinstance(values.maximum, int) else 0
    usable = facts.high - offset
    because = config_says(facts, *lengths)
    if arange:
        start = f", positions start at {offset}, so {usable} tokens fit" if offset else ""
        because.append(f"the longest row has {length:,} tokens{start}")
    because += [
        f"`{t.name}.model_max_length` is {t.model_max_length:,}, more than the {usable} that fit"
        for t in facts.observed.tokenizers
        if t.model_max_length is not None and t.model_max_length > usable
    ]
    if {"rel", "relative"} & facts.table_words:
        return _relative(facts)
    of_model = "max_position_embeddings" in facts.observed.config
    ids = f"assert input_ids.size(-1) <= {usable}, f'{{input_ids.size(-1)}} tokens > {usable}'"
    return Match(
        score=84 if named or (arange and of_config) else 45,
        explanation=f"The sequence is longer than the {facts.high} positions of "
        f"{facts.table}: nothing cut it to {usable} tokens. A tokenizer only warns.",
        because=tuple(because),
        fixes=(
            Fix(
                title=f"Cut texts to {usable} tokens",
                explanation=f"Give the tokenizer truncation=True, max_length={usable}, or cut "
                "or split the rows.",
                code=ids if of_model else keep(name_of(facts, "positions"), facts.high),
                edit=_truncation(facts, usable),
            ),
            Fix(
                title="Or make the position table longer",
                explanation="Only for a model trained from scratch: max_position_embeddings "
                f"(or the number of rows) at least {int(max(facts.bad)) + 1}.",
                code=f"assert input_ids.size(-1) <= model.config.max_position_embeddings - {offset}"
                if of_model
                else keep(name_of(facts, "positions"), int(max(facts.bad)) + 1),
            ),
        ),
    )


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
    call = r"((?:self\.)?\w*tok(?:enizer)?\([^()]*(?:\[[^\]]*\])?)\)"
    edit = edit_line(facts, call, rf"\1, truncation=True, max_length={usable})")
    return edit if edit and not re.search("truncation|max_length", edit.old) else None


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
