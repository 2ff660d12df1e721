"""Random numbers: a pretended device has a state of its own, as a GPU has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nb_assertdoc.devices.state import CPU, Device, index_of, patch, pretend, state

_generators: list[torch.Generator] = []
_unused: set[int] = set()  # devices that have drawn nothing since their seed
_Generator = torch.Generator


@contextlib.contextmanager
def of(device: torch.device) -> Iterator[None]:
    """Operators inside draw from the device's state, and leave the CPU's as it was."""
    index = device.index or 0
    own, default = _generators[index], torch.default_generator
    before = default.get_state()
    if not (state.devices.random_from_cpu and index in _unused):
        default.set_state(own.get_state())
    _unused.discard(index)
    try:
        yield
    finally:
        own.set_state(default.get_state())
        default.set_state(before)


def _set(index: int, new_state: torch.Tensor) -> None:
    own = _generators[index]
    if new_state.numel() == own.get_state().numel():
        own.set_state(new_state)
    else:  # saved on a real GPU: 8 bytes of seed, 8 of offset
        own.manual_seed(int.from_bytes(bytes(new_state[:8].tolist()), "little"))


class _AnyGenerator(type(_Generator)):  # type: ignore[misc]
    """`isinstance(g, torch.Generator)` stays true of generators that torch itself made."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)


class Generator(_Generator, metaclass=_AnyGenerator):
    """A CPU generator that says it is where the user wanted it."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, CPU if pretend(device) else device)  # type: ignore[call-arg]
        self._nb_device = pretend(device)
        return self

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._nb_device or CPU

    _nb_device: torch.device | None


def install() -> None:
    """Replace `torch.Generator` and the random functions of `torch.cuda`."""
    _generators.extend(_Generator() for _ in range(state.devices.count))
    _unused.update(range(state.devices.count))
    torch.Generator = Generator  # type: ignore[misc]
    torch.cuda.default_generators = tuple(_generators)  # type: ignore[assignment]

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        state.hooks.api("get_rng_state")
        return _generators[index_of(device)].get_state()

    def get_rng_state_all() -> list[torch.Tensor]:
        return [get_rng_state(index) for index in range(state.devices.count)]

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        state.hooks.api("set_rng_state")
        _set(index_of(device), new_state)

    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        for index, new_state in enumerate(new_states):
            set_rng_state(new_state, Device("cuda", index))

    def manual_seed(seed: int) -> None:
        if _started():
            state.hooks.api("manual_seed")
        _generators[index_of(None)].manual_seed(int(seed))
        _unused.add(index_of(None))

    def manual_seed_all(seed: int) -> None:
        if _started():
            state.hooks.api("manual_seed_all")
        for index, own in enumerate(_generators):
            own.manual_seed(int(seed))
            _unused.add(index)

    def seed() -> None:
        if _started():
            state.hooks.api("seed")
        _generators[index_of(None)].seed()

    def seed_all() -> None:
        if _started():
            state.hooks.api("seed_all")
        for own in _generators:
            own.seed()

    def initial_seed() -> int:
        state.hooks.api("initial_seed")
        return _generators[index_of(None)].initial_seed()

    for function in (
        get_rng_state,
        get_rng_state_all,
        set_rng_state,
        set_rng_state_all,
        manual_seed,
        manual_seed_all,
        seed,
        seed_all,
        initial_seed,
    ):
        patch(torch.cuda, function.__name__, function)
        patch(torch.cuda.random, function.__name__, function)


def _started() -> bool:
    return state.initialized and not state.forked
