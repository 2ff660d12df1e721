"""Causes in values that must be probabilities, and in missing values."""

from __future__ import annotations

from nb_assertdoc.model import Fix

from .facts import NAN_AS_INTEGER, UNIT_VALUES, Facts
from .fixes import edit_line, keep, name_of
from .rule import Match, Rule


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
            explanation=f"`{facts.name}` is the target and holds {facts.found}; it must lie in "
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
            explanation=f"`{facts.name}` leaves [0, 1] by {finding.margin:.2g} only: rounding "
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
            f"`{facts.name}` holds {facts.found}; Bernoulli sampling wants probabilities in [0, 1]."
        )
        fix = Fix(
            title="Give probabilities, or use logits=",
            explanation="Bernoulli(logits=...) or torch.sigmoid first.",
            code=inside,
        )
        return Match(score=80, explanation=explanation, fixes=(fix,))
    sigmoid = facts.mentions("sigmoid")
    loss = None
    if not sigmoid:
        loss = edit_line(facts, r"BCELoss\(", "BCEWithLogitsLoss(") or edit_line(
            facts, r"\bbinary_cross_entropy\(", "binary_cross_entropy_with_logits("
        )
    return Match(
        score=80,
        explanation=f"Binary cross-entropy got raw outputs, not probabilities: `{facts.name}` "
        f"goes from {facts.seen.minimum} to {facts.seen.maximum}. "
        + (
            "A sigmoid is in the code, but not on this path."
            if sigmoid
            else "No sigmoid is applied before the loss."
        ),
        fixes=(
            Fix(
                title="Use BCEWithLogitsLoss on the raw outputs",
                explanation="It has the sigmoid inside and is stable; apply sigmoid only to "
                "show predictions.",
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
        f"{facts.observed.dtype}: the data that `{facts.name}` was made of has missing values.",
        fixes=(
            Fix(
                title="Remove missing values before the cast",
                explanation="Drop or fill NaN (frame.isna().sum() counts them) before .long() "
                "or astype(int).",
                code=keep(name_of(facts, "index"), facts.high),
            ),
        ),
    )


def nan_in_data(facts: Facts) -> Match | None:
    if facts.op == "multinomial":
        return None
    if not facts.strange or facts.bad:
        return _nan_as_index(facts)
    name = name_of(facts, "probabilities")
    return Match(
        score=95,
        explanation=f"`{facts.name}` holds {facts.found} ({facts.observed.finding.bad_count:,} "
        f"of {facts.observed.finding.total:,}). Either the data has missing values, or the "
        "training diverged before this call.",
        because=_first_nan(facts),
        fixes=(
            Fix(
                title="Look for NaN in the inputs first",
                explanation="Check each batch before the model; standardising a constant "
                "column divides by 0.",
                code=f"assert bool(torch.isfinite({name}).all()), 'NaN or infinity before the "
                "loss'",
            ),
            Fix(
                title="If the data is clean: the training diverged",
                explanation="Smaller learning rate, gradient clipping, no log(0) or division by 0.",
                code="norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); assert "
                "bool(torch.isfinite(norm))",
            ),
        ),
    )


def multinomial_nan(facts: Facts) -> Match | None:
    negative = bool(facts.bad) and facts.bad[0] < 0
    if facts.op != "multinomial" or not (facts.strange or negative):
        return None
    name = name_of(facts, "probs")
    what = spell_strange(facts)
    if facts.strange:
        why = (
            "The network's output is no longer finite: training diverged (learning rate, "
            "unscaled loss)"
        )
        if facts.mentions(r"masked_fill|-?inf\b|-1e9|top_k|top_p"):
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
        explanation=f"`{facts.name}` is no distribution to draw from: a row sums to 0, or more "
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
