"""Everything that is known about the GPU's asserts and about the host errors that follow them."""

from __future__ import annotations

from .entries import Entry, entries, entry
from .explain import CPU_ERROR, explain, topics
from .parse import Parsed, driver_line, fold, operators_of, parse
from .surfaces import Surface, surface_of, surface_of_code

__all__ = [
    "CPU_ERROR",
    "Entry",
    "Parsed",
    "Surface",
    "driver_line",
    "entries",
    "entry",
    "explain",
    "fold",
    "operators_of",
    "parse",
    "surface_of",
    "surface_of_code",
    "topics",
]
