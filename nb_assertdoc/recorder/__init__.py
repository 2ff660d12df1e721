"""Remembers, cheaply, what a later diagnosis needs: each cell's source, bindings and random states."""

from __future__ import annotations

from .allocator import keep_pinned_frees_harmless
from .executions import Execution, Recorder
from .loaders import Loop, LoaderWatch

__all__ = ["Execution", "LoaderWatch", "Loop", "Recorder", "keep_pinned_frees_harmless"]
