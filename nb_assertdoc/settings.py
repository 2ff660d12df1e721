"""Settings: traitlets, so that `%config AssertDoc.x = ...` and Jupyter config files work."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from traitlets import Bool, Float, Int, TraitError
from traitlets.config import SingletonConfigurable


class AssertDoc(SingletonConfigurable):
    """Diagnosis of device-side asserts. Every time is in seconds."""

    enabled = Bool(
        True, help="Recognise and diagnose asserts; NB_ASSERTDOC=off turns it off too."
    ).tag(config=True)
    replay = Bool(True, help="Replay the failing cell by itself after a crash.").tag(config=True)
    salvage_seconds = Float(5.0, min=0.1, help="Budget for saving the variables.").tag(config=True)
    salvage_bytes = Int(2 << 30, min=1 << 20, help="Most bytes of variables that are saved.").tag(
        config=True
    )
    replay_seconds = Float(
        15.0,
        min=1.0,
        help="Budget for the replays that start by themselves; unset, more on a busy machine.",
    ).tag(config=True)
    asked_seconds = Float(600.0, min=1.0, help="Budget for a replay that was asked for.").tag(
        config=True
    )
    worker_bytes = Int(
        0, min=0, help="Memory limit of a replay; 0: what the machine has free."
    ).tag(config=True)
    line_seconds = Float(0.1, min=0.0, max=1.0, help="Wait for the driver's lines of fd 2.").tag(
        config=True
    )
    integer_copy_bytes = Int(
        4 << 20, min=0, help="Most bytes of integer CUDA tensors copied before a cell."
    ).tag(config=True)
    keep = Bool(
        True,
        help="After a crash, keep the variables and the replay on disk for %assertdoc restore and "
        "%assertdoc verify; %assertdoc forget deletes them.",
    ).tag(config=True)
    keep_seconds = Float(5.0, min=0.1, help="Budget for keeping the variables.").tag(config=True)
    keep_bytes = Int(1 << 30, min=0, help="Most bytes of one crash's kept variables.").tag(
        config=True
    )
    keep_days = Float(7.0, min=0.0, help="Days after which what was kept is removed.").tag(
        config=True
    )
    keep_total_bytes = Int(
        4 << 30, min=0, help="Most bytes of all that is kept; the oldest is removed first."
    ).tag(config=True)


def settings(parent: Any = None) -> AssertDoc:
    """The settings of this process; `parent` (the shell) brings the user's configuration files.

    `NB_ASSERTDOC_REPLAY_SECONDS=60` and the like in the environment set the defaults; a value that
    cannot be read is left out, since a typo there must not break a notebook.
    """
    if not AssertDoc.initialized():
        made = AssertDoc.instance(parent=parent)
        for name, trait in AssertDoc.class_own_traits(config=True).items():
            text = os.environ.get(f"NB_ASSERTDOC_{name.upper()}")
            if text is not None:
                with contextlib.suppress(TraitError, ValueError):
                    setattr(made, name, trait.from_string(text))
    return AssertDoc.instance()


def switched_off() -> bool:
    """True where the user's environment or configuration turns everything off."""
    return os.environ.get("NB_ASSERTDOC", "").lower() in {"off", "0", "false", "no"} or not (
        settings().enabled
    )
