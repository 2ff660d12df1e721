"""How labels are numbered: from 1, with gaps, by another list; and what one batch cannot show."""

from __future__ import annotations

import ast
import re

from nb_assertdoc.model import Fix

from .facts import LOSSES, Facts
from .fixes import CHAIN, MINUS_1, after, edit_index, keep, keep_labels, name_of
from .rule import Match

# Tables that number classes: `tag2idx`, `class_names`. Lists of one label per row are none.
CLASS_LISTS = (
    r"(^|_)(label|tag|class|intent|slot)\w*(2|_to_|names?$|map$|vocab$)"
    r"|^(classes|tags|categories)$|2(label|tag|class)"
)
CATEGORY_IDS = r"\bcategory_ids?\b|\bcat_ids?\b|getCatIds|pycocotools"  # of COCO and its kin
SPLIT = r"\b(val|valid|validation|test|dev|eval)\b|_(val|valid|test|dev)\b|random_split"


def numbering(facts: Facts) -> dict[str, dict[str, int]]:
    """The user's small tables of numbers, by name: {"names": {"cup": 1, "fork": 2}}."""
    found = {}
    for variable in facts.observed.variables:
        size = re.match(r"dict of (\d+) (\{.*\})$", variable.value)
        try:
            table = ast.literal_eval(size[2]) if size else {}
        except (SyntaxError, ValueError):
            continue
        if size and len(table) == int(size[1]):
            found[variable.name] = table
    return found


def mapped_from_1(facts: Facts) -> Match | None:
    """A table of the user's gives each class its number, 1..C; there are C columns."""
    high = facts.high
    if high is None or high < 2 or not facts.only_high or facts.ignore == 0:
        return None
    told = {e.meaning.partition("[")[0] for e in facts.observed.finding.examples if e.meaning}
    ones = [
        name
        for name, table in numbering(facts).items()
        if name in told and sorted(table.values()) == list(range(1, high + 1))
    ]
    zero = facts.smallest == 0
    if not ones or (zero and facts.op in LOSSES):  # 0 is a class of its own there
        return None
    edit = None if zero else edit_index(facts, MINUS_1)
    also = (
        " 0 occurs too (padding, background): mask it before, since 0 - 1 takes the last column."
        if zero
        else ""
    )
    return Match(
        score=91,
        explanation=f"`{ones[0]}` numbers the {high} classes 1..{high}; the {high} columns are "
        f"numbered 0..{high - 1}.{also}",
        fixes=(
            Fix(
                title="Number the classes from 0, or subtract 1 from the labels",
                explanation=f"In `{ones[0]}`, or where the labels are used, but not in both.",
                code=keep(after(name_of(facts, "labels"), MINUS_1 if edit else "{}"), high),
                edit=edit,
            ),
            Fix(
                title="Or give the background a column",
                explanation=f"If 0 is a class of its own, there are {high + 1} classes.",
            ),
        ),
    )


def one_split(facts: Facts) -> bool:
    """The values known are those of one part of the data: other parts may hold what is missing."""
    return facts.held_out is not None or facts.mentions(SPLIT)


def renumbering(facts: Facts) -> tuple[str, str, str] | None:
    """Title and words of the first fix, and the evidence, where labels need other numbers."""
    high, seen, smallest = facts.high or 0, facts.seen, facts.smallest
    if facts.mentions(CATEGORY_IDS) and smallest is not None and smallest >= 1:
        return (
            "Map the category ids to 0..C-1",
            "{id: i for i, id in enumerate(sorted(ids))}, made once from the list of categories "
            "and used for every annotation.",
            "category ids of annotation files often begin at 1 and have gaps",
        )
    if facts.whole and seen.distinct_count <= high:
        told = f"there are only {seen.distinct_count} distinct labels, but with gaps"
        if facts.held_out is not None:
            return (
                "Compare the numbering with that of the training data",
                f"Only the labels of {facts.observed.data_name} are known here: if "
                f"{facts.found} is a class that training has not, the model needs an output for "
                "it. Make one mapping for all splits; one for this split alone would give "
                "classes other numbers.",
                f"{told}, in this split",
            )
        if seen.distinct_count == high or not one_split(facts):
            return (
                "Number the labels 0..C-1 without gaps",
                "The labels are raw codes; map each distinct one to its place in the sorted "
                "list, the same list for every split.",
                told,
            )
        return (
            "Number the labels 0..C-1 with one mapping for all splits",
            f"Only the labels of {facts.observed.data_name} are known here, and the model has an "
            "output more: a class may be in another split only. Make the mapping from all of them.",
            told,
        )
    episodic = facts.mentions(r"\b(n_?)?ways?\b") and facts.mentions(r"support|shots?\b")
    if episodic and not facts.whole:
        return (
            f"Number the classes of each episode 0..{high - 1}",
            "In N-way tasks the classes of one episode are numbered anew, the same for support "
            "and query; these are the numbers of the whole data.",
            f"there are {high} outputs, and the labels are larger",
        )
    return None


def outputs_at_run(facts: Facts) -> str | None:
    """The code that gives the number of classes when the line runs: `logits.shape[1]`."""
    outputs = facts.observed.table_expression or ""
    if facts.op not in LOSSES or len(facts.observed.input_shape) < 2:
        return None
    return f"{outputs}.shape[1]" if re.fullmatch(CHAIN, outputs) else None


def keep_below(facts: Facts, need: int, sure: bool) -> str | None:
    """The assertion for labels after the number of classes has grown.

    `sure`: `need` is the number of all classes; else it is read where the line runs, if it can be.
    """
    if sure:
        return keep_labels(facts, need)
    bound, name = outputs_at_run(facts), name_of(facts, "labels")
    if bound is None:
        return None
    inside = f"({name} >= 0) & ({name} < {bound})"
    if facts.ignore is not None and (facts.ignore != -100 or facts.ignore in facts.seen.distinct):
        inside += f" | ({name} == {facts.ignore})"
    return f"assert bool(({inside}).all()), 'no such class'"


def more_classes(facts: Facts, need: int) -> tuple[str, str, bool]:
    """Title and words of the fix that gives the model more outputs, and whether `need` is sure."""
    listed = [size for _, size in facts.containers(CLASS_LISTS) if size == need]
    if facts.whole or listed:
        how = f"The last layer needs {need} outputs: take the number from all labels, {need} = "
        how += "largest label + 1." if not listed else "length of the list that numbers them."
        return f"Give the model {need} classes", how, True
    how = (
        f"The labels known so far go up to {need - 1}; the last layer needs an output for each "
        "class of all the data."
    )
    if facts.follows_high:
        return f"Give the model at least {need} classes", how, False
    return f"Give the model all classes, or number the labels {facts.valid}", how, False


def inside_model(facts: Facts) -> bool:
    """A transformers model computes the loss itself, from `labels` that it is given."""
    made = re.search(r"For[A-Z]\w+|LMHeadModel", facts.observed.finding.module_type or "")
    return made is not None and bool(facts.observed.config) and facts.op in LOSSES


def labels_left_out(facts: Facts) -> Fix:
    """Rows without labels, given to a model that computes the loss itself."""
    hidden = facts.mentions(r"\.predict\(|\.evaluate\(")
    return Fix(
        title="Give the model no labels where there are none",
        explanation=("For test data whose labels are hidden: " if hidden else "")
        + 'dataset.remove_columns("label"), or drop `labels` from the batch; without them the '
        "model computes no loss. Of single rows or tokens without a label, make the label -100: "
        "that is what the model's own loss leaves out.",
        code=keep_labels(facts),
    )
