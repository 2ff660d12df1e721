"""Tensors in the place of those that were on the GPU and whose values are lost."""

from __future__ import annotations

from typing import Any

import torch

from .. import devices


class StandIns:
    """Makes the tensors of a capsule's stand-ins: ghosts, or zeros that are then initialised."""

    def __init__(self, real_floats: bool) -> None:
        self._real = real_floats
        self.remade = False

    def tensor(self, standin: Any) -> torch.Tensor:
        """The tensor for one stand-in; tagged with the device that the user's tensor was on."""
        dtype = standin.dtype
        device = torch.device(standin.device)
        with devices.raw():
            if standin.integers is not None:
                made = standin.integers.clone()
            elif dtype.is_floating_point and self._real:
                self.remade = True
                made = torch.zeros(standin.shape, dtype=dtype)
            else:
                made = torch.empty(standin.shape, dtype=dtype, device="meta")
                if standin.stride is not None:
                    made = torch.empty_strided(
                        standin.shape, standin.stride, dtype=dtype, device="meta"
                    )
                if self._real:  # an integer whose values are lost stays unknown in every engine
                    made = torch.zeros(standin.shape, dtype=dtype)
                    made._nb_why = "its values were on the GPU"  # type: ignore[attr-defined]
            if standin.parameter:
                made = torch.nn.Parameter(made, requires_grad=standin.requires_grad)
            elif standin.requires_grad and dtype.is_floating_point:
                made.requires_grad_(True)
        return devices.tag(made, device)

    def initialise(self, namespace: dict[str, Any]) -> None:
        """Give re-made weights the values of their modules' own initialisers.

        Every replay of one failure draws the same ones.
        """
        torch.default_generator.manual_seed(0)
        done: set[int] = set()
        for value in list(namespace.values()):
            held = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
            for root in (value, *list(held.values())[:64]):
                if not isinstance(root, torch.nn.Module):
                    continue
                for module in root.modules():
                    reset = getattr(module, "reset_parameters", None)
                    if id(module) not in done and callable(reset):
                        done.add(id(module))
                        reset()
