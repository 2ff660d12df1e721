"""Finders for the indices of compressed sparse tensors (CSR, CSC, BSR, BSC)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nb_assertdoc.model import Bound

from .usage import Arguments, Rule, Usage, bounded, outside, widened

_SITE = "sparse_compressed_invariants"
_BY_ROWS = {torch.sparse_csr: "csr", torch.sparse_bsr: "bsr"}
_BY_COLUMNS = {torch.sparse_csc: "csc", torch.sparse_bsc: "bsc"}


def compressed(op: str, a: Arguments) -> Iterator[Usage]:
    """`sparse_csr_tensor` and its kin, where their invariants are checked at all."""
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled() or "size" not in a:
        return
    by_rows = a["layout"] in _BY_ROWS
    kind = (_BY_ROWS if by_rows else _BY_COLUMNS)[a["layout"]]
    begins, plain, values = a["compressed_indices"], a["plain_indices"], a["values"]
    batch = begins.dim() - 1
    size = a["size"][batch + by_rows]
    if kind.startswith("b"):
        size //= values.shape[batch + 1 + by_rows]
    slots = ("compressed_indices", "plain_indices")
    yield from _both(f"sparse_{kind}_tensor", by_rows, begins, plain, size, slots)


def validated(op: str, a: Arguments) -> Iterator[Usage]:
    """The check itself, by hand or from `torch._validate_sparse_compressed_tensor_args`."""
    by_rows, slots = a["is_crow"], ("compressed_idx", "plain_idx")
    op = f"sparse_{'csr' if by_rows else 'csc'}_tensor"
    yield from _both(op, by_rows, a["compressed_idx"], a["plain_idx"], a["dim"], slots)


def _both(
    op: str, by_rows: bool, begins: Tensor, plain: Tensor, size: int, slots: tuple[str, str]
) -> Iterator[Usage]:
    """`begins`: where each row begins in `plain`, whose values are below `size`."""
    stored = plain.shape[-1]
    outer, inner = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")

    def evenly(tensor: Tensor, mask: Tensor) -> Tensor:
        full = torch.arange(tensor.shape[-1], device=tensor.device) * size
        return full.clamp(max=stored).to(tensor.dtype).expand_as(tensor)

    def in_turn(tensor: Tensor, mask: Tensor) -> Tensor:
        turn = torch.arange(stored, device=tensor.device) % size
        return turn.to(tensor.dtype).expand_as(tensor)

    limit = Bound(low=0, high=stored, high_inclusive=True)
    yield bounded(
        op,
        outer,
        begins,
        limit,
        _SITE,
        table=f"{stored} stored values",
        slot=slots[0],
        rule=_begins(stored, size),
        mend=evenly,
    )
    limit = Bound(low=0, high=size)
    yield bounded(
        op,
        inner,
        plain,
        limit,
        _SITE,
        table=f"{size} {'columns' if by_rows else 'rows'}",
        slot=slots[1],
        rule=_plain(limit, begins),
        mend=in_turn,
    )


def _begins(stored: int, size: int) -> Rule:
    """First 0, last the number of stored values, no row longer than `size`."""

    def rule(tensor: Tensor) -> Tensor:
        values = widened(tensor)
        rows = values.diff()
        mask = torch.zeros_like(values, dtype=torch.bool)
        mask[..., 1:] = (rows < 0) | (rows > size)
        mask[..., 0] = values[..., 0] != 0
        mask[..., -1] |= values[..., -1] != stored
        return mask

    return rule


def _plain(limit: Bound, begins: Tensor) -> Rule:
    """In range, and rising within each row (as far as it is known where rows begin)."""

    def rule(tensor: Tensor) -> Tensor:
        values = widened(tensor)
        mask = outside(limit)(values)
        if not begins.is_meta:
            stored = values.shape[-1]
            first = values.new_zeros((*values.shape[:-1], stored + 1), dtype=torch.bool)
            first.scatter_(-1, begins.long().clamp(0, stored), True)
            mask[..., 1:] |= (values.diff() <= 0) & ~first[..., 1:stored]
        return mask

    return rule
