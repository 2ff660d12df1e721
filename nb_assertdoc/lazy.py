"""Modules that are imported at their first use: `%load_ext` must not cost what a crash needs."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module of this package until one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = f"{__package__}.{name}"

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
