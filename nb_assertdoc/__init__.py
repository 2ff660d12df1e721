"""Diagnose `CUDA error: device-side assert triggered` in PyTorch notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext nb_assertdoc`."""
    from .extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext nb_assertdoc`."""
    from .extension import unload

    unload(shell)


def last_report() -> Any:
    """The last `Report` shown in this process, or None."""
    from .doctor import last_report as last

    return last()


def explain(text: str) -> str:
    """Plain words for an error text, an assert line, a catalogue id, a cause's key or a topic."""
    from .diagnosis import explain as _explain

    return _explain(text)
