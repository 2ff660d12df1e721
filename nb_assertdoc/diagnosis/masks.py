"""Causes in segmentation masks: targets that hold a class for each pixel."""

from __future__ import annotations

import re

from nb_assertdoc.model import Fix

from .facts import LOSSES, Facts
from .fixes import edit_index, edit_line, keep, keep_labels, name_of
from .labels import is_label, mask_words
from .rule import Match, Rule

RESIZED = (
    r"resize|interpolat|bilinear|bicubic|\brotate|RandomRotation|affine|zoom|warp|INTER_LINEAR"
)
TARGETS = "mask|label|target|seg|lbl"
SMOOTH = r"BILINEAR|BICUBIC|INTER_LINEAR|INTER_CUBIC"


def is_mask(facts: Facts) -> bool:
    """The target has a class for each pixel: by its shape, or by its name."""
    shape, inputs = facts.observed.shape, facts.observed.input_shape
    if mask_words(facts):
        return True
    if facts.index_words & {"token", "tokens", "code", "codes"}:  # several rows, as of audio
        return False
    # cross_entropy folds the (N, L) of a sequence to (N, 1, L), and a volume too
    folded = len(shape) == 3 and shape[1] == 1 and not facts.mentions(r"Conv3d|voxel|volume")
    if (len(shape) == 1 or folded or shape[1:] == (1,)) and _flattened(facts):
        return True
    if facts.op in LOSSES:
        single = len(inputs) == 3 and shape == inputs[1:] and len(shape) == 2
        return (len(shape) >= 3 and not folded) or single
    return is_label(facts) and len(shape) >= 3


def _flattened(facts: Facts) -> bool:
    """The user's code hands masks of pictures on to the function that makes them one row."""
    if 255 in facts.bad:
        return facts.mentions(r"\b\w*masks?\b|segment|u_?net")
    frames = "\n".join(place.expression or "" for place in facts.observed.finding.user_frames)
    handed = re.search(r"\b(\w+_)?(masks?|segs?|segmentations?)\b", frames)
    return handed is not None and facts.mentions(r"Conv[23]d|u_?net|deeplab|segmentation")


def _nearest(found: re.Match[str]) -> str:
    return "INTER_NEAREST" if found[0].startswith("INTER") else "NEAREST"


def _on_mask(facts: Facts) -> bool:
    """A line of code resizes or rotates something called a mask."""
    lines = facts.code.splitlines()
    return any(re.search(RESIZED, s, re.I) and re.search(TARGETS, s, re.I) for s in lines)


def mask_value(facts: Facts) -> Match | None:
    if not is_label(facts) or not is_mask(facts) or not facts.too_large:
        return None
    if facts.high == 1 and facts.bad == (1,) and facts.smallest == 0:
        return None  # the mask is right, one output channel is not
    finding, high, name = facts.observed.finding, facts.high, name_of(facts, "mask")
    because: tuple[str, ...] = ()
    resized = facts.mentions(RESIZED)
    odd = finding.distinct_bad >= 3 and not facts.follows_high
    others = [v for v in facts.bad if v != 255]
    values = set(facts.seen.distinct)
    change: str | None = None
    if others and (odd or (resized and not facts.follows_high)):
        edit = edit_line(facts, SMOOTH, _nearest, also=TARGETS)
        if _on_mask(facts):
            explanation = (
                "The mask was resized with interpolation, which invents values between the class "
                f"ids ({facts.found}). A mask must be resized with NEAREST."
            )
        else:
            explanation = (
                f"The mask holds values between the class ids ({facts.found}). They appear when a "
                "mask is resized with interpolation (masks need NEAREST), or palette ids are not "
                "mapped to 0..C-1."
            )
        if facts.mentions(r"\.jpe?g\b"):
            explanation += " A mask stored as JPEG gets such values too: store it as PNG."
        if facts.ignore is not None and facts.ignore >= 0:
            because = (f"{facts.ignore} is the ignore_index and is not counted",)
        first = Fix(
            title="Resize and rotate masks with NEAREST",
            explanation="Use Image.NEAREST, InterpolationMode.NEAREST or mode='nearest' for "
            "the mask; BILINEAR is for the picture only.",
            code=keep_labels(facts),
            edit=edit,
        )
        return Match(
            score=80,
            title="Mask values between the class ids",
            explanation=explanation,
            because=because,
            fixes=(first,),
        )
    if high == 2 and len(values) == 2 and facts.smallest == 0:
        change = f"({{}} > {int(facts.bad[-1]) // 2}).long()"
        explanation = (
            f"The mask keeps the grey values of its file: 0 and {facts.found}. The loss wants "
            "class ids, 0 and 1; more classes would be the wrong cure."
        )
    elif facts.bad == (255,):
        explanation = (
            "255 is no class here: in mask files it marks either the foreground or the pixels to "
            "ignore (borders, void)."
        )
    else:
        explanation = (
            f"The mask holds {facts.found}, the loss has {high} classes: file values or palette "
            "ids were not mapped to 0..C-1, or the background (or void) was not counted as a "
            "class."
        )
    edit = edit_index(facts, change) if change else None
    fixes = [
        Fix(
            title="Map the mask's values to class ids"
            if change is None
            else "Make the mask 0 and 1",
            explanation="Map the values where the mask is read, before anything else uses it.",
            code=keep_labels(facts, changed=change if change and edit else "{}"),
            edit=edit,
        )
    ]
    if 255 in facts.bad and facts.op in LOSSES:
        fixes.append(
            Fix(
                title="Or ignore 255, if it means 'not labelled'",
                explanation="ignore_index=255 leaves these pixels out of the loss.",
                code=keep(name, high, 255),
                edit=None
                if change
                else edit_line(
                    facts, r"CrossEntropyLoss\(\)", "CrossEntropyLoss(ignore_index=255)"
                ),
            )
        )
    if resized:
        because += ("the code in play resizes or rotates: use NEAREST for masks",)
    return Match(score=76, explanation=explanation, because=because, fixes=tuple(fixes))


RULES = (
    Rule(
        "mask_value_unmapped",
        "Mask values are not class ids",
        "A segmentation mask must hold class ids 0..C-1 (and the ignore_index). File values "
        "such as 0/255, palette ids, or values that interpolation invented while resizing are "
        "no class ids. Map the values, resize masks with NEAREST, and set ignore_index=255 if "
        "255 means 'not labelled'.",
        mask_value,
    ),
)
