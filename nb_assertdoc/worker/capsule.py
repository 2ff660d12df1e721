"""Takes over what the host saved: the variables, and the state that random numbers had."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .. import salvage
from ..model import Order
from . import rewind
from .sources import set_rng
from .standins import StandIns


class Capsule:
    """The folder of one replay, and what of it is not as it was on the host."""

    def __init__(self, folder: Path, order: Order, differences: list[str]) -> None:
        self._folder = folder
        self._order = order
        self._differences = differences  # the replay's: what is met here is added
        self._random: Any = None  # states of the global generators as the cell began, if known
        self.floats_lost = False  # weights, or other floats that were only on the GPU
        self.remade: tuple[str, ...] = ()  # where weights that were lost are from
        self.not_rewound: tuple[str, ...] = ()  # variables that the dead cell had changed

    def fill(self, namespace: dict[str, Any], generators: list[Any]) -> None:
        """Load the variables, and set all random generators back.

        Those among the variables are added to `generators`.
        """
        folders = [self._folder / name for name in ("variables", "capsule")]
        if any(map(Path.is_dir, folders)):
            self._load(filter(Path.is_dir, folders), namespace)
        state = self._folder / "rng.pickle"
        if state.is_file():
            self._random, rest = rewind.read(state)
            self.set_random()
            self.not_rewound = rewind.put_back(namespace, rest, generators)

    def set_random(self) -> None:
        """Set the global random generators as they were when the cell began."""
        set_rng(self._random)

    def set_defaults(self) -> None:
        """Tensors are made as on the host where the code does not say how."""
        torch.set_default_dtype(getattr(torch, self._order.default_dtype))
        if self._order.default_device is not None:
            torch.set_default_device(self._order.default_device)

    def _load(self, folders: Iterable[Path], namespace: dict[str, Any]) -> None:
        order = self._order
        make = StandIns(order.real_floats)
        loaded: dict[str, Any] = {}  # as the crash left them, then as the cell began
        for folder in folders:
            values, losses = salvage.load(folder, namespace, make=make.tensor)
            for lost in losses:
                self._differences.append(f"`{lost.name}` was not loaded: {lost.why}")
                values.setdefault(lost.name, salvage.Missing(lost.what, lost.why))
            early = {n: v for n, v in values.items() if n not in loaded or n in order.rebound}
            loaded.update(early)
        namespace.update(loaded)
        self.floats_lost = make.floats_lost
        if make.floats_lost and order.real_floats:
            self.remade = make.initialise(namespace)
            self._differences += self.remade
