"""A simulated GPU for machines without CUDA: for demos, tests and teaching.

`%load_ext nb_assertdoc.simulated_gpu`, or `load()`. Tensors on `cuda:0` compute on the CPU; a bad
index kills the context as on a GPU: the driver's lines on fd 2, the error some calls later, and
every CUDA call after it fails. It lasts as long as the process.
"""

from __future__ import annotations

from typing import Any

import torch

from nb_assertdoc import devices, indexing
from nb_assertdoc.devices import Devices
from nb_assertdoc.errors import AssertdocError, UsageError
from nb_assertdoc.simulated_gpu.context import Context
from nb_assertdoc.simulated_gpu.hooks import SimulatedGpu

__all__ = ["Devices", "calls_after_death", "fail_after", "load"]

_context = Context()


def load(pretended: Devices | None = None) -> None:
    """Turn the simulated GPU on; a second call changes nothing.

    Raises `AssertdocError` where there is a real GPU, or where the process pretends already.
    """
    if devices.installed() and isinstance(devices.hooks(), SimulatedGpu):
        return
    if not devices.installed() and torch.cuda.is_available():
        raise AssertdocError(
            "there is a real GPU here; the simulated one is for machines without CUDA "
            "(or start the kernel with CUDA_VISIBLE_DEVICES='')"
        )
    gpu = SimulatedGpu(_context)
    devices.install(pretended or Devices(name="Simulated GPU"), gpu)
    indexing.wrap_functions(gpu.on_usage)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nb_assertdoc.simulated_gpu`."""
    load()


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext`: tensors that live on the simulated GPU would lose their device."""
    print("The simulated GPU stays until the kernel is restarted.")


def fail_after(launches: int, text: str | None = None) -> None:
    """Kill the context: `launches` more kernels start, and the next one raises.

    `text` is the whole message of the error, by default that of an assert. Raises `UsageError`
    for a negative number.
    """
    if launches < 0:
        raise UsageError(f"launches is {launches}; it must be 0 or more")
    _context.fail_after(launches, text)


def calls_after_death() -> int:
    """CUDA calls that this process has made since the context is dead and the host knows it."""
    return _context.calls
