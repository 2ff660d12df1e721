"""Causes in values that must be probabilities, and in missing values."""

from __future__ import annotations

import ast

from nb_assertdoc.model import Fix

from .facts import NAN_AS_INTEGER, UNIT_VALUES, Facts
from .fixes import edit_line, keep, name_of
from .rule import Match, Rule

# Code that changes weights, and other code that weights or probabilities get NaN from.
TRAINED = r"\.backward\(|\.fit\(|\.train\(\)|\boptim|\.step\(\)"
MADE = r"\.generate\(|from_pretrained|\.load\w*\(|half\(|float16|autocast|\binf\b|masked|-1e\d"

MASKED = r"masked_fill|-\s*(float\()?['\"]?inf|['\"]-inf|(torch|np|math)\.inf\b|key_padding_mask"


def _first_nan(facts: Facts) -> tuple[str, ...]:
    first = facts.observed.first_nan
    return (f"`{first}` was the first to hold NaN",) if first else ()


def bce_input(facts: Facts) -> Match | None:
    if facts.op not in UNIT_VALUES or not facts.bad:
        return None
    finding = facts.observed.finding
    name = name_of(facts, "probabilities")
    inside = f"assert bool((({name} >= 0) & ({name} <= 1)).all()), 'probabilities outside [0, 1]'"
    if finding.argument == "target":
        pixels = facts.bad[-1] > 1.5
        return Match(
            score=80,
            title="A binary target is outside [0, 1]",
            explanation=f"{facts.called} is the target and holds {facts.found}; it must lie in "
            "[0, 1]." + (" Picture values 0..255 must be divided by 255." if pixels else ""),
            fixes=(
                Fix(
                    title="Scale the target to [0, 1]",
                    explanation="Divide by the largest possible value, or map labels to 0 and 1.",
                    code=inside,
                ),
            ),
        )
    if finding.margin is not None and finding.margin < 1e-3:
        return Match(
            score=80,
            title="A probability is outside [0, 1] by rounding",
            explanation=f"{facts.called} leaves [0, 1] by {finding.margin:.2g} only: rounding "
            "of a computed probability.",
            fixes=(
                Fix(
                    title="Clamp, or compute from raw outputs",
                    explanation="BCEWithLogitsLoss on raw outputs needs no clamp and is more "
                    "exact.",
                    code=f"{name} = {name}.clamp(0, 1); {inside}",
                ),
            ),
        )
    if facts.op == "bernoulli":
        explanation = (
            f"{facts.called} holds {facts.found}; Bernoulli sampling wants probabilities in [0, 1]."
        )
        fix = Fix(
            title="Give probabilities, or use logits=",
            explanation="Bernoulli(logits=...) or torch.sigmoid first.",
            code=inside,
        )
        return Match(score=80, explanation=explanation, fixes=(fix,))
    return _arithmetic(facts, inside) or _raw(facts, inside)


def _arithmetic(facts: Facts, inside: str) -> Match | None:
    """The argument is a sum, difference or product of something that the user calls by name."""
    index = facts.observed.index_expression or ""
    try:
        node = ast.parse(index, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.BinOp) or not facts.mentions("sigmoid|softmax"):
        return None
    return Match(
        score=80,
        explanation=f"{facts.called} goes from {facts.seen.minimum:.4g} to "
        f"{facts.seen.maximum:.4g}. It is computed in the call itself: even where a part of it is "
        "a probability, what is added to it, taken from it or multiplied with it leads out of "
        "[0, 1].",
        fixes=(
            Fix(
                title="Give the loss the probability alone",
                explanation="Add a penalty to the loss, not to its input: loss = "
                "criterion(probability, target) + penalty.",
                code=inside,
            ),
        ),
    )


def _raw(facts: Facts, inside: str) -> Match:
    """Values that no sigmoid has made."""
    sigmoid, module_type = facts.mentions("sigmoid"), facts.observed.finding.module_type
    loss = None
    if not sigmoid and module_type == "BCELoss":
        loss = edit_line(facts, r"BCELoss\(", "BCEWithLogitsLoss(")
    elif not sigmoid:
        new = "binary_cross_entropy_with_logits("
        loss = edit_line(facts, r"\bbinary_cross_entropy\(", new)
    return Match(
        score=80,
        explanation=f"Binary cross-entropy wants probabilities: {facts.called} goes from "
        f"{facts.seen.minimum} to {facts.seen.maximum}. "
        + (
            "There is a sigmoid in the code, but these values do not come straight from one: what "
            "it returns lies in [0, 1]."
            if sigmoid
            else "These look like raw outputs: no sigmoid is in the code."
        ),
        fixes=(
            Fix(
                title="Use BCEWithLogitsLoss on the raw outputs"
                + (", or apply the sigmoid last" if sigmoid else ""),
                explanation="It has the sigmoid inside and is stable; apply sigmoid only to "
                "show predictions."
                + (" Not both: no sigmoid before BCEWithLogitsLoss." if sigmoid else ""),
                code=inside,
                edit=loss,
            ),
        ),
    )


def _nan_as_index(facts: Facts) -> Match | None:
    values = [v for v in facts.bad if v in NAN_AS_INTEGER]
    if not values or facts.observed.finding.bound is None:
        return None
    return Match(
        score=100,
        title="NaN was turned into an integer",
        explanation=f"{values[0]} is what NaN (or infinity) becomes when it is cast to "
        f"{facts.observed.dtype}: the data that {facts.called} was made of has missing values.",
        fixes=(
            Fix(
                title="Remove missing values before the cast",
                explanation="Drop or fill NaN (frame.isna().sum() counts them) before .long() "
                "or astype(int).",
                code=keep(name_of(facts, "index"), facts.high),
            ),
        ),
    )


def _nan_in_input(facts: Facts) -> Match | None:
    """NaN as a probability where nothing was trained, and no weights were loaded."""
    if facts.strange != ("nan",) or facts.bad or not facts.observed.sources:
        return None
    if facts.mentions(TRAINED) or facts.mentions(MADE):
        return None
    before = facts.seen.minimum is not None and facts.seen is facts.observed.data
    return Match(
        score=86,
        explanation=f"Sampling got NaN as a probability ({facts.observed.finding.bad_count:,} of "
        f"{facts.observed.finding.total:,} values). No training runs in the code known here, so "
        "it did not diverge: the NaN comes with the input (an observation, a row of data), or from "
        "0 / 0 on the way." + (" Earlier draws were finite." if before else ""),
        because=_first_nan(facts),
        fixes=(
            Fix(
                title="Check the input before the model",
                explanation="Replace missing values where the data is read or the environment "
                "gives them (numpy.nan_to_num, or leave the row out).",
                code=f"assert bool(torch.isfinite({name_of(facts, 'probs')}).all()), 'NaN'",
            ),
        ),
    )


def nan_in_data(facts: Facts) -> Match | None:
    if facts.op == "multinomial":
        return _nan_in_input(facts)
    if not facts.strange or facts.bad:
        return _nan_as_index(facts)
    finding, name = facts.observed.finding, name_of(facts, "probabilities")
    some = 0 < finding.bad_count < finding.total
    masked = facts.strange == ("nan",) and facts.mentions(MASKED) and facts.mentions("softmax")
    whys = ["the data has missing values", "the training diverged before this call"]
    if masked:
        whys.insert(0, "a row was masked to -inf completely before softmax, which gives 0 / 0")
    explanation = f"{facts.called} holds {facts.found} ({finding.bad_count:,} of {finding.total:,})"
    explanation += f". Either {', or '.join(whys)}."
    if some and not facts.observed.first_nan:
        explanation += " Weights with NaN would nearly always spoil all: look at the bad rows."
    fixes = [
        Fix(
            title="Look for NaN in the inputs first",
            explanation="Check each batch before the model; standardising a constant "
            "column divides by 0.",
            code=f"assert bool(torch.isfinite({name}).all()), 'NaN or infinity before the loss'",
        ),
        Fix(
            title="If the data is clean: the training diverged",
            explanation="Smaller learning rate, gradient clipping, no log(0) or division by 0.",
            code="norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); assert "
            "bool(torch.isfinite(norm))",
        ),
    ]
    if masked:
        row = Fix(
            title="Leave no row completely masked",
            explanation="Drop rows without a single valid entry, or mask with "
            "torch.finfo(scores.dtype).min in place of -inf and set the result of such rows to 0.",
            code=fixes[0].code,
        )
        fixes.insert(0, row)
    return Match(score=95, explanation=explanation, because=_first_nan(facts), fixes=tuple(fixes))


def multinomial_nan(facts: Facts) -> Match | None:
    negative = bool(facts.bad) and facts.bad[0] < 0
    if facts.op != "multinomial" or not (facts.strange or negative):
        return None
    name = name_of(facts, "probs")
    what = spell_strange(facts)
    if facts.strange:
        why = (
            "The network's output is no longer finite: the training may have diverged (learning "
            "rate, unscaled loss)"
        )
        if facts.mentions(rf"{MASKED}|-1e9|top_k|top_p"):
            why += ", or a row was masked to -inf completely before softmax"
        why += "; half precision can overflow too."
    else:
        why = (
            "Raw outputs were given where probabilities are wanted: apply softmax, or use logits=."
        )
    return Match(
        score=85,
        title=f"Probabilities contain {what}",
        explanation=f"Sampling got {what} as a probability "
        f"({facts.observed.finding.bad_count:,} of {facts.observed.finding.total:,} values). "
        f"{why}",
        because=_first_nan(facts),
        fixes=(
            Fix(
                title="Find where it becomes NaN, and keep the training stable"
                if facts.strange
                else "Give probabilities: softmax, or Categorical(logits=...)",
                explanation="Smaller learning rate, clipped gradients, scaled rewards; keep "
                "Categorical's validate_args on: it says so at once.",
                code=f"assert bool(torch.isfinite({name}).all()) and bool(({name} >= 0).all()), "
                "'no probabilities'",
            ),
        ),
    )


def spell_strange(facts: Facts) -> str:
    """What was found, as words: NaN, infinity, negative values."""
    names = {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}
    told = [names.get(v.lower(), v) for v in facts.strange]
    return " and ".join(told) if told else f"negative values ({facts.found})"


def multinomial_invalid(facts: Facts) -> Match | None:
    if facts.op != "multinomial":
        return None
    name = name_of(facts, "probs")
    return Match(
        score=60,
        explanation=f"{facts.called} is no distribution to draw from: a row sums to 0, or more "
        "samples are asked for (without replacement) than it has non-zero entries.",
        fixes=(
            Fix(
                title="Leave out empty rows, or draw fewer samples",
                explanation="replacement=True allows more samples than non-zero entries; a row "
                "of zeros has nothing to draw.",
                code=f"assert bool(({name}.sum(-1) > 0).all()), 'a row of zeros'",
            ),
        ),
    )


RULES = (
    Rule(
        "nan_inf_in_data",
        "NaN or infinity in the data",
        "Missing values in the data (or a training that diverged) reach an operator that needs "
        "real values. Cast to an integer, NaN becomes a huge negative number.",
        nan_in_data,
    ),
    Rule(
        "bce_input_outside_unit",
        "Binary cross-entropy got values outside [0, 1]",
        "binary_cross_entropy (BCELoss) wants probabilities; raw outputs go to "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss), which has the sigmoid inside.",
        bce_input,
    ),
    Rule(
        "multinomial_nan_inf_neg",
        "Probabilities contain NaN, infinity or negative values",
        "torch.multinomial, Categorical.sample and generate(do_sample=True) draw from "
        "probabilities; NaN comes from diverged weights, half precision, or a row masked "
        "completely before softmax.",
        multinomial_nan,
    ),
    Rule(
        "multinomial_invalid_distribution",
        "There is nothing to draw from",
        "A row of probabilities sums to 0, or more samples without replacement are asked for "
        "than there are non-zero entries.",
        multinomial_invalid,
    ),
)
