"""Causes in the targets of losses, one-hot encodings and other indices that are class labels."""

from __future__ import annotations

import re

from nb_assertdoc.model import Fix

from . import numbering
from .facts import LOSSES, TABLES, Facts, vocabulary, words
from .fixes import MINUS_1, after, edit_index, edit_line, keep, keep_labels, name_of
from .indices import ACTION
from .rule import Match, Rule
from .sizes import edit_outputs, edit_size, outputs_size, rows_needed, set_in

LABEL = vocabulary(
    "label labels lbl tcls lbls target targets class classes cls cls_id category_id y_true "
    "truth gt ground_truth"
)
PICKED = vocabulary("y yb tgt tag tags")  # of one value for each row
CLASS_TABLE = vocabulary("label labels class classes")
MASK = vocabulary("mask masks seg segs segmentation semantic semseg segmap trimap")
PLACE = r"^targets?_(idx|index|indices|pos|position|node)s?$"  # where, not which class
OUTPUTS = vocabulary("class class_weights logits prob probs log_probs transitions emissions")
COUNT = r"(?i)\b(\w*class(?:es)?|num_labels|n_labels)(\s*=\s*)"
SPAN = vocabulary("start end starts ends span spans answer")
HOT = vocabulary("onehot one_hot hot")
ONES = (  # 1 at each index, in each row
    r"\bscatter_?\((?!\s*(dim\s*=\s*)?0\b).*,\s*(value\s*=\s*)?1(\.0*)?\s*\)$"
)
SUBTRACT, SUBTRACT_EARLY = "Subtract 1 from the labels", "Subtract 1 where the labels are made"
MARKS = ((99,), (100,), (255,), (999,), (9999,))  # bad values that mean "no label"
N_CLASSES = r"class|label|n_out|num_out|output"


def is_label(facts: Facts) -> bool:
    """The index means a class: by the operator, or by its name in an indexing operator."""
    if facts.op in LOSSES:
        return True
    if facts.op == "one_hot":
        return not ACTION & facts.index_words
    if facts.op in TABLES:  # of a conditional generator: a row per class
        return bool(facts.table_words & CLASS_TABLE)
    picks = (
        facts.op == "gather"
        or {"arange", "range"} & facts.index_words
        or OUTPUTS & facts.table_words
    )
    named = facts.index_words & (LABEL | PICKED if picks else LABEL)
    place = not picks and any(re.search(PLACE, word) for word in facts.index_words)
    return facts.indexes and not facts.graph and bool(named or mask_words(facts)) and not place


def mask_words(facts: Facts) -> frozenset[str]:
    """Words of the index that speak of a mask; `seg` of a sum is the number of a segment."""
    return facts.index_words & (MASK - {"seg", "segs"} if facts.sums else MASK)


def is_one_hot(facts: Facts) -> bool:
    """A one-hot code is made of the index: by the operator, by rows of `eye`, or by a scatter."""
    by_hand = facts.op == "index" and "eye" in facts.table_words
    scattered = facts.op == "scatter" and bool(
        facts.index_words & (LABEL | MASK)
        or HOT & (facts.names | words(facts.observed.finding.location.function))
        or re.search(ONES, facts.observed.finding.location.expression or "")
    )
    return facts.op == "one_hot" or by_hand or scattered


def _binary_from_1(facts: Facts) -> bool:
    """The target of a binary loss is 1 and 2, and too often so for an accident of one batch."""
    ends = facts.observed.values.minimum, facts.observed.values.maximum
    return facts.observed.finding.argument == "target" and ends == (1, 2) and facts.bad == (2,)


def starts_at_1(facts: Facts) -> Match | None:
    if facts.op == "binary_cross_entropy" and _binary_from_1(facts) and facts.seen.count >= 5:
        edit = edit_index(facts, MINUS_1)
        target = after(name_of(facts, "target"), MINUS_1 if edit else "{}")
        fix = Fix(
            title=SUBTRACT if edit else SUBTRACT_EARLY,
            explanation="A binary target is 0 or 1; once is enough, best in the data.",
            code=f"assert set({target}.unique().tolist()) <= {{0, 1}}",
            edit=edit,
        )
        explanation = f"{facts.called} holds 1 and 2; a binary target is 0 or 1."
        return Match(score=92, explanation=explanation, fixes=(fix,))
    if (mapped := numbering.mapped_from_1(facts)) is not None:
        return mapped
    if not is_label(facts) or facts.op == "ctc_loss" or facts.ignore == 0:
        return None
    if not facts.only_high or not facts.starts_at_one or facts.largest != facts.high:
        return None
    if facts.held_out and facts.mentions(r"\.backward\(") and not facts.mentions(r"\.fit\("):
        return None  # training came through: its labels are numbered otherwise
    edit = edit_index(facts, MINUS_1)
    where = "Here, or better in the data" if edit else "Do it once, in the data"
    return Match(
        score=92,
        explanation=f"{facts.called} is numbered 1..{facts.high}, classes are numbered "
        f"{facts.valid}. The number of classes is right; the numbering starts at the wrong end.",
        because=(
            f"the values are exactly 1..{facts.high}, one more than {facts.valid} at each end",
        ),
        fixes=(
            Fix(
                title=SUBTRACT if edit else SUBTRACT_EARLY,
                explanation=f"{where} (data set, frame or collate function), for every split and "
                "only once; add 1 again when you show predictions.",
                code=keep_labels(facts, changed=MINUS_1 if edit else "{}"),
                edit=edit,
            ),
            Fix(
                title="Or map the label names to 0..C-1 once, for all data",
                explanation="A dict made from all names still fits if a class is added or dropped.",
                code=keep_labels(facts),
            ),
        ),
    )


def span_position(facts: Facts) -> Match | None:
    if facts.op not in LOSSES or not facts.too_large:
        return None
    here = facts.index_words & SPAN and not {"end_to_end", "label", "class"} & facts.index_words
    inside = facts.observed.index_expression is None and facts.mentions(r"start_positions?\b")
    logits = {"start_logits", "end_logits"} & facts.table_words
    if not (here or logits or inside):
        return None
    name = name_of(facts, "start_positions")
    return Match(
        score=85 if here or logits else 60,
        explanation=f"{facts.called} is a position in the text, and the text has only "
        f"{facts.high} tokens here: the answer was cut off by truncation, or positions were "
        "counted in characters.",
        fixes=(
            Fix(
                title="Drop or re-map answers that truncation cut off",
                explanation="After truncation set such a position to 0 (no answer) or leave "
                "the row out; convert character offsets with the tokenizer's offset mapping.",
                code=keep(name, facts.high, facts.ignore),
            ),
        ),
    )


def one_hot_class(facts: Facts) -> Match | None:
    if not is_one_hot(facts) or not facts.too_large:
        return None
    high, need = facts.high, int(max(facts.bad)) + 1
    return Match(
        score=64,
        explanation=f"The one-hot code of {facts.called} has {high} columns ({facts.valid}), "
        f"the values go up to {need - 1}{'' if facts.whole else ' or further'}. The number of "
        "classes given to the encoding is not the data's.",
        because=tuple(facts.sizes(N_CLASSES)),
        fixes=(
            Fix(
                title=f"Give the encoding at least {need} classes, or correct the labels",
                explanation="Take the number of classes from the data in one place and use it "
                f"everywhere.{set_in(outputs_size(facts))}",
                code=keep(name_of(facts, "labels"), need) if facts.whole else None,
            ),
        ),
    )


def loss_mismatch(facts: Facts) -> Match | None:
    """One output with a sigmoid into cross-entropy, class indices into BCE."""
    argument = facts.observed.finding.argument
    name = name_of(facts, "target")
    if facts.op == "binary_cross_entropy" and argument == "target" and facts.bad:
        classes = not facts.strange and all(
            float(v).is_integer() and 2 <= v < 255 for v in facts.bad
        )
        if not classes:
            return None
        return Match(
            score=90,
            title="Class indices given to a binary loss",
            explanation=f"{facts.called} holds class indices ({facts.found}); binary "
            "cross-entropy wants a probability in [0, 1] for each output.",
            fixes=(
                Fix(
                    title="Use cross-entropy for classes that exclude each other",
                    explanation="nn.CrossEntropyLoss on raw outputs (one per class) and "
                    "integer targets; for several labels at once give BCEWithLogitsLoss a 0/1 "
                    "target per class.",
                    code=f"assert bool((({name} >= 0) & ({name} <= 1)).all()), 'class indices "
                    "in a binary loss'",
                ),
            ),
        )
    binary = facts.op in {"cross_entropy", "nll_loss"} and facts.high == 1 and facts.largest == 1
    if binary and facts.mentions("sigmoid"):
        return Match(
            score=90,
            title="A single sigmoid output given to cross-entropy",
            explanation="The model has one output with a sigmoid; cross-entropy needs one raw "
            f"output per class, so with one output only label 0 exists and {facts.found} is out "
            "of range.",
            fixes=(
                Fix(
                    title="Use BCEWithLogitsLoss, or two outputs without sigmoid",
                    explanation="One output: nn.BCEWithLogitsLoss on the raw output, float "
                    "targets 0.0/1.0. Two outputs: nn.CrossEntropyLoss on the raw outputs.",
                    code=f"assert {facts.observed.table_expression or 'logits'}.shape[1] >= 2, "
                    "'cross-entropy needs an output per class'",
                ),
            ),
        )
    return None


def ge_num_classes(facts: Facts) -> Match | None:
    if not is_label(facts) or not facts.too_large or facts.high is None:
        return None
    observed, high, name = facts.observed, facts.high, name_of(facts, "labels")
    top = max(v for v in (facts.largest, facts.bad[-1]) if v is not None)
    need = max(int(top) + 1, rows_needed(facts, numbering.CLASS_LISTS))
    num_labels = observed.config.get("num_labels")
    because = facts.sizes(N_CLASSES) + facts.longer(numbering.CLASS_LISTS)
    there = "the loss has" if facts.op in LOSSES else "there are"
    explanation = (
        f"{facts.called} holds {facts.found}, and {there} {facts.classes} ({facts.valid})."
    )
    title, how, sure = numbering.more_classes(facts, need)
    how += set_in(outputs_size(facts))
    traced = edit_size(facts, need) if facts.op in TABLES else edit_outputs(facts, need)
    edit = traced or edit_line(facts, rf"{COUNT}{high}\b", rf"\g<1>\g<2>{need}")
    edit = edit if sure or facts.follows_high else None
    if edit is not None and facts.held_out and edit.new.count(" + 1") > edit.old.count(" + 1"):
        edit = None  # the list of classes that training has: a nameless further one mends nothing
    code = numbering.keep_below(facts, need, sure or edit is not None)
    if facts.op == "ctc_loss":
        title = "Count the blank as a class"
        how = "CTC needs one output for each symbol and one for the blank: outputs = symbols + 1."
    elif facts.bad in MARKS and facts.op in LOSSES and top > 2 * high:
        mark = facts.bad[0]
        explanation += f" {mark} looks like a mark for 'no label'; the usual one is -100."
        title, how = f"Tell the loss to ignore {mark}", f"ignore_index={mark}, or mark with -100."
        code, edit = keep(name, high, int(mark)), None
    elif high == 1 and need > 2:
        named = facts.counts(N_CLASSES, need)
        classes = min(named.values(), default=need)
        because += [f"`{name}` is {size}" for name, size in named.items()]
        title = f"Give the model {classes} outputs, one per class"
        how = "It has one output now; cross-entropy needs one for each class."
        edit, code = edit_outputs(facts, classes), keep_labels(facts, classes)
    elif high == 1:
        title = "Give the model an output per class, or use a binary loss"
        how = (
            "With one output use nn.BCEWithLogitsLoss and float targets; cross-entropy needs "
            "two outputs."
        )
    elif num_labels == high or (observed.index_expression is None and num_labels is not None):
        because.append(f"the model's config has num_labels={num_labels}, the labels need {need}")
        title = f"Set num_labels={need} in the model's config"
        how = f"Pass num_labels={need} where the config or the model is made; 2 is the default."
        code = f"assert model.config.num_labels >= {need}, 'labels go up to {need - 1}'"
    elif (other := numbering.renumbering(facts)) is not None:
        title, how, told = other
        because.append(told)
        edit, code = None, keep_labels(facts) if facts.held_out is None else None
    step = facts.observed.finding.step
    if step is not None and step.split and facts.held_out:
        explanation += (
            f" It happens in the {step.split} pass: are its classes numbered on their own, or "
            "does it have a class that training has not?"
        )
    more: tuple[Fix, ...] = ()
    if (
        facts.smallest is not None
        and facts.smallest >= 1
        and facts.whole
        and facts.op != "ctc_loss"
    ):
        because.append(f"note that the smallest label is {facts.smallest}: 0 is not used")
        first = int(facts.smallest)
        if facts.seen.distinct_count == need - first and facts.held_out is None:
            changed = f"{{}} - {first}"
            more = (
                Fix(
                    title=f"Or subtract {first} and give the model {need - first} classes",
                    explanation=f"The labels are exactly {first}..{need - 1}; subtract in every "
                    "split.",
                    code=keep_labels(facts, need - first, changed),
                ),
            )
    if facts.bad[0] < 0:
        because.append(f"{facts.bad[0]} is outside too: it may mark rows without a label")
    return Match(
        score=50,
        explanation=explanation,
        because=tuple(because),
        fixes=(
            Fix(title=title, explanation=how, code=code, edit=edit),
            *more,
            Fix(
                title="Or correct the labels, if they are wrong",
                explanation="One mapping from class names to 0..C-1, made from the training "
                "data and used for every split.",
                code=f"assert set({name}.unique().tolist()) <= set(range({high})), 'labels "
                f"outside {facts.valid}'",
            ),
        ),
    )


RULES = (
    Rule(
        "label_starts_at_1",
        "Labels start at 1",
        "Classes are numbered 0..C-1; the labels run 1..C (ratings, MATLAB files, ids of a "
        "table). The number of classes is right: subtract 1 from the labels, in every split. A "
        "bigger head would hide the fault and leave output 0 unused.",
        starts_at_1,
    ),
    Rule(
        "label_position_ge_sequence",
        "An answer position lies behind the end of the text",
        "A start or end position is used as the class among the tokens of the text; truncation "
        "cut the answer off, or positions count characters and not tokens.",
        span_position,
    ),
    Rule(
        "one_hot_class_ge_num_classes",
        "One-hot encoding has too few classes",
        "one_hot(x, C), or a scatter into C columns, takes values 0..C-1. The number of "
        "classes written in the code is smaller than the largest label plus one.",
        one_hot_class,
    ),
    Rule(
        "loss_mismatch",
        "The loss does not fit the model's output",
        "Classes that exclude each other: raw outputs, one per class, integer targets, "
        "cross_entropy. Yes/no or several labels at once: raw outputs and float targets in [0, "
        "1], binary_cross_entropy_with_logits. nll_loss wants log_softmax outputs. No sigmoid "
        "or softmax before cross_entropy or a with_logits loss.",
        loss_mismatch,
    ),
    Rule(
        "label_ge_num_classes",
        "A label is not below the number of classes",
        "A loss with C outputs takes labels 0..C-1. The data has more classes than the model "
        "has outputs: a head sized too small, num_labels left at its default, a class only one "
        "split has, labels with gaps. Compare the smallest and largest label with the number "
        "of outputs.",
        ge_num_classes,
    ),
)
