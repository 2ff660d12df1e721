"""One index-like argument of one call, and the rules that say which of its elements are bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nb_assertdoc.model import Bound

Kind = Literal["index", "value", "distribution"]
Arguments = Mapping[str, Any]  # of one call, by the names of the aten schema
Rule = Callable[[Tensor], Tensor]
Mend = Callable[[Tensor, Tensor], Tensor]  # (values, mask of the bad ones) -> valid values


@dataclass(frozen=True, eq=False)
class Usage:
    """One index-like argument of one call. The tensors may be `meta`: only sizes are looked at."""

    op: str  # public name; see `public_name` for those that only the Python stack can tell
    argument: str  # the public operator's own parameter name
    tensor: Tensor  # the indices or values
    bound: Bound | None  # None: none for all elements alike (`multinomial`: finite and >= 0)
    kind: Kind
    size_of: Tensor | None  # the tensor whose size gives the bound; None: a number does
    table: str | None  # "num_embeddings=512"
    rule: Rule  # boolean mask of the bad elements of such a tensor
    mend: Mend
    slot: tuple[str, int | None]  # aten argument, and the place within it where that is a list
    site: str | None  # see `assert_site`


def bounded(
    op: str,
    argument: str,
    tensor: Tensor,
    bound: Bound,
    site: str | None,
    *,
    table: str | None = None,
    size_of: Tensor | None = None,
    slot: str | None = None,
    place: int | None = None,
    kind: Kind = "index",
    rule: Rule | None = None,
    mend: Mend | None = None,
) -> Usage:
    """A usage with a range; by default bad is what is outside, and mended by clamping."""
    rule, mend = rule or outside(bound), mend or clamped(bound)
    where = (slot or argument, place)
    return Usage(op, argument, tensor, bound, kind, size_of, table, rule, mend, where, site)


def unbounded(
    op: str,
    argument: str,
    tensor: Tensor,
    site: str,
    *,
    rule: Rule,
    fill: float = 0,
    table: str | None = None,
    slot: str | None = None,
    place: int | None = None,
    kind: Kind = "value",
    mend: Mend | None = None,
) -> Usage:
    """A usage without one range for all elements; by default bad ones are mended by `fill`."""
    where, mend = (slot or argument, place), mend or filled(fill)
    return Usage(op, argument, tensor, None, kind, None, table, rule, mend, where, site)


def widened(tensor: Tensor) -> Tensor:
    """`tensor` in a dtype that compares safely with any Python int (uint8 wraps negative ones)."""
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.int64 else tensor.long()


def outside(bound: Bound) -> Rule:
    """The rule "not in `bound`"; NaN is never inside."""

    def rule(tensor: Tensor) -> Tensor:
        values = widened(tensor)
        below_high = values <= bound.high if bound.high_inclusive else values < bound.high
        mask = ~((values >= bound.low) & below_high)
        return mask if bound.ignore is None else mask & (values != bound.ignore)

    return rule


def negative(tensor: Tensor) -> Tensor:
    """The rule "below zero, or NaN"."""
    return ~(tensor >= 0)


def clamped(bound: Bound) -> Mend:
    """Bad entries go to the nearest end of `bound`, NaN to its low end."""
    last = bound.high if bound.high_inclusive else bound.high - 1

    def mend(tensor: Tensor, mask: Tensor) -> Tensor:
        values = widened(tensor)
        if values.is_floating_point():
            values = values.nan_to_num(nan=float(bound.low))
        # 0 is as valid as the -size of an operator that wraps, and easier to follow
        return torch.where(mask, values.clamp(max(bound.low, 0), last).to(tensor.dtype), tensor)

    return mend


def filled(value: float) -> Mend:
    """Bad entries become `value`."""
    return lambda tensor, mask: tensor.masked_fill(mask, value)


def rising(last: int) -> Mend:
    """A sequence that must not decrease: each at least the one before, and at most `last`."""
    return lambda tensor, mask: tensor.clamp(0, last).cummax(0).values


def size_along(tensor: Tensor, dim: int) -> int:
    """Size of a dimension; a 0-dim tensor counts as one of size 1, as in the kernels."""
    return tensor.shape[dim] if tensor.dim() else 1


def assert_site(usage: Usage) -> str | None:
    """Catalogue id of the assert that this argument trips on a GPU; reads values of `multinomial`.

    None where CUDA checks nothing: it reads out of bounds, or gives a wrong result in silence.
    """
    if usage.op != "multinomial" or usage.tensor.is_meta:
        return usage.site
    values, often = usage.tensor, usage.site == "multinomial_negative"
    if bool((values < 0).any()):
        return usage.site
    if bool(values.isnan().any()):
        return "multinomial_nan" if often else usage.site
    if bool(values.isinf().any()):
        return "multinomial_inf" if often else usage.site
    return "multinomial_sum" if often else "multinomial_async_sum"
