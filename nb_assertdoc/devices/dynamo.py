"""No compilation where devices are pretended, and no `import torch._dynamo` (1 to 3 s) by what
only wants to be left alone by it: optimizers, dispatch modes, Python meta kernels.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._compile


def _light(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step without torch's decorator, which only adds graph breaks to it."""

    @functools.wraps(step)
    def use_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return use_grad


def _without_import(value: Any, name: str, *default: Any) -> Any:
    return getattr(value, name, *((value,) if name == "__dynamo_disable" else default))


def install() -> None:
    """Let `torch.compile` run functions as they are, and the rest work without torch._dynamo."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch._dynamo reads it when it is imported
    loaded = sys.modules.get("torch._dynamo")
    if loaded is not None:
        loaded.config.disable = True
    # Every `torch._disable_dynamo` function imports torch._dynamo at its first call, unless it
    # finds the result on the function: it asks `getattr`, which is global to that module.
    vars(torch._compile)["getattr"] = _without_import
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if isinstance(optimizer, type) else None
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            optimizer.step = _light(step.__wrapped__)  # type: ignore[union-attr]
