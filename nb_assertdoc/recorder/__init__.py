"""Remembers, cheaply, what a later diagnosis needs: sources, bindings, random states."""

from __future__ import annotations

from .allocator import keep_pinned_frees_harmless
from .executions import Execution, Recorder
from .loaders import LoaderLoop, LoaderWatch, parts

__all__ = [
    "Execution",
    "LoaderLoop",
    "LoaderWatch",
    "Recorder",
    "keep_pinned_frees_harmless",
    "parts",
]
