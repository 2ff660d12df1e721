"""No compilation where devices are pretended, and no `import torch._dynamo` (1 to 3 s) by
optimizers, which would do it for nothing."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch


def _light(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step without torch's decorator, which only adds graph breaks to it."""

    @functools.wraps(step)
    def use_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return use_grad


def install() -> None:
    """Let `torch.compile` run functions as they are, and optimizers work without torch._dynamo."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch._dynamo reads it when it is imported
    loaded = sys.modules.get("torch._dynamo")
    if loaded is not None:
        loaded.config.disable = True
        return
    for method in vars(torch.optim.Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if function is not None and getattr(method, "__module__", "").startswith("torch.optim"):
            setattr(function, "__dynamo_disable", function)
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if isinstance(optimizer, type) else None
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            optimizer.step = _light(step.__wrapped__)  # type: ignore[union-attr]
