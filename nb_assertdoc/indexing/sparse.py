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

    yield bounded(
        *(op, outer, begins, Bound(low=0, high=stored, high_inclusive=True), _SITE),
        *_named(f"{stored} stored values", slots[0], _begins(stored, size), evenly),
    )
    yield bounded(
        *(op, inner, plain, Bound(low=0, high=size), _SITE),
        *_named(f"{size} {'columns' if by_rows else 'rows'}", slots[1], _plain(begins, size), in_turn),
    )
