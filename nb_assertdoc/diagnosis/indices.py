"""Causes in indexing, gather and scatter: actions, graphs, and indices of the user's own code."""

from __future__ import annotations

import re

from nb_assertdoc.model import Fix

from .facts import TABLES, Facts, vocabulary, words
from .fixes import MINUS_1, after, edit_index, keep, name_of
from .rule import Match, Rule

ACTION = vocabulary("action actions act acts a_t action_batch actions_batch")
# Causes of plain indexing: what counts from the end is valid there, too.
PLAIN = frozenset({"negative_index", "index_internal_oob", "index_out_of_bounds"})
PICTURE = vocabulary("batch_idx batch_index batch_id img_idx image_id image_idx image_index img_id")


def _of_policy(facts: Facts) -> bool:
    """One value of each row of Q-values or of a policy's probabilities is picked."""
    if facts.op != "gather" and not {"arange", "range"} & facts.index_words:
        return False
    learns = facts.mentions(r"reward|replay|\bdqn\b|q_?net|policy|\bactor|rollout|advantage")
    line = words(facts.observed.finding.location.source)
    if "log_prob" in line and facts.observed.index_expression is None:  # Categorical.log_prob
        return learns or bool(line & ACTION)
    outputs = {"q", "q_values", "qvalues", "critic", "policy"} & facts.table_words
    return learns and bool(outputs or "a" in facts.index_words)


def action(facts: Facts) -> Match | None:
    named = ACTION & facts.index_words or {"action", "actions"} & facts.table_words
    if not (named or _of_policy(facts)) or not facts.bad:
        return None
    if not (facts.indexes or facts.op in {"one_hot", *TABLES}):
        return None
    high, name = facts.high, name_of(facts, "actions")
    from_one = facts.only_high and facts.starts_at_one and facts.largest == high
    why = (
        "the actions are numbered from 1, the outputs from 0"
        if from_one
        else "the actions are not numbered 0..n-1, or the network has too few outputs"
    )
    edit = edit_index(facts, MINUS_1) if from_one else None
    return Match(
        score=82,
        explanation=f"Action {facts.found} in {facts.called}, but there are {high} actions, "
        f"{facts.valid}: {why}.",
        because=tuple(facts.sizes("act|num|n_")),
        fixes=(
            Fix(
                title="Number the actions from 0 where they are stored"
                if from_one
                else "Map the actions to 0..n-1",
                explanation="Convert once, when a transition is put into the memory; smaller "
                "actions have trained the wrong output in silence.",
                code=keep(after(name, MINUS_1) if edit else name, high),
                edit=edit,
            ),
        ),
    )


def fits(facts: Facts) -> dict[int, int]:
    """The other dimensions of the indexed tensor that hold every value, with their sizes."""
    sizes, largest = facts.observed.input_shape, facts.largest
    told = re.search(r"of dimension (\d+)$", facts.observed.finding.table or "")
    if told is None or largest is None or not facts.too_large or facts.bad[0] < 0:
        return {}
    return {d: size for d, size in enumerate(sizes) if size > largest and d != int(told[1])}


def _own(facts: Facts) -> bool:
    """True if the indexing itself stands in the user's line, not inside a library that it calls."""
    place = facts.observed.finding.location
    if facts.observed.index_expression is not None or place.expression is not None:
        return facts.observed.index_expression is not None
    line = place.source
    word = {"index": r"\[", "index_put": r"\["}.get(facts.op, re.escape(facts.op.split("_")[0]))
    return re.search(word, line) is not None


def negative(facts: Facts) -> Match | None:
    if not facts.all_negative or (facts.op not in TABLES and not facts.indexes):
        return None
    high, marked = facts.high, -100 in facts.bad
    rule = (
        f"here -1 counts from the end, but not beyond {facts.low}"
        if facts.wraps
        else "here -1 does not count from the end"
    )
    return Match(
        score=46,
        explanation=f"{facts.called} holds {facts.found}; {rule}. Negative values often mark "
        "padding or 'nothing found' (-1, -100).",
        fixes=(
            Fix(
                title="Replace or leave out negative entries before the call",
                explanation="Mask them, or map them to a valid row (padding_idx) first."
                + (" -100 marks what a loss leaves out; no index may be it." if marked else ""),
                code=keep(name_of(facts, "index"), high, low=facts.lowest),
            ),
        ),
    )


def split_by_data_parallel(facts: Facts) -> Match | None:
    if not facts.indexes or not facts.mentions(r"(?<!Distributed)DataParallel\("):
        return None
    within = facts.high is not None and facts.too_large and facts.bad[-1] < 8 * facts.high
    if not within or facts.observed.finding.module is None:
        return None
    # A picture's number is a column of the targets, or one of as many as the slice has rows.
    expression = facts.observed.index_expression or ""
    numbers = re.search(r"\[:, 0\]$", expression) or PICTURE & facts.index_words
    of_batch = (facts.observed.finding.table or "").endswith("of dimension 0")
    same = facts.observed.shape[:1] == facts.observed.input_shape[:1]
    return Match(
        score=62 if of_batch and (numbers or same) else 44,
        explanation="nn.DataParallel gives each GPU a slice of the batch, but values that "
        "point into the whole batch (a picture number, edges of a batch of graphs) stay as "
        f"they are: {facts.found} is beyond the slice's {facts.valid}.",
        fixes=(
            Fix(
                title="Run on one GPU, or use DistributedDataParallel",
                explanation="There each process has its own batch and its own numbering.",
                code=keep(name_of(facts, "index"), facts.high),
            ),
        ),
    )


def internal(facts: Facts) -> Match | None:
    if not facts.indexes or _own(facts):
        return None
    finding = facts.observed.finding
    inside = f" inside `{finding.module}`" if finding.module else ""
    return Match(
        score=15,
        explanation=f"{finding.op}{inside}, in library code called by your line, met index "
        f"{facts.found} where {facts.valid} is valid. Its index is made from what was passed "
        "in: sizes, ids or a config that do not fit together, or a bug of the library.",
        fixes=(
            Fix(
                title="Compare what you pass in with what the library was configured for",
                explanation="Number of classes, ranges, sizes and ids; then search the "
                "library's issues for the operator and the CPU's message.",
                code=keep(name_of(facts, "index"), facts.high),
            ),
        ),
    )


def from_end(facts: Facts) -> str:
    """The valid range; of plain indexing with what counts from the end."""
    return f"{facts.valid} (or {facts.low}..-1, from the end)" if facts.wraps else facts.valid


def _elsewhere(facts: Facts) -> str:
    """What the size next to the values tells: another dimension holds them, or it is one short."""
    others = fits(facts)
    if others and facts.op in {"index", "index_put"}:
        told = " and ".join(f"dimension {d}, of size {size}" for d, size in others.items())
        pair = re.search(r"\[.*,.*\]", facts.observed.finding.location.expression or "")
        asked = ": are two indices swapped?" if pair else ": is the dimension the right one?"
        return f" All values fit {told}{asked}"
    return " One past the end: off by one, perhaps." if facts.only_high else ""


def out_of_bounds(facts: Facts) -> Match | None:
    return Match(
        score=10,
        explanation=f"{facts.called} holds {facts.found}; "
        f"{facts.table.replace('the table', 'the tensor')} takes "
        f"{from_end(facts)} there." + _elsewhere(facts),
        because=tuple(facts.sizes("num|size|n_|len|max")),
        fixes=(
            Fix(
                title="Correct the index or the size of the tensor",
                explanation="Check where the index is computed: off by one, another dimension, "
                "or indices of a tensor that was filtered or cut since.",
                code=keep(name_of(facts, "index"), facts.high, low=facts.lowest),
            ),
        ),
    )


RULES = (
    Rule(
        "action_index_out_of_range",
        "An action is not below the number of outputs",
        "Q-values or probabilities have one column per action, 0..n-1. Actions that are logged "
        "from 1, or another environment's actions, do not fit. Convert them when they are "
        "stored.",
        action,
    ),
    Rule(
        "negative_index",
        "A negative index",
        "Embedding, gather and scatter take no negative index; x[i] takes -size..size-1. "
        "Negative values often mark padding or 'nothing found': mask them first.",
        negative,
    ),
    Rule(
        "dataparallel_split_breaks_index",
        "DataParallel split the batch, not the numbers that point into it",
        "nn.DataParallel cuts every input along dimension 0. Columns that hold a picture's "
        "number in the batch, or graphs in a dict, still refer to the whole batch. Use one GPU "
        "or DistributedDataParallel.",
        split_by_data_parallel,
    ),
    Rule(
        "index_internal_oob",
        "An index is out of bounds inside library code",
        "The indexing is in a library, not in your line: what was passed in (class numbers, "
        "ranges, sizes) does not fit the library's configuration, or the library has a bug.",
        internal,
    ),
    Rule(
        "index_out_of_bounds",
        "An index is outside the tensor",
        "x[i] takes -size..size-1, gather and scatter take 0..size-1. Off by one, a wrong "
        "dimension, or an index made for a tensor that was filtered or cut since.",
        out_of_bounds,
    ),
)
