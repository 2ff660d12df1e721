"""Numbers that nothing can repeat: of the clock, the system, generators without a seed."""

from __future__ import annotations

import functools
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..frames import Cells, here

_SEEDED: tuple[tuple[Any, str], ...] = (  # without an argument (or with None) the system gives one
    (np.random, "default_rng"),
    (np.random, "seed"),
    (np.random, "RandomState"),
    (np.random, "SeedSequence"),
    (random, "seed"),
    (random, "Random"),
)
_SYSTEM: tuple[tuple[Any, str], ...] = (
    (os, "urandom"),
    (secrets, "randbelow"),
    (secrets, "randbits"),
    (secrets, "choice"),
    (secrets, "token_bytes"),
    (secrets, "token_hex"),
    (random, "SystemRandom"),
    (uuid, "uuid4"),
    (time, "time_ns"),
    (torch, "seed"),
    (torch.random, "seed"),
)
_ENVIRONMENTS = ("gym.", "gymnasium.")  # their `reset()` without a seed


def install(cells: Cells, note: Callable[[str], None]) -> None:
    """Call `note` with words when the user's code asks for such a number."""

    def watched(owner: Any, name: str, always: bool) -> None:
        plain = getattr(owner, name)

        def look(args: Any, kwargs: Any) -> None:
            seeds = [v for v in (*args, *kwargs.values()) if v is not None]
            frame = here(2)
            asked = cells.is_user_frame(frame) or str(frame.f_globals.get("__name__")).startswith(
                _ENVIRONMENTS
            )
            if asked and (always or not seeds):
                note(
                    f"`{name}` gave a number or seed that no replay can repeat "
                    f"(line {frame.f_lineno})"
                )

        if isinstance(plain, type):
            # A class stays the class that `isinstance` asks for.
            setattr(owner, name, _watching(plain, look))
            return

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            look(args, kwargs)
            return plain(*args, **kwargs)

        setattr(owner, name, call)

    for owner, name in _SEEDED:
        watched(owner, name, False)
    for owner, name in _SYSTEM:
        watched(owner, name, True)


class _Asked(type):
    """A class in whose place its `plain` one is made, and counts as an instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "look" not in vars(cls):  # the user's own subclass
            return super().__call__(*args, **kwargs)
        vars(cls)["look"].__func__(args, kwargs)
        return vars(cls)["plain"](*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        plain = vars(cls).get("plain")
        return isinstance(instance, plain) if plain else super().__instancecheck__(instance)


def _watching(plain: type, look: Callable[[Any, Any], None]) -> type:
    body = {"plain": plain, "look": staticmethod(look), "__module__": plain.__module__}
    return _Asked(plain.__name__, (plain,), body)
