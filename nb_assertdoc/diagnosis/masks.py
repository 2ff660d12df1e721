"""Causes in segmentation masks: targets that hold a class for each pixel."""

from __future__ import annotations

import ast
import re

from nb_assertdoc.model import Edit, Fix

from .facts import LOSSES, Facts
from .fixes import edit_ignored, edit_index, edit_line, keep, keep_labels, name_of
from .labels import is_label, is_one_hot, mask_words
from .numbering import keep_below, numbering
from .reading import Spot, last
from .rule import Match, Rule
from .sizes import edit_outputs, outputs_size, set_in

RESIZED = (
    r"resize|interpolat|bilinear|bicubic|\brotate|RandomRotation|affine|zoom|warp|INTER_LINEAR"
)
TARGETS = "mask|label|target|seg|lbl"
LIBRARIES = r"|cv2|F|TF|T|v2|(\w+\.)*(transforms|functional)"  # what a function stands behind
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
    expression = facts.observed.index_expression or ""
    if re.search(r"\.(view|reshape)\(-1\)|flatten\(", expression) and _dense(facts):
        return True
    frames = "\n".join(place.expression or "" for place in facts.observed.finding.user_frames)
    handed = re.search(r"\b(\w+_)?(masks?|segs?|segmentations?)\b", frames)
    return handed is not None and facts.mentions(r"Conv[23]d|u_?net|deeplab|segmentation")


def _dense(facts: Facts) -> bool:
    """The code speaks of masks, and its last layer is a convolution that keeps the picture."""
    last = facts.mentions(r"Conv2d\([^()]*,\s*(kernel_size\s*=\s*)?1\)")
    pooled = facts.mentions(r"\bLinear\(|Pool2d\(1\)|nn\.Flatten\(")
    return last and not pooled and facts.mentions(r"\bmask|\bvoid|segment|camvid|cityscapes")


def _nearest(facts: Facts) -> Edit | None:
    """The edit of the one call that resizes a mask smoothly; that of a picture is left alone."""
    edits = set()
    for call, at in facts.reading.calls():
        values = (*call.args, *(k.value for k in call.keywords))
        flags = [v for v in values if re.fullmatch(SMOOTH, last(v))]
        if len(flags) == 1 and call.lineno == call.end_lineno and _resizes_mask(call, at):
            old = ast.unparse(flags[0])
            new = re.sub(SMOOTH, "INTER_NEAREST" if "INTER_" in old else "NEAREST", old)
            edits.add(at.replaced(flags[0], new))
    lines = edits.pop() if len(edits) == 1 else None
    return Edit(cell_id=None, old=lines[0], new=lines[1]) if lines is not None else None


def _resizes_mask(call: ast.Call, at: Spot) -> bool:
    """`mask.resize(...)`, `cv2.resize(mask, ...)`, or `mask_transform = Resize(64, ...)`."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if re.fullmatch(LIBRARIES, owner):
        first = ast.unparse(call.args[0]) if call.args else ""
        subject = first if re.search(r"[A-Za-z]", first) else at.target
    else:
        subject = owner
    return re.search(TARGETS, subject, re.IGNORECASE) is not None


def _on_mask(facts: Facts) -> bool:
    """A line of code resizes or rotates something called a mask, and not with NEAREST."""
    lines = _without_comments(facts).splitlines()
    smooth = (s for s in lines if not re.search("nearest", s, re.I))
    return any(re.search(RESIZED, s, re.I) and re.search(TARGETS, s, re.I) for s in smooth)


def _without_comments(facts: Facts) -> str:
    return re.sub(r"#.*", "", facts.code)


def _palette(facts: Facts) -> Match | None:
    """The mask has as many distinct values as there are classes: a value for each class."""
    seen = (facts.observed.values, facts.seen)
    known = [
        {n for n in v.distinct if isinstance(n, int)} - {facts.ignore, 255}
        for v in seen
        if v.complete
    ]
    high = facts.high or 0
    found = next((sorted(values) for values in known if len(values) == high), [])
    if high < 3 or 2 * sum(v >= high for v in found) <= high or _on_mask(facts):
        return None  # one or two such values may be faults of their own
    tables = [
        name
        for name, table in numbering(facts).items()
        if set(found) in (set(table), set(table.values()))
    ]
    said = f" `{tables[0]}` lists them." if tables else ""
    return Match(
        score=80,
        title="Mask values are the colours of the classes",
        explanation=f"The mask holds {', '.join(map(str, found[:8]))}"
        + (" ..." if high > 8 else "")
        + f": {high} values, as many as there are classes. They are grey values or palette ids "
        "that were not mapped to 0..C-1.",
        fixes=(
            Fix(
                title="Map the mask's values to class ids",
                explanation="With a dict that gives each of these values its class, where the mask "
                f"is read.{said}",
                code=keep_labels(facts),
            ),
        ),
    )


def _wrapped(facts: Facts) -> Match | None:
    """1 was subtracted from unsigned bytes: 0 became 255."""
    if facts.bad != (255,) or facts.ignore == 255 or not facts.mentions(r"uint8|ByteTensor|imread"):
        return None
    minus = r"(-=?)\s*1\b(?!\s*[\]:.])"
    lines = _without_comments(facts).splitlines()
    if not any(re.search(minus, s) and re.search(rf"{TARGETS}|map", s, re.I) for s in lines):
        return None
    marked = " and is left out by the loss" if facts.ignore == -1 else ""
    return Match(
        score=81,
        title="0 - 1 became 255 in an unsigned byte",
        explanation="uint8 has no negative numbers: where the code subtracts 1 from labels of this "
        "type, 0 becomes 255, not -1. If the file itself has 255, it marks pixels to ignore.",
        fixes=(
            Fix(
                title="Make the labels int64 before 1 is subtracted",
                explanation=f"label.long() - 1: then 0 becomes -1{marked}"
                + ("." if marked else "; let the loss ignore it with ignore_index=-1."),
                code=keep(name_of(facts, "mask"), facts.high, -1),
                edit=edit_line(facts, r"(from_numpy\([\w.\[\]]+\)) - 1\b", r"\1.long() - 1"),
            ),
        ),
    )


def mask_value(facts: Facts) -> Match | None:
    if not is_label(facts) or not is_mask(facts) or not facts.too_large:
        return None
    if facts.high == 1 and facts.bad == (1,) and facts.smallest == 0:
        return None  # the mask is right, one output channel is not
    if (known := _palette(facts) or _wrapped(facts)) is not None:
        return known
    finding, high, name = facts.observed.finding, facts.high, name_of(facts, "mask")
    there = "the loss has" if facts.op in LOSSES else "there are"
    because: tuple[str, ...] = ()
    resized = re.search(RESIZED, _without_comments(facts), re.IGNORECASE) is not None
    odd = finding.distinct_bad >= 3 and not facts.follows_high
    if facts.op not in LOSSES and is_one_hot(facts) and not odd and 255 not in facts.bad:
        return None  # the number of columns is as likely to be wrong
    others = [v for v in facts.bad if v != 255]
    values = set(facts.seen.distinct)
    change: str | None = None
    if others and (odd or (resized and not facts.follows_high)):
        edit = _nearest(facts)
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
            f"The mask holds {facts.found}, {there} {facts.classes}: file values or palette "
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
                edit=None if change else edit_ignored(facts, 255),
            )
        )
    if facts.only_high and high is not None and high > 2 and facts.smallest == 0 and high != 255:
        fixes.append(
            Fix(
                title=f"Or give the model {high + 1} classes, if {high} is one",
                explanation="The number of classes counts the background (and void) too."
                + set_in(outputs_size(facts)),
                code=keep_below(facts, high + 1, True),
                edit=edit_outputs(facts, high + 1),
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
