"""Where in a batch the values of an index tensor come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..indexing import Bad, Usage
from .hooks import is_ghost

Path = tuple[tuple[Any, ...], int | None]  # keys from the batch to a tensor, and a column of it
_MOST_COLUMNS = 64


def leaves(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors of a batch with the keys that lead to them."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, (*path, key))
    elif isinstance(batch, list | tuple):
        for i, value in enumerate(batch[:64]):
            yield from leaves(value, (*path, i))


def path_to(batch: Any, tensor: Tensor) -> Path | None:
    """The field of the batch (and its column) whose values are those of the index tensor."""
    if tensor.is_floating_point() or not tensor.numel():
        return None
    with devices.raw():
        wanted = tensor.detach().reshape(-1).long()
        for path, leaf in leaves(batch):
            if is_ghost(leaf) or leaf.is_complex():
                continue
            if leaf.numel() == wanted.numel() and bool(
                (leaf.detach().reshape(-1).long() == wanted).all()
            ):
                return path, None
            if leaf.dim() == 2 and leaf.shape[0] == wanted.numel():
                for column in range(min(leaf.shape[1], _MOST_COLUMNS)):
                    if bool((leaf[:, column].detach().long() == wanted).all()):
                        return path, column
    return None


def field(batch: Any, path: Path) -> Tensor:
    """The tensor at a path of another batch of the same loader."""
    keys, column = path
    found = batch
    for key in keys:
        found = found[key]
    tensor: Tensor = found if column is None else found[:, column]
    return tensor


def bad_rows(batch: Any, size: int, usage: Usage, bad: Bad) -> tuple[int, ...]:
    """Rows of a batch of `size` that hold the bad values; () where the call mixed the rows.

    The batch dimension comes first, or was flattened with what follows it. Where the batch holds
    the very bad values, as often, it must hold them in these rows.
    """
    tensor = usage.tensor
    flattened = tensor.dim() == 1 and tensor.numel() != size
    if not size or not tensor.dim() or tensor.shape[0] % size:
        return ()
    if tensor.shape[0] != size and not flattened:
        return ()
    with devices.raw():
        rows = _rows(usage.rule(tensor), size)
        wanted = torch.tensor([v for v in bad.values if isinstance(v, int)], dtype=torch.long)
        held = [
            torch.isin(leaf.detach().long(), wanted)
            for _, leaf in leaves(batch)
            if not (is_ghost(leaf) or leaf.is_floating_point() or leaf.is_complex())
            and leaf.dim()
            and leaf.shape[0] == size
        ]
        confirmed = any(rows <= _rows(mask, size) for mask in held)
        if flattened:  # a row may hold the same numbers in another meaning: as many, then
            counts = _counts(usage.rule(tensor), size)
            confirmed = any(torch.equal(counts, _counts(mask, size)) for mask in held)
        moved = not confirmed and any(int(mask.sum()) == bad.count for mask in held)
    return () if moved or (flattened and not confirmed) else tuple(sorted(rows))


def _rows(mask: Tensor, size: int) -> set[int]:
    return set(_counts(mask, size).nonzero().flatten().tolist())


def _counts(mask: Tensor, size: int) -> Tensor:
    return mask.reshape(size, -1).sum(1)
