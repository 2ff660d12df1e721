"""`torch.nn.parallel.comm`: what DataParallel does with several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.parallel.comm as comm

from nb_assertdoc.devices.moves import to_pretended
from nb_assertdoc.devices.state import Device, index_of, patch


def _on(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    return to_pretended(tensor, Device("cuda", index_of(device)), copy=True)


def broadcast(tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> Any:
    if out is not None:
        return tuple(o.copy_(tensor) for o in out)
    return tuple(_on(tensor, device) for device in devices)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Any, buffer_size: int = 0
) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(_on(tensor, device) for tensor in tensors) for device in devices]


def reduce_add(inputs: Sequence[torch.Tensor], destination: Any = None) -> torch.Tensor:
    total = _on(inputs[0], destination)
    for tensor in inputs[1:]:
        total = total + _on(tensor, destination)
    return total


def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: Any = None, buffer_size: int = 0
) -> tuple[torch.Tensor, ...]:
    return tuple(reduce_add(tensors, destination) for tensors in zip(*inputs, strict=True))


def scatter(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> Any:
    if out is not None:
        sizes = [o.size(dim) for o in out]
        return tuple(o.copy_(part) for o, part in zip(out, tensor.split(sizes, dim), strict=True))
    parts = tensor.split(chunk_sizes, dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return tuple(
        _on(part.contiguous(), device) for part, device in zip(parts, devices, strict=False)
    )


def gather(
    tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: Any = None
) -> torch.Tensor:
    to_cpu = destination == -1 or str(destination) == "cpu"
    parts = [tensor.cpu() if to_cpu else _on(tensor, destination) for tensor in tensors]
    joined = torch.cat(parts, dim)
    return joined if out is None else out.copy_(joined)


def install() -> None:
    """Replace the functions of `torch.nn.parallel.comm`."""
    for function in (
        broadcast,
        broadcast_coalesced,
        reduce_add,
        reduce_add_coalesced,
        scatter,
        gather,
    ):
        patch(comm, function.__name__, function)
