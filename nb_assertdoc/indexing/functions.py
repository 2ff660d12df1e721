"""Public functions that check on the host, or decompose, before an operator is dispatched.

`one_hot` on the CPU checks its input itself (CUDA: the assert of `scatter_`); `take_along_dim`
reaches `gather` under another name and refuses a solid index of a ghost; `ctc_loss` and
`x[[1, 2]]` move a solid index to a ghost's device and so lose its values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nb_assertdoc.model import Bound

from .table import usages
from .usage import Usage, bounded

OnUsage = Callable[[Usage], Usage | None]
_getter: Any = torch._C.TensorBase.is_meta
is_meta: Callable[[Tensor], bool] = _getter.__get__  # the type's own: `devices` replaces it


def wrap_functions(on_usage: OnUsage) -> Callable[[], None]:
    """Show `on_usage` the calls that the dispatcher would not; returns what undoes the wrapping.

    `on_usage` may raise, return None (go on with the user's argument), or return a usage whose
    `tensor` takes the argument's place.
    """
    functional = torch.nn.functional
    patches: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        own, original = name in vars(owner), getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        patches.append((owner, name, original if own else None))

    def seen(find: Callable[..., Usage | None], *args: Any, **kwargs: Any) -> Tensor | None:
        try:
            usage = find(*args, **kwargs)
        except Exception:
            return None  # a malformed call: the function itself says what is wrong with it
        answer = on_usage(usage) if usage is not None else None
        return None if answer is None else answer.tensor

    def one_hot(original: Any) -> Any:
        def wrapper(input: Any, num_classes: int = -1) -> Any:
            replacement = seen(_one_hot, input, num_classes)
            return original(input if replacement is None else replacement, num_classes)

        return wrapper

    def take_along_dim(original: Any) -> Any:
        def wrapper(input: Any, indices: Any, dim: int | None = None, **out: Any) -> Any:
            replacement = seen(_take_along_dim, input, indices, dim)
            indices = indices if replacement is None else replacement
            if isinstance(indices, Tensor) and is_meta(input) and not is_meta(indices):
                indices = torch.empty_like(indices, device="meta")  # it refuses to mix them
            return original(input, indices, dim, **out)

        return wrapper

    def ctc_loss(original: Any) -> Any:
        def wrapper(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
            replacement = seen(_ctc_on_ghost, log_probs, targets, *args, **kwargs)
            return original(
                log_probs, targets if replacement is None else replacement, *args, **kwargs
            )

        return wrapper

    def item(original: Any) -> Any:
        def wrapper(self: Tensor, key: Any, *value: Any) -> Any:
            return original(self, _solid_key(key) if is_meta(self) else key, *value)

        return wrapper

    with _disable_current_modes():
        _takes_modulo()  # asked before the function is wrapped
    patch(functional, "one_hot", one_hot)
    patch(torch, "take_along_dim", take_along_dim)
    patch(Tensor, "take_along_dim", take_along_dim)
    patch(torch, "ctc_loss", ctc_loss)
    patch(Tensor, "__getitem__", item)
    patch(Tensor, "__setitem__", item)

    def undo() -> None:
        while patches:
            owner, name, original = patches.pop()
            if original is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, original)

    return undo


def _one_hot(tensor: Any, classes: int) -> Usage | None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        return None
    if classes == -1:
        if is_meta(tensor) or not tensor.numel():
            return None
        classes = max(int(tensor.max()) + 1, 1)  # as the function itself does
    bound, table = Bound(low=0, high=classes), f"num_classes={classes}"
    return bounded("one_hot", "input", tensor, bound, "scatter_fill", table=table)


@functools.cache
def _takes_modulo() -> bool:
    """Whether this torch's `take_along_dim` with a `dim` takes the index modulo the size."""
    one = torch.ones(1, dtype=torch.int64, device="cpu")
    try:
        torch.take_along_dim(one, one, 0)
    except (IndexError, RuntimeError):
        return False
    return True


def _take_along_dim(tensor: Any, indices: Any, dim: int | None) -> Usage | None:
    if not (isinstance(tensor, Tensor) and isinstance(indices, Tensor)):
        return None
    if dim is not None and _takes_modulo():
        return None  # every index is valid, on a GPU too (pytorch/pytorch#196106)
    flat = tensor.reshape(-1) if dim is None else tensor
    found = usages(torch.ops.aten.gather.default, (flat, 0 if dim is None else dim, indices), {})
    return next((replace(usage, op="take_along_dim", argument="indices") for usage in found), None)


def _ctc_on_ghost(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Usage | None:
    if not (isinstance(log_probs, Tensor) and is_meta(log_probs) and not is_meta(targets)):
        return None  # the dispatcher will show it
    lengths = dict(zip(("input_lengths", "target_lengths"), args, strict=False)) | kwargs
    if isinstance(lengths["target_lengths"], Tensor):
        func = torch.ops.aten._ctc_loss.Tensor
    else:
        func = torch.ops.aten._ctc_loss.default
    both = (lengths["input_lengths"], lengths["target_lengths"])
    return next(iter(usages(func, (log_probs, targets, *both), {})), None)


def _solid_key(key: Any) -> Any:
    """Lists and arrays of numbers as CPU tensors: a ghost would turn them into ghosts."""
    if isinstance(key, tuple):
        return tuple(_solid(part) for part in key)
    if isinstance(key, list) and not all(isinstance(part, int) for part in key):
        return key  # torch may read it as a tuple
    return _solid(key)


def _solid(part: Any) -> Any:
    if isinstance(part, (list, range)) and len(part):
        return torch.tensor(part)
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(part, numpy.ndarray) and part.ndim
    return torch.from_numpy(part) if is_array else part
