"""Seeing that the GPU's context died: in an exception, in a text, on file descriptor 2."""

from __future__ import annotations

from .recognise import Sighting, recognise, recognise_text
from .tap import StderrTap

__all__ = ["Sighting", "StderrTap", "recognise", "recognise_text"]
