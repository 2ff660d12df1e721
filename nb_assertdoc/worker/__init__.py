"""The worker: a fresh kernel that replays one cell. The host never imports it."""

from __future__ import annotations

from .entry import begin_cell, begin_earlier, finish, prepare

__all__ = ["begin_cell", "begin_earlier", "finish", "prepare"]
