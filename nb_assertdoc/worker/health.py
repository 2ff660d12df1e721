"""The healthy world: nothing is NaN or infinite, `all` holds, `any` does not, none are counted."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_KEEPS = {
    f"aten::{n}"
    for n in (
        "all any view expand clone mul bitwise_and logical_and bitwise_or logical_or _to_copy "
        "reshape squeeze unsqueeze detach alias sum count_nonzero max"
    ).split()
}

ABSORBS = {
    f"aten::{kind}_{word}": word == "or"
    for kind in ("bitwise", "logical")
    for word in ("or", "and")
}


def truth(name: str, args: Any, tensors: list[Tensor], out: Any) -> bool | None:
    """What the boolean (or the count) `out`, made of ghosts, is in the healthy world; else None."""
    if not isinstance(out, Tensor):
        return None
    truths = [t.__dict__.get("_nb_truth") for t in tensors]
    first = truths[0]
    if out.dtype != torch.bool:  # how many are NaN
        counted = name in _KEEPS and not out.is_floating_point()
        return False if counted and first is False else None
    other = args[1] if len(args) > 1 else None
    if name in ("aten::isnan", "aten::isinf", "aten::_is_any_true"):
        return False
    if name in ("aten::isfinite", "aten::_is_all_true"):
        return True
    if name in ("aten::eq", "aten::ne", "aten::gt"):
        if other is args[0] and name != "aten::gt":
            return name == "aten::eq"
        if isinstance(other, float) and math.isinf(other):
            return name == "aten::ne"
        if first is False and type(other) is int and other == 0:
            return name == "aten::eq"
        return None
    if name in ("aten::all", "aten::any") and first is None:
        return name == "aten::all"
    if name in ("aten::logical_not", "aten::bitwise_not"):
        return None if first is None else not first
    if name in _KEEPS and all(t is not None for t in truths):
        return any(truths) if name.endswith("_or") else all(truths)
    return None
