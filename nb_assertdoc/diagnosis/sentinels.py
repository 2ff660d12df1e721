"""Causes in negative labels: marks of what has no label."""

from __future__ import annotations

import re

from nb_assertdoc.model import Fix

from . import numbering
from .facts import LOSSES, Facts
from .fixes import after, edit_ignored, edit_index, keep, name_of
from .labels import is_label
from .rule import Match, Rule

HALVED = "({} + 1) // 2"  # what an edit makes of the index


def negative_sentinel(facts: Facts) -> Match | None:
    if not is_label(facts) or not facts.all_negative or not (facts.low == 0 or facts.wraps):
        return None
    high, name = facts.high, name_of(facts, "labels")
    values = set(facts.seen.distinct) - {facts.ignore}
    because: tuple[str, ...] = ()
    if facts.ignore is not None and facts.op in LOSSES:
        because = (f"`ignore_index` is {facts.ignore}, so only {facts.ignore} would be left out",)
    if values == {-1, 1} and high == 2:
        edit, check = edit_index(facts, HALVED), keep(after(name, HALVED), high)
        return Match(
            score=88,
            title="Labels are -1 and +1",
            explanation=f"{facts.called} uses -1 and +1 for two classes; class indices are 0 "
            "and 1.",
            because=because,
            fixes=(
                Fix(
                    title="Map -1 and +1 to 0 and 1",
                    explanation="Half of the label plus one.",
                    code=check if edit else f"{name} = ({name} + 1) // 2; {keep(name, high)}",
                    edit=edit,
                ),
            ),
        )
    if _none_at_all(facts):
        return _no_labels(facts)
    if facts.op not in LOSSES:
        return _as_index(facts)
    if (
        facts.bad == (-1,)
        and high is not None
        and facts.whole
        and facts.largest == high - 2
        and high > 2
    ):
        because += (
            f"the largest label is {high - 2}: the labels fit {facts.valid} when 1 is added",
        )
        explanation = (
            f"-1 in {facts.called}: either 1 was subtracted from labels that began at 0 already, "
            "or -1 marks rows without a label."
        )
    else:
        explanation = (
            f"{facts.found} in {facts.called} is no class: such a value usually marks rows "
            "without a label (unlabelled, void, padding), and the loss was not told to ignore "
            "it."
        )
    fixes = [
        Fix(
            title="Leave the rows without a label out",
            explanation="Filter them in the data set, or mask them before the call.",
            code=f"assert bool(({name} >= 0).all()), 'rows without a label'",
        )
    ]
    if numbering.inside_model(facts):
        fixes = [numbering.labels_left_out(facts)]
    elif len(facts.bad) == 1 and facts.op in {"cross_entropy", "nll_loss"}:
        value = int(facts.bad[0])
        fixes.insert(
            0,
            Fix(
                title=f"Tell the loss to ignore {value}",
                explanation=f"ignore_index={value} gives these entries no loss and no gradient.",
                code=keep(name, high, value),
                edit=edit_ignored(facts, value),
            ),
        )
    return Match(score=88, explanation=explanation, because=because, fixes=tuple(fixes))


def _none_at_all(facts: Facts) -> bool:
    """Every label of the data set, or of all that a held-out pass saw, is the same mark."""
    seen = facts.seen
    alone = len(facts.bad) == 1 and seen.minimum == seen.maximum == facts.bad[0]
    return alone and seen.count > 1 and (facts.whole or facts.held_out is not None)


def _no_labels(facts: Facts) -> Match:
    """A test split whose labels are hidden."""
    mark, pass_ = int(facts.bad[0]), facts.held_out or "this"
    known = "All" if facts.whole else "So far all"
    if numbering.inside_model(facts):
        fix = numbering.labels_left_out(facts)
    else:
        fix = Fix(
            title="Compute no loss and no score on this split",
            explanation="Only predict on it. Ignoring the mark would leave nothing: the mean of no "
            "losses is NaN. Measure on a split that has labels.",
        )
    return Match(
        score=88,
        title="This split has no labels",
        explanation=f"{known} labels of the {pass_} data are {mark}: its labels are hidden, as "
        "those of test splits of benchmarks and competitions are.",
        fixes=(fix,),
    )


def _as_index(facts: Facts) -> Match:
    """Padded labels that pick values themselves, as in a CRF: no loss leaves them out."""
    name, mark = name_of(facts, "labels"), facts.bad[0]
    own = re.match(r"[\w.]*", name)  # `tags` of `tags[i]`
    whole = own[0] if own and own[0] else "labels"
    wraps = (
        f" Marks down to {facts.low} would not even fail here: they count from the end."
        if facts.wraps
        else ""
    )
    return Match(
        score=88,
        explanation=f"{facts.found} in {facts.called} marks what has no label (padding, "
        "unlabelled). A loss can ignore such a mark; here the labels are used as an index, where "
        f"it is a number like any other.{wraps}",
        fixes=(
            Fix(
                title=f"Replace {mark} by a valid class first, and mask these places after",
                explanation=f"{whole}.masked_fill({whole} < 0, 0) before the call; multiply what "
                f"comes of it by the mask ({whole} >= 0).",
                code=f"assert bool(({name} >= 0).all()), 'labels that mark padding'",
            ),
        ),
    )


RULES = (
    Rule(
        "label_negative_sentinel",
        "A negative label marks 'no label'",
        "A value such as -1 stands for rows without a label. Cross-entropy ignores only its "
        "ignore_index (-100 unless you say otherwise). Set ignore_index to the mark, or leave "
        "such rows out.",
        negative_sentinel,
    ),
)
