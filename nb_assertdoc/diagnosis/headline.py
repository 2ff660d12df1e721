"""The report's one sentence: the value and the range."""

from __future__ import annotations

from nb_assertdoc.model import Cause, Observed

from .facts import LOSSES, TABLES, Facts
from .indices import PLAIN, from_end
from .positions import first_position
from .values import spell_strange

# Cause key -> what one value is called.
NOUNS = {
    "label_starts_at_1": "Label",
    "label_ge_num_classes": "Label",
    "label_negative_sentinel": "Label",
    "label_position_ge_sequence": "Position",
    "mask_value_unmapped": "Mask value",
    "one_hot_class_ge_num_classes": "Class",
    "loss_mismatch": "Label",
    "token_id_ge_vocab": "Token id",
    "position_ge_max": "Position",
    "token_type_ge_table": "Token type",
    "bbox_coordinate_range": "Box coordinate",
    "tts_symbol_out_of_table": "Symbol id",
    "category_unseen": "Category code",
    "category_id_ge_table": "Id",
    "time_feature_ge_table": "Value",
    "action_index_out_of_range": "Action",
    "node_index_ge_num_nodes": "Node",
    "group_id_ge_num_groups": "Group",
}
PLURALS = {"Index": "Indices", "Class": "Classes"}


def headline(observed: Observed, cause: Cause) -> str:
    """One sentence with the bad value and the valid range.

    "Label 5 does not exist: the loss has 5 classes, 0..4."
    """
    facts, finding = Facts(observed), observed.finding
    if finding.op == "multinomial" and cause.key in {"multinomial_nan_inf_neg", "nan_inf_in_data"}:
        return (
            f"Sampling got {spell_strange(facts)} as a probability ({finding.bad_count:,} of "
            f"{finding.total:,})."
        )
    if finding.op == "multinomial":
        return "Sampling got probabilities that cannot be drawn from."
    if cause.key == "argument_out_of_range":
        return f"{cause.title}: `{finding.argument}` of {finding.op} holds {facts.found}."
    if finding.bound is None or finding.bound.high_inclusive:
        wanted = "finite and not negative" if finding.bound is None else f"in {facts.valid}"
        many = f"{finding.bad_count:,} of {finding.total:,} values"
        ends = [v for v in finding.bad_values if not isinstance(v, str)]
        span = f"{ends[0]:.4g} to {ends[-1]:.4g}" if len(ends) > 1 else facts.found
        return f"{finding.op} got {many} that are not {wanted}: {span}."
    noun, several = NOUNS.get(cause.key, "Index"), finding.distinct_bad > 1
    if noun == "Symbol id" and "speaker" in cause.title:
        noun = "Speaker id"
    if cause.key == "position_ge_max" and facts.bad:
        first, last = facts.bad[0], observed.values.maximum
        start = first_position(facts) if facts.arange_like else observed.values.minimum
        need = f", this batch needs {start}..{last}" if last is not None else ""
        rows = f"0..{(facts.high or 1) - 1}"
        return f"Position {first} does not exist: the position table has rows {rows}{need}."
    subject = (
        f"{PLURALS.get(noun, f'{noun}s') if several else noun} {facts.found} "
        f"{'do' if several else 'does'} not exist"
    )
    return f"{subject}: {_range(facts, cause.key)}."


def _are(number: int | None, noun: str) -> str:
    return f"is 1 {noun}" if number == 1 else f"are {number} {noun}s"


def _range(facts: Facts, key: str) -> str:
    high, valid = facts.high, facts.valid
    classes = facts.classes
    if key == "node_index_ge_num_nodes":
        return f"there {_are(high, 'node')}, {valid}"
    if key == "group_id_ge_num_groups":
        return f"there {_are(high, 'group')}, {valid}"
    if key == "action_index_out_of_range":
        return f"there are {high} actions, {valid}"
    if key == "label_position_ge_sequence":
        return f"the text has {high} tokens, {valid}"
    if facts.op in LOSSES:
        return f"the loss has {classes}, {valid}"
    if facts.op == "one_hot" or key == "one_hot_class_ge_num_classes":
        return f"the one-hot encoding has {classes}, {valid}"
    if facts.op in TABLES:
        return f"{facts.table} has row{'' if high == 1 else 's'} {'0' if high == 1 else valid}"
    tensor = facts.table.replace("the table", "the tensor")
    valid = from_end(facts) if key in PLAIN else valid
    return f"{tensor} has size {high} there, valid is {valid}"
