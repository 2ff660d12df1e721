"""Tensors in the place of those that were on the GPU and whose values are lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import devices
from ..salvage import weights

LOST = "its values were on the GPU"


class StandIns:
    """Makes the tensors of a capsule's stand-ins: ghosts, or real ones with made-up values.

    Parameters are then initialised. Other floats are from 0 to 1, the same in every replay: zeros
    would make NaN of a division, and a fault that the user never had.
    """

    def __init__(self, real_floats: bool) -> None:
        self._real = real_floats
        self._generator = torch.Generator().manual_seed(0)
        self._made_up = False  # floats that are no parameters
        self.floats_lost = False

    def tensor(self, standin: Any) -> torch.Tensor:
        """The tensor for one stand-in; tagged with the device that the user's tensor was on."""
        dtype = standin.dtype
        self.floats_lost |= dtype.is_floating_point
        device = torch.device(standin.device)
        with devices.raw():
            if standin.integers is not None:
                made = standin.integers.clone()
            elif dtype.is_floating_point and self._real:
                self._made_up |= not standin.parameter
                made = torch.rand(standin.shape, generator=self._generator).to(dtype)
            else:
                made = torch.empty(standin.shape, dtype=dtype, device="meta")
                if standin.stride is not None:
                    made = torch.empty_strided(
                        standin.shape, standin.stride, dtype=dtype, device="meta"
                    )
                if self._real:
                    made = torch.zeros(standin.shape, dtype=dtype)
                if not dtype.is_floating_point:  # it stays unknown in every engine
                    made._nb_why = LOST  # type: ignore[attr-defined]
            if standin.parameter:
                made = torch.nn.Parameter(made, requires_grad=standin.requires_grad)
            elif standin.requires_grad and dtype.is_floating_point:
                made.requires_grad_(True)
        return devices.tag(made, device)

    def initialise(self, namespace: dict[str, Any]) -> tuple[str, ...]:
        """Give re-made weights the values of a copy on the CPU, else of the modules' initialisers.

        Every replay of one failure draws the same ones. Returns where weights are from, in words.
        """
        torch.default_generator.manual_seed(0)
        states = list(weights.state_dicts(namespace))
        found: dict[str, None] = {}
        done: set[int] = set()
        redrawn = False
        for name, value in list(namespace.items()):
            for root in weights.modules(value):
                for module in root.modules():
                    if id(module) not in done and _reset(module):
                        done.add(id(module))
                copies = [(w, s) for w, s in states if weights.fits(s, root, _on_cpu)]
                lost = bool(_lost(root.named_parameters()))
                redrawn |= lost and not copies
                if copies and lost:
                    words, state = copies[-1]  # the name that was made last
                    _fill(root, state)
                    told = f"weights of `{name}` were only on the GPU: those of `{words}` are used"
                    found[told] = None
        if redrawn:
            told = "weights that were only on the GPU were made anew by their modules' initialisers"
            found[told] = None
        if self._made_up:
            found["floats that were only on the GPU, and are no weights, are made up"] = None
        return tuple(found)


def _on_cpu(tensor: torch.Tensor) -> bool:
    tag = devices.tag_of(tensor)
    return tag is None or tag.type == "cpu"


def _lost(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(n, t) for n, t in named if t.is_floating_point() and not _on_cpu(t)]


def _reset(module: torch.nn.Module) -> bool:
    """As its own initialiser would; zeros, which a scale of no known class has, hide all faults.

    True where the module has parameters or buffers that were lost.
    """
    own = _lost((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
    reset = getattr(module, "reset_parameters", None)
    if own and callable(reset):
        reset()
        return True
    with torch.no_grad(), devices.raw():
        for name, tensor in own:
            if tensor.dim() > 1:
                tensor.normal_(std=0.02, generator=torch.default_generator)
            elif name == "weight":
                tensor.fill_(1.0)
    return bool(own)


def _fill(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    held = {weights.plain(key): value for key, value in state.items()}
    with torch.no_grad(), devices.raw():
        for name, tensor in _lost((*module.named_parameters(), *module.named_buffers())):
            value = held.get(weights.plain(name))
            if value is not None and value.shape == tensor.shape:
                tensor.copy_(value)
