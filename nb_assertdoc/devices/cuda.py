"""`torch.cuda`, `torch.accelerator` and the seam of C functions under them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nb_assertdoc.devices.state import Device, index_of, lazy_init, patch, state, thread

Answers = dict[str, Callable[..., Any]]


def _current() -> int:
    return thread.current


def _exchange(index: int) -> int:
    before = thread.current
    if index >= 0:
        thread.current = index
    return before


def _say(name: str, answer: Callable[..., Any], call: bool = True) -> Callable[..., Any]:
    """A function of its own for `name`: torch._dynamo refuses one that serves two names."""

    def say(*args: Any, **kwargs: Any) -> Any:
        if call:
            state.hooks.api(name)
        return answer(*args, **kwargs)

    say.__name__ = say.__qualname__ = name
    return say


def _properties(device: Any = None) -> SimpleNamespace:
    devices = state.devices
    index_of(device)
    return SimpleNamespace(
        name=devices.name,
        major=devices.capability[0],
        minor=devices.capability[1],
        total_memory=devices.total_memory,
        multi_processor_count=108,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936,
        L2_cache_size=40 << 20,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="00000000-0000-0000-0000-000000000000",
    )


def _memory(device: Any = None) -> tuple[int, int]:
    return state.devices.total_memory, state.devices.total_memory


def _figures(name: str) -> Callable[..., Any]:
    """Memory figures: no call on a GPU where the device is given as an index."""

    def figure(device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device is None and state.initialized:
            state.hooks.api(name)
        if "stats" in name and not name.startswith("reset"):
            return defaultdict(int)
        return "" if name == "memory_summary" else [] if name == "memory_snapshot" else 0

    figure.__name__ = figure.__qualname__ = name
    return figure


def _set_device(device: Any) -> None:
    lazy_init()
    index = index_of(device)
    if index >= 0:
        thread.current = index


def _install_cuda() -> None:
    cuda = torch.cuda
    quiet: Answers = {  # without a CUDA call on a GPU
        "is_available": lambda: True,
        "device_count": lambda: state.devices.count,
        "is_initialized": lambda: state.initialized and not state.forked,
        "_is_in_bad_fork": lambda: state.forked,
        "_lazy_init": lazy_init,
        "init": lazy_init,
        "_lazy_call": lambda callable, **kwargs: callable(),
        "ipc_collect": lambda: None,
        "is_bf16_supported": lambda *args, **kwargs: state.devices.capability >= (8, 0),
        "is_tf32_supported": lambda: state.devices.capability >= (8, 0),
        "can_device_access_peer": lambda a, b: True,
        "get_arch_list": lambda: ["sm_{}{}".format(*state.devices.capability)],
        "current_blas_handle": lambda: 0,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: state.devices.capability,
        "get_device_properties": _properties,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "_check_capability": lambda: None,
    }
    for name, answer in quiet.items():
        patch(cuda, name, _say(name, answer, call=False))
    calling: Answers = {
        "current_device": _current,
        "set_device": _set_device,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "mem_get_info": _memory,
        "utilization": lambda device=None: 0,
        "memory_usage": lambda device=None: 0,
        "temperature": lambda device=None: 40,
        "power_draw": lambda device=None: 50_000,
    }
    for name, answer in calling.items():
        patch(cuda, name, _say(name, answer))
    for name in dir(cuda):
        if name.startswith(("memory_", "max_memory_", "reset_")) and name != "memory_usage":
            patch(cuda, name, _figures(name))
    for module in (cuda.memory, getattr(cuda, "graphs", None)):
        for name in ("empty_cache", "mem_get_info", "memory_allocated", "memory_reserved"):
            patch(module, name, getattr(cuda, name))
        patch(module, "is_current_stream_capturing", cuda.is_current_stream_capturing)
    patch(torch.version, "cuda", torch.version.cuda or "13.0")
    patch(torch.backends.cuda, "is_built", _say("is_built", lambda: True, call=False))
    patch(torch.backends.cudnn, "is_available", _say("is_available", lambda: True, call=False))
    no_cudnn = _say("is_acceptable", lambda tensor: False, call=False)  # its kernels are not here
    patch(torch.backends.cudnn, "is_acceptable", no_cudnn)
    patch(torch.backends.cudnn, "version", _say("version", lambda: 91000, call=False))


def _install_accelerator() -> None:
    here = Device("cuda")
    quiet: Answers = {
        "_accelerator_getAccelerator": lambda: here,
        "_accelerator_deviceCount": lambda: state.devices.count,
        "_accelerator_isAllocatorInitialized": lambda: False,
    }
    for name, answer in quiet.items():
        patch(torch._C, name, _say(name, answer, call=False))
    calling: dict[str, tuple[str, Callable[..., Any]]] = {
        "_accelerator_getDeviceIndex": ("current_device", _current),
        "_accelerator_setDeviceIndex": ("set_device", _set_device),
        "_accelerator_exchangeDevice": ("exchange_device", _exchange),
        "_accelerator_maybeExchangeDevice": ("exchange_device", _exchange),
        "_accelerator_synchronizeDevice": ("synchronize", lambda index: None),
        "_accelerator_getMemoryInfo": ("mem_get_info", _memory),
        "_accelerator_emptyCache": ("empty_cache", lambda: None),
        "_cuda_getDevice": ("current_device", _current),
        "_cuda_setDevice": ("set_device", _set_device),
        "_cuda_exchangeDevice": ("exchange_device", _exchange),
        "_cuda_maybeExchangeDevice": ("exchange_device", _exchange),
        "_cuda_synchronize": ("synchronize", lambda: None),
    }
    for name, (call, answer) in calling.items():
        patch(torch._C, name, _say(call, answer))
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        public: Answers = {
            "is_available": lambda: True,
            "current_accelerator": lambda check_available=False: Device("cuda"),
            "device_count": lambda: state.devices.count,
        }
        for name, answer in public.items():
            patch(accelerator, name, _say(name, answer, call=False))


def install() -> None:
    """Replace the functions of torch.cuda and torch.accelerator."""
    _install_cuda()
    _install_accelerator()
