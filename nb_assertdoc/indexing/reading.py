"""Reading the values of a usage: which are bad, how near the valid ones came, a repaired call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from nb_assertdoc.model import SHOWN_VALUES, Number

from .usage import Usage, widened


@dataclass(frozen=True)
class Bad:
    """The bad elements of one argument; counts are exact, lists hold the first `SHOWN_VALUES`."""

    values: tuple[Number, ...]  # distinct, sorted, "nan" last
    distinct: int
    count: int
    total: int
    positions: tuple[tuple[int, ...], ...]  # coordinates in the argument's own tensor
    margin: float | None  # worst value's distance from the nearest valid one; None: not finite


@contextmanager
def _plainly() -> Iterator[None]:
    """Our own reads are no part of the user's program: no autograd, no dispatch modes."""
    with torch.no_grad(), _disable_current_modes():
        yield


def bad(usage: Usage) -> Bad | None:
    """The bad elements of a solid (not `meta`) argument, or None if there are none."""
    with _plainly():
        mask = usage.rule(usage.tensor)
        if not bool(mask.any()):
            return None
        chosen = usage.tensor[mask]
        chosen = chosen.real if chosen.is_complex() else chosen
        chosen = chosen.double() if chosen.is_floating_point() else chosen.long()
        nan = bool(chosen.isnan().any())
        distinct = torch.unique(chosen[~chosen.isnan()])
        numbers: list[int | float] = distinct[:SHOWN_VALUES].tolist()
        values: list[Number] = [_number(x) for x in numbers] + (["nan"] if nan else [])
        return Bad(
            values=tuple(values[:SHOWN_VALUES]),
            distinct=distinct.numel() + nan,
            count=int(mask.sum()),
            total=usage.tensor.numel(),
            positions=tuple(map(tuple, mask.nonzero()[:SHOWN_VALUES].tolist())),
            margin=None if nan else _margin(usage, distinct),
        )


def _number(value: int | float) -> Number:
    return value if math.isfinite(value) else str(value)  # "inf", "-inf"


def _margin(usage: Usage, distinct: Tensor) -> float | None:
    low, last = _ends(usage)
    lowest, highest = distinct[0].item(), distinct[-1].item()
    margin = float(max(low - lowest, highest - last))
    # in range, and bad for another reason (decreasing offsets, a row of zeros)
    return margin if 0 < margin < math.inf else None


def _ends(usage: Usage) -> tuple[float, float]:
    """The least and the greatest valid value."""
    if usage.bound is None:
        return 0, math.inf
    return usage.bound.low, usage.bound.high - (not usage.bound.high_inclusive)


def tightest(usage: Usage) -> tuple[Number, float] | None:
    """The valid value nearest to the bound, and its distance from the last valid one (0: it is it).

    The low end counts only for operators that wrap negative indices. None without a bound, or
    without a valid value.
    """
    bound = usage.bound
    if bound is None:
        return None
    with _plainly():
        values = widened(usage.tensor)
        counted = ~usage.rule(usage.tensor)
        if bound.ignore is not None:
            counted &= values != bound.ignore
        if not bool(counted.any()):
            return None
        low, last = _ends(usage)
        lowest = torch.where(counted, values, last).min().item()
        highest = torch.where(counted, values, low).max().item()
    if bound.low < 0 and lowest < 0 and lowest - low < last - highest:
        return lowest, float(lowest - low)
    return highest, float(last - highest)


def repaired(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], usages: Sequence[Usage]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The call's arguments with each bad entry replaced by a valid one.

    None where no value is valid (a table with 0 rows). Ghosts are left as they are.
    """
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    for usage in usages:
        if usage.tensor.is_meta:
            continue
        tensor = mended(usage)
        if tensor is None:
            return None
        if tensor is usage.tensor:
            continue  # another usage of the same argument may have mended it
        name, place = usage.slot
        if place is None:
            arguments[name] = tensor
        else:
            arguments[name] = [*arguments[name][:place], tensor, *arguments[name][place + 1 :]]
    return (
        tuple(arguments[name] for name in names[: len(args)]),
        {name: arguments[name] for name in kwargs},
    )


def mended(usage: Usage) -> Tensor | None:
    """The usage's tensor with valid values only (itself if it has no others); None: none exist."""
    with _plainly():
        mask = usage.rule(usage.tensor)
        if not bool(mask.any()):
            return usage.tensor
        low, last = _ends(usage)
        return usage.mend(usage.tensor, mask) if low <= last else None
