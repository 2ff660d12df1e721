"""Finders for embeddings and for indexing along dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nb_assertdoc.model import Bound

from .usage import Arguments, Rule, Usage, bounded, outside, rising, size_along, unbounded


def embedding(op: str, a: Arguments) -> Iterator[Usage]:
    """`embedding`, and the renormalising of its rows (`max_norm`) that runs before it.

    The renormalising wraps negative indices, the look-up that always follows does not.
    """
    renorm = "weight" not in a
    weight, indices = a["self" if renorm else "weight"], a["indices"]
    row = math.prod(weight.shape[1:])
    if not row:
        return  # nothing is launched
    site = "embedding_renorm_wrap"
    if not renorm:  # small look-ups have their own kernel, large ones need aligned rows
        aligned = row * weight.element_size() % 16 == 0
        large = "vectorized_gather" if aligned else "scatter_gather"
        site = large if indices.numel() > 16 else "index_select_small"
    yield _row_numbers(op, indices, weight, site)


def _row_numbers(op: str, indices: Tensor, weight: Tensor, site: str) -> Usage:
    rows = weight.shape[0]
    bound, table = Bound(low=0, high=rows), f"num_embeddings={rows}"
    return bounded(op, "input", indices, bound, site, table=table, size_of=weight, slot="indices")


def embedding_bag(op: str, a: Arguments) -> Iterator[Usage]:
    """Row numbers, and the begins of the bags; the first is taken as 0, as CUDA does."""
    weight, indices, offsets = a["weight"], a["indices"], a["offsets"]
    bags = offsets.shape[0] - bool(a["include_last_offset"])
    if bags < 1:
        return
    yield _row_numbers(op, indices, weight, "embedding_bag_index")
    total = indices.shape[0]

    def begins_after_its_end(tensor: Tensor) -> Tensor:
        begin = tensor[1:bags]
        end = torch.cat([tensor[2:bags], tensor.new_full((1,), total)])[: begin.numel()]
        mask = torch.zeros_like(tensor, dtype=torch.bool)
        mask[1:bags] = (begin < 0) | (begin > end)
        return mask

    bound = Bound(low=0, high=total, high_inclusive=True)
    yield bounded(
        op,
        "offsets",
        offsets,
        bound,
        "embedding_bag_offsets",
        table=f"{total} indices",
        size_of=indices,
        rule=begins_after_its_end,
        mend=rising(total),
    )


class Along:
    """Operators with `self`, `dim`, `index`; without elements in one of `needs` nothing runs."""

    def __init__(self, site: str, *needs: str, wraps: bool = False) -> None:
        self.site, self.needs, self.wraps = site, ("index", *needs), wraps

    def __call__(self, op: str, a: Arguments) -> Iterator[Usage]:
        tensor, dim = a["self"], a["dim"]
        if not all(a[name].numel() for name in self.needs):
            return
        size, sparse = size_along(tensor, dim), tensor.is_sparse
        bound = Bound(low=-size if self.wraps or sparse else 0, high=size)
        site = "index_select_sparse" if sparse else self.site
        table = f"size {size} of dimension {dim % max(tensor.dim(), 1)}"
        yield bounded(op, "index", a["index"], bound, site, table=table, size_of=tensor)


def scatter(op: str, a: Arguments) -> Iterator[Usage]:
    """The scatter family: filling with a number has a kernel of its own."""
    return Along("scatter_fill" if "value" in a else "scatter_gather")(op, a)


def advanced(op: str, a: Arguments) -> Iterator[Usage]:
    """`x[i, j]` and its assignment: one index tensor a dimension, a mask for as many as it has."""
    tensor = a["self"]
    if tensor.is_nested:
        yield from _ragged(op, a)
        return
    found: list[tuple[int, int, Tensor]] = []  # place in the list, dimension, index
    masks: list[Tensor] = []
    dim = 0
    for place, index in enumerate(a["indices"]):
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            masks.append(index)
            dim += index.dim()
            continue
        if index is not None:
            found.append((place, dim, index))
        dim += 1
    if any(index.numel() == 0 for _, _, index in found):
        return
    if tensor.numel() == 0 and all(tensor.shape[dim] for _, dim, _ in found):
        return  # nothing is launched: another dimension is empty
    site = "index_put_accumulate" if a.get("accumulate") else "index_kernel"
    for place, dim, index in found:
        size = tensor.shape[dim]
        bound = Bound(low=-size, high=size)
        rule = _unless_empty(outside(bound), masks) if masks else None
        yield bounded(
            op,
            "indices",
            index,
            bound,
            site,
            table=f"size {size} of dimension {dim}",
            size_of=tensor,
            place=place,
            rule=rule,
        )


def _ragged(op: str, a: Arguments) -> Iterator[Usage]:
    """Assignment to a jagged tensor: each index against the length of its row, in order."""
    tensor, dim = a["self"], a["self"]._ragged_idx
    if "values" not in a or len(a["indices"]) <= dim:
        return

    def beyond_its_row(index: Tensor) -> Tensor:
        lengths = tensor.lengths()
        lengths = tensor.offsets().diff() if lengths is None else lengths
        mask: Tensor = index >= lengths
        return mask.expand_as(index)

    yield unbounded(
        op,
        "indices",
        a["indices"][dim],
        "njt_ragged_index",
        rule=beyond_its_row,
        table="the lengths of the rows",
        place=dim,
        kind="index",
    )


def _unless_empty(rule: Rule, masks: Sequence[Tensor]) -> Rule:
    """A mask without a True makes the selection empty: then no index is looked at."""

    def masked(tensor: Tensor) -> Tensor:
        mask = rule(tensor)
        empty = any(not other.is_meta and not bool(other.any()) for other in masks)
        return torch.zeros_like(mask) if empty else mask

    return masked


def flat(op: str, a: Arguments) -> Iterator[Usage]:
    """`take` and `put` count the elements of the whole tensor."""
    tensor, size = a["self"], a["self"].numel()
    bound, table = Bound(low=-size, high=size), f"{size} elements"
    yield bounded(op, "index", a["index"], bound, "take_put", table=table, size_of=tensor)


def fractional(op: str, a: Arguments) -> Iterator[Usage]:
    """Backward of `fractional_max_pool2d` and `3d`: positions within an input plane or volume."""
    space = a["self"].shape[-len(a["output_size"]) :]
    bound, table = Bound(low=0, high=math.prod(space)), "x".join(map(str, space))
    site = f"fractional{len(space)}d_high"
    yield bounded(op, "indices", a["indices"], bound, site, table=f"input of {table}")


def unpool(op: str, a: Arguments) -> Iterator[Usage]:
    """Positions within one output plane (or volume)."""
    output = a["output_size"]
    bound, table = Bound(low=0, high=math.prod(output)), "x".join(map(str, output))
    yield bounded(op, "indices", a["indices"], bound, op, table=f"output of {table}")
