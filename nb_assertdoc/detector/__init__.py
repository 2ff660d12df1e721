"""Seeing that the GPU's context died: in an exception, in a text, on file descriptor 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .tap import StderrTap

if TYPE_CHECKING:
    from .sightings import Sighting, recognise, recognise_text

__all__ = ["Sighting", "StderrTap", "recognise", "recognise_text"]


def __getattr__(name: str) -> Any:
    """The tap is needed at load, the texts of all errors only at the first error."""
    if name in __all__:
        from . import sightings as module

        return getattr(module, name)
    raise AttributeError(name)
