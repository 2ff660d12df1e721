"""Integers that were not computed, and yet are known to be in range: positions of `argmax`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..indexing import is_meta

_POSITIONS = {f"aten::{n}" for n in "argmax argmin multinomial topk sort argsort max min".split()}
_MOVES_VALUES = {
    f"aten::{n}"
    for n in (
        "view reshape squeeze unsqueeze select slice clone _to_copy detach alias expand cat stack "
        "transpose permute t _unsafe_view index index_select split unbind"
    ).split()
}
_MOST_READ = 1 << 20  # elements of a solid beside ghosts whose largest is looked for


def below(tensor: Tensor) -> int | None:
    """What no value of this integer tensor reaches (nor is one negative), where that is known."""
    known = tensor.__dict__.get("_nb_below")
    if known is not None or is_meta(tensor) or not 0 < tensor.numel() <= _MOST_READ:
        return None if known is None else int(known)
    low, high = (int(v.item()) for v in torch.aminmax(tensor.detach()))
    return high + 1 if low >= 0 else None


def note_range(name: str, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
    """Note the range of positions that were not computed: `argmax` over V values is below V."""
    made = [t for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, Tensor)]
    made = [t for t in made if t.dtype == torch.long and is_meta(t)]
    limit: int | None = None
    if not made:
        return
    if name in _POSITIONS:
        shape, last = tensors[0].shape, name in ("aten::multinomial", "aten::topk")
        at = 2 if name == "aten::topk" else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else (None, -1)[name != "aten::argmax"])
        dim = -1 if name == "aten::multinomial" else dim
        floats = tensors[0].is_floating_point() or last  # max of integers gives values as well
        if floats and isinstance(dim, int) and shape:
            limit = int(shape[dim])
        elif floats and dim is None:
            limit = tensors[0].numel()
    elif name in _MOVES_VALUES:
        moved = tensors if name in ("aten::cat", "aten::stack") else tensors[:1]
        limits = [below(t) for t in moved]
        limit = None if None in limits else max(v for v in limits if v is not None)
    if limit is not None:
        for tensor in made:
            tensor._nb_below = limit  # type: ignore[attr-defined]
