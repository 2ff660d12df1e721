"""Make a process without CUDA answer as if it had GPUs.

Tensors stay plain CPU (or meta) tensors that carry a tag; class-level getters read it, and one
TorchDispatchMode carries it on. The worker of a replay and the simulated GPU stand on it.
"""

from __future__ import annotations

import torch

from nb_assertdoc.devices import (
    answers,
    cuda,
    dynamo,
    factories,
    legacy,
    mode,
    moves,
    parallel,
    seeds,
    storages,
    streams,
)
from nb_assertdoc.devices.moves import PINNED, to_pretended
from nb_assertdoc.devices.state import (
    TAG,
    Devices,
    Hooks,
    device_of,
    pretend,
    raw,
    real_device,
    state,
    tag,
    tag_of,
    thread,
)
from nb_assertdoc.errors import AssertdocError

__all__ = [
    "Devices",
    "Hooks",
    "at_home",
    "device_of",
    "hooks",
    "install",
    "installed",
    "non_blocking",
    "pinned",
    "pretend",
    "raw",
    "real_device",
    "tag",
    "tag_of",
    "to_pretended",
]


def installed() -> bool:
    """Whether this process pretends."""
    return state.installed


def install(devices: Devices, hooks: Hooks) -> None:
    """Patch this process, for good, and enter the dispatch mode in this and every later thread.

    Raises `AssertdocError` when it was done before.
    """
    if state.installed:
        raise AssertdocError("this process pretends to have GPUs already; it can do so only once")
    state.devices, state.hooks, state.installed = devices, hooks, True
    for part in (
        dynamo,
        streams,
        cuda,
        seeds,
        factories,
        legacy,
        moves,
        answers,
        storages,
        parallel,
        mode,
    ):
        part.install()


def hooks() -> Hooks:
    """The hooks that were installed."""
    return state.hooks


def at_home(tensor: torch.Tensor) -> bool:
    """Whether an operator made the tensor inside itself, for whichever device comes."""
    return tensor.__dict__.get(TAG, tensor) is None


def non_blocking() -> bool:
    """Inside `Hooks.move`: whether the user asked for `non_blocking=True`."""
    return thread.non_blocking


def pinned(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor is in (pretended) pinned memory."""
    return bool(tensor.__dict__.get(PINNED))
