"""Seeing that the GPU's context died: in an exception, in a text, on file descriptor 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .origin import contexts_answer, cuda_started, ended_children, runs_programs
from .tap import StderrTap

if TYPE_CHECKING:
    from .sightings import Sighting, recognise, recognise_own, recognise_text

_AT_AN_ERROR = ("Sighting", "recognise", "recognise_own", "recognise_text")

__all__ = [
    "Sighting",
    "StderrTap",
    "contexts_answer",
    "cuda_started",
    "ended_children",
    "recognise",
    "recognise_own",
    "recognise_text",
    "runs_programs",
]


def __getattr__(name: str) -> Any:
    """The tap is needed at load, the texts of all errors only at the first error."""
    if name in _AT_AN_ERROR:
        from . import sightings as module

        return getattr(module, name)
    raise AttributeError(name)
