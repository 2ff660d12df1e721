"""Errors that a user of nb_assertdoc can meet. Each names the value and what was allowed."""

from __future__ import annotations

import re


class AssertdocError(Exception):
    """Base class of every error raised on purpose by this package."""


class UsageError(AssertdocError):
    """A magic, an option or an argument was given a value that is not allowed."""


class NothingToReplay(AssertdocError):
    """There is no failing cell, or the cell has no code that could be replayed."""


class NotebookError(AssertdocError):
    """A notebook file is missing, unreadable, of an unsupported format or without code."""


class WorkerError(AssertdocError):
    """The replay's kernel did not start, died, or broke a limit."""


class StorageError(AssertdocError, OSError):
    """There is no folder to keep things in after a crash, or it belongs to somebody else."""


class LostValueError(AssertdocError):
    """A replay touched a value that could not be salvaged (raised inside the worker only)."""


class TorchMissing(AssertdocError):
    """torch is absent, or older than the floor that the package declares."""


def did_you_mean(message: str) -> str:
    """What follows an argument parser's complaint about a mistyped choice; "" if none is near."""
    import difflib

    typo = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    near = typo and difflib.get_close_matches(typo[1].lower(), re.findall(r"[\w-]+", typo[2]), 1)
    return f" Did you mean {near[0]}?" if near else ""
