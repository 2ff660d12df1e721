"""What the simulated GPU does at each move, read and operator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nb_assertdoc import catalogue, devices, indexing
from nb_assertdoc.simulated_gpu.context import Context

_WAITING_CALLS = {"synchronize", "Stream.synchronize", "Event.synchronize", "Event.elapsed_time"}
_HARMLESS_CALLS = {"current_device", "current_stream", "exchange_device", "initial_seed"}
_WAITING_OPERATORS = set(
    "_local_scalar_dense nonzero masked_select equal is_nonzero _unique2 unique_dim "
    "unique_consecutive bincount repeat_interleave _unique".split()
)
_MATRIX_PRODUCTS = set(
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation".split()
)
_FROM_THE_POOL = set("empty empty_like empty_strided new_empty new_empty_strided".split())
# These take tensors of the CPU beside those of the GPU.
_MIXING = set(
    "index index_put index_put_ _index_put_impl_ copy_ _to_copy _pack_padded_sequence "
    "_pad_packed_sequence _pack_padded_sequence_backward lstm gru rnn_tanh rnn_relu _ctc_loss "
    "ctc_loss _ctc_loss_backward tensor_split repeat_interleave set_ _foreach_copy_".split()
)
_LINES = 128  # most lines of one launch: a driver prints hundreds, one a thread
_in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


@functools.cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _check_devices(name: str, tensors: Sequence[torch.Tensor], here: torch.device) -> None:
    """Raise torch's own error where an operator mixes devices; a number may be anywhere."""
    if name in _MIXING:
        first = tensors[0]
        on_host = devices.tag_of(first) is None and not devices.at_home(first)
        if on_host and name.startswith(("index", "_index")):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        return
    for tensor in tensors:
        there = devices.tag_of(tensor)
        if there == here or not tensor.dim() or devices.at_home(tensor):
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{here} and {there or 'cpu'}!"
        )


def _mend(usage: indexing.Usage) -> None:
    """Repair the user's own tensor: the backward pass comes back to it, and on the CPU it would
    raise. Nobody can see the difference, since no value leaves a doomed context."""
    with torch.no_grad(), _disable_current_modes():
        target, values = usage.tensor.data, usage.mend(usage.tensor, usage.rule(usage.tensor))
        for dim, stride in enumerate(usage.tensor.stride()):
            if stride == 0:  # expanded: one row stands for all
                target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        target.copy_(values)


class SimulatedGpu(devices.Hooks):
    """Computes on the CPU, and dies of what a GPU would die of."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        from_host = devices.tag_of(tensor) is None
        if from_host and not (devices.pinned(tensor) and devices.non_blocking()):
            self.context.wait()
        else:
            self.context.launch()
        return None

    def leave(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self.context.wait()
        return None

    def make(self, name: str, device: torch.device) -> torch.device | None:
        if name in _FROM_THE_POOL:
            self.context.touch()
        else:
            self.context.launch()
        return None

    def api(self, name: str) -> None:
        if name in _WAITING_CALLS:
            self.context.wait()
        elif name in _HARMLESS_CALLS or name.startswith(("memory_", "max_memory_", "reset_")):
            self.context.touch()
        else:
            self.context.call()

    def read(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self.context.wait()
        else:
            self.context.touch()

    def dispatch(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
        here = next((d for d in map(devices.tag_of, tensors) if d is not None), None)
        if here is None:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")  # type: ignore[attr-defined]
        if _is_view(func):
            if name != "detach":  # alone among the views it asks CUDA nothing
                self.context.touch()
            return func(*args, **kwargs)
        if _in_backward() == -1:
            _check_devices(name, tensors, here)
        self._enqueue(name, args, tensors)
        try:
            found = indexing.usages(func, args, kwargs)  # type: ignore[arg-type]
        except indexing.Unread:
            found = ()  # the operator itself says what is wrong with the call
        wrong = [usage for usage in found if self.failing(usage)]
        if wrong:
            mended = indexing.repaired(func, args, kwargs, found)  # type: ignore[arg-type]
            if mended is None:  # nothing is valid in an empty table: the CPU cannot go on
                self.context.wait()
            else:
                args, kwargs = mended
        return func(*args, **kwargs)

    def _enqueue(self, name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """One launch; a wait where the host needs the result, or copies to or from it."""
        if name in _FROM_THE_POOL:
            self.context.touch()
            return
        self.context.launch(name in _MATRIX_PRODUCTS)
        if name == "copy_":
            waits = any(devices.tag_of(tensor) is None for tensor in tensors)
        elif name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
            # a mask's size, or indices that lie on the host
            waits = any(i.dtype == torch.bool or not devices.tag_of(i) for i in _tensors(args[1:2]))
        else:
            waits = name in _WAITING_OPERATORS
        if waits:
            self.context.wait()

    def failing(self, usage: indexing.Usage) -> bool:
        """Whether this argument is out of range; it dooms the context where a GPU asserts."""
        bad = indexing.bad(usage)
        if bad is None:
            return False
        site = indexing.assert_site(usage)
        if site is not None and not self.context.doomed:
            count = min(_LINES, 32 * bad.count)
            self.context.doom([catalogue.driver_line(site, thread) for thread in range(count)])
        if self.context.doomed and devices.tag_of(usage.tensor) is not None:
            _mend(usage)
        return True

    def on_usage(self, usage: indexing.Usage) -> indexing.Usage | None:
        """A call that never reaches the dispatcher as it was written: `one_hot` and its kin."""
        if devices.tag_of(usage.tensor) is None:
            return None
        with devices.raw():
            if not self.failing(usage):
                return None
            mended = usage.mend(usage.tensor, usage.rule(usage.tensor))
            devices.tag(mended, devices.tag_of(usage.tensor))
        return dataclasses.replace(usage, tensor=mended)
