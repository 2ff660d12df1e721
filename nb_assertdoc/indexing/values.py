"""Finders for losses (class labels, probabilities) and for random operators."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nb_assertdoc.model import Bound

from .usage import (
    Arguments,
    Rule,
    Usage,
    bounded,
    negative,
    outside,
    rising,
    size_along,
    unbounded,
    widened,
)

_UNIT = Bound(low=0, high=1, high_inclusive=True)


def _labels(
    op: str,
    argument: str,
    target: Tensor,
    scores: Tensor,
    classes: int,
    site: str | None,
    ignore: int | None = None,
    rule: Rule | None = None,
) -> Usage:
    bound, table = Bound(low=0, high=classes, ignore=ignore), f"num_classes={classes}"
    return bounded(op, argument, target, bound, site, table=table, size_of=scores, rule=rule)


def nll(op: str, a: Arguments) -> Iterator[Usage]:
    """`nll_loss` and so `cross_entropy`: classes are dimension 1, or 0 of an unbatched input."""
    scores, target = a["self"], a["target"]
    classes = scores.shape[min(1, scores.dim() - 1)]
    site = "nll2d_target" if scores.dim() == 4 else "nll_target"
    site += "_none" if a["reduction"] == 0 else ""
    site += "_uint8" if target.dtype == torch.uint8 and scores.dim() < 4 else ""
    yield _labels(op, "target", target, scores, classes, site, ignore=a["ignore_index"])


def multi_margin(op: str, a: Arguments) -> Iterator[Usage]:
    """One label a row."""
    scores = a["self"]
    classes = size_along(scores, -1)
    yield _labels(op, "target", a["target"], scores, classes, "multi_margin_target")


def multilabel_margin(op: str, a: Arguments) -> Iterator[Usage]:
    """Several labels a row, ended by its first negative one; CUDA does not read what follows."""
    scores = a["self"]
    classes = size_along(scores, -1)

    def rule(tensor: Tensor) -> Tensor:
        ended = (tensor < 0).cumsum(-1) > 0
        return (tensor >= classes) & ~ended

    yield _labels(op, "target", a["target"], scores, classes, None, ignore=-1, rule=rule)


def ctc(op: str, a: Arguments) -> Iterator[Usage]:
    """Targets as far as `target_lengths` says that they are read."""
    scores, targets, lengths = a["log_probs"], a["targets"], a["target_lengths"]
    if isinstance(lengths, Tensor) and lengths.is_meta:
        return  # which targets are padding is not known
    classes = scores.shape[-1]

    def rule(tensor: Tensor) -> Tensor:
        used = torch.as_tensor(lengths, device=tensor.device)
        position = torch.arange(tensor.shape[-1], device=tensor.device)
        read = position < (used.reshape(-1, 1) if tensor.dim() == 2 else used.sum())
        return outside(Bound(low=0, high=classes))(tensor) & read

    yield _labels(op, "targets", targets, scores, classes, None, rule=rule)


def unit(op: str, a: Arguments) -> Iterator[Usage]:
    """`binary_cross_entropy`."""
    for argument, slot in (("input", "self"), ("target", "target")):
        site = f"bce_{argument}"
        yield bounded(op, argument, a[slot], _UNIT, site, slot=slot, kind="value")


def multinomial(op: str, a: Arguments) -> Iterator[Usage]:
    """Finite, not negative, no row of zeros. Too few non-zero entries is no fault on a GPU."""

    def rule(tensor: Tensor) -> Tensor:
        mask = ~((tensor >= 0) & (tensor < math.inf))
        zeros = (tensor.sum(-1, keepdim=True) <= 0) & ~mask.any(-1, keepdim=True)
        return mask | zeros

    often = a["replacement"] and a["num_samples"] > 1
    site = "multinomial_negative" if often else "multinomial_async"
    values = a["self"]
    yield unbounded(op, "input", values, site, rule=rule, fill=1, slot="self", kind="distribution")


def bernoulli(op: str, a: Arguments) -> Iterator[Usage]:
    """The probabilities are `p` where there is one (a float `p` is checked on the host)."""
    slot, argument = ("p", "p") if "p" in a else ("self", "input")
    if isinstance(a[slot], Tensor):
        yield bounded(op, argument, a[slot], _UNIT, "bernoulli_p1", slot=slot, kind="value")


def normal(op: str, a: Arguments) -> Iterator[Usage]:
    """A float `std` is checked on the host."""
    if isinstance(a["std"], Tensor):
        yield unbounded(op, "std", a["std"], "normal_std_async", rule=negative, fill=0)


def poisson(op: str, a: Arguments) -> Iterator[Usage]:
    """The rates."""
    yield unbounded(op, "input", a["self"], "poisson", rule=negative, fill=0, slot="self")


def segment_lengths(op: str, a: Arguments) -> Iterator[Usage]:
    """`segment_reduce`; without `unsafe=True` the host checks the lengths."""
    if a["lengths"] is not None:
        site = "segment_reduce_lengths" + ("_mean" if a["reduce"] == "mean" else "")
        yield unbounded(op, "lengths", a["lengths"], site, rule=negative, fill=0)


def assert_async(op: str, a: Arguments) -> Iterator[Usage]:
    """`torch._assert_async`: the condition itself; NaN counts as true."""
    site = "assert_async_msg" if a.get("assert_msg") else "assert_async_old"
    condition = a["self"]
    yield unbounded(
        op, "input", condition, site, rule=lambda tensor: tensor == 0, fill=1, slot="self"
    )


def masked_scatter(op: str, a: Arguments) -> Iterator[Usage]:
    """The True elements for which `source` has no value left."""
    room, mask = a["source"].numel(), a["mask"]
    if mask.shape != a["self"].shape:
        broadcast = getattr(torch, "broadcast_tensors")  # noqa: B009  (untyped in torch's stubs)
        mask = broadcast(mask, a["self"])[0]

    def beyond_source(tensor: Tensor) -> Tensor:
        rank = tensor.flatten().cumsum(0).view(tensor.shape)
        return tensor.logical_and(rank > room)

    yield unbounded(op, "mask", mask, "masked_scatter", rule=beyond_source, fill=0)


def repeats(op: str, a: Arguments) -> Iterator[Usage]:
    """`repeat_interleave`; an int is checked on the host. `output_size` must be their sum."""
    times, size = a["repeats"], a["output_size"]
    if not isinstance(times, Tensor):
        return
    yield unbounded(op, "repeats", times, "repeat_negative", rule=negative, fill=0)
    if size is None or not times.numel():
        return

    def not_the_size(tensor: Tensor) -> Tensor:
        """What does not fit any more; the last one, if they are too few."""
        mask: Tensor = tensor.cumsum(0) > size
        if not bool(negative(tensor).any()) and int(tensor.sum()) < size:
            mask[-1] = True
        return mask

    def to_the_size(tensor: Tensor, mask: Tensor) -> Tensor:
        ends = tensor.clamp(min=0).cumsum(0).clamp(max=size)
        ends[-1] = size
        return _sizes(ends).to(tensor.dtype)

    site, table = "repeat_output_size", f"output_size={size}"
    rule, mend = not_the_size, to_the_size
    yield unbounded(op, "repeats", times, site, rule=rule, mend=mend, table=table)


def grouped_mm(op: str, a: Arguments) -> Iterator[Usage]:
    """Ends of the groups: not decreasing, the last at most the size that is grouped.

    Where the groups lie along a matrix's contiguous dimension, all but the last must be multiples
    of 16 bytes for the kernels of Hopper and later; other GPUs have another kernel.
    """
    left, right, offs = a["self"], a["mat2"], a["offs"]
    if offs is None:
        return
    rows_grouped, columns_grouped = right.dim() == 3, left.dim() == 3
    if columns_grouped:
        size, letter = right.shape[-1], "b"
    else:
        size, letter = (left.shape[0], "a") if rows_grouped else (left.shape[1], "k")
    bound = Bound(low=0, high=size, high_inclusive=True)

    def rule(tensor: Tensor) -> Tensor:
        values = widened(tensor)
        return outside(bound)(values) | (_sizes(values) < 0)

    table, mend = f"size {size} to group", rising(size)
    site = f"grouped_mm_offset_{letter}"
    yield bounded(op, "offs", offs, bound, site, table=table, rule=rule, mend=mend)
    if left.dtype != torch.bfloat16 or not _aligns():
        return
    kind, each = None, 16 // left.element_size()
    if columns_grouped:
        kind = "in" if right.stride(-1) == 1 else "out"
    elif left.stride(-1) != 1 if rows_grouped else left.stride(-1) == 1 or right.stride(-1) != 1:
        kind = "in"
    if kind is None:
        return

    def unaligned(tensor: Tensor) -> Tensor:
        mask: Tensor = (_sizes(widened(tensor)) % each != 0) & ~rule(tensor)
        mask[-1:] = False
        return mask

    def whole(tensor: Tensor, mask: Tensor) -> Tensor:
        return widened(tensor).floor_divide(each).mul(each).to(tensor.dtype)

    site, table = f"grouped_mm_align_{kind}", f"groups of a multiple of {each}"
    yield bounded(op, "offs", offs, bound, site, table=table, rule=unaligned, mend=whole)


def _sizes(ends: Tensor) -> Tensor:
    """The sizes of groups with these ends."""
    sizes: Tensor = ends.diff(prepend=ends.new_zeros(1))
    return sizes


def _aligns() -> bool:
    """Whether grouped products run on the kernel that wants alignment; True without any GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
