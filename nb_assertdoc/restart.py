"""Restart the kernel: how the user does it on this platform, and doing it from inside.

Measured on a real Jupyter Server with both generations of ipykernel: `do_shutdown(True)` on the
main thread's loop brings the kernel back in 3 to 5 s. Under nbclient and papermill it makes the
next cells run in an empty kernel, reported as fine: a headless run is never restarted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from .errors import UsageError

SERVERS = {
    "jupyter-lab",
    "jupyterlab",
    "jupyter-labhub",
    "jupyter-notebook",
    "notebook",
    "jupyter-nbclassic",
    "nbclassic",
    "jupyter-server",
    "jupyter_server",
    "jupyterhub-singleuser",
}
HEADLESS_TOOLS = {
    "papermill",
    "nbconvert",
    "jupyter-nbconvert",
    "nbclient",
    "jupyter-execute",
    "jupyter-run",
    "voila",
    "jupyter-voila",
    "nb-assertdoc",
    "nb_assertdoc",
}
VSCODE_MARK = "__vsc_ipynb_file__"  # a variable that VS Code sets in the notebook's namespace


@dataclass(frozen=True)
class Adapter:
    """What a restart means where this kernel runs.

    `how` is the platform's own menu entry or key, `forewarn` what the front end will say when the
    kernel ends from inside ("" where it says nothing), `interrupt` what stops a running cell.
    """

    name: str
    how: str
    forewarn: str = ""
    headless: bool = False
    interrupt: str = "Interrupt (\u25a0)"
    end: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def can_restart(self) -> bool:
        """True where `restart` ends this kernel and the platform starts a new one."""
        return self.end is not None and not self.headless

    def restart(self) -> None:
        """End this kernel so that the platform starts a new one; returns before it happens.

        Raises `UsageError`, which names what to do, where that is impossible or would do harm.
        """
        if self.end is None or self.headless:
            raise UsageError(f"{self.name}: no restart from inside is possible; {self.how}")
        self.end()


def adapter(
    shell: Any = None,
    environ: Mapping[str, str] = os.environ,
    modules: Mapping[str, Any] = sys.modules,
    parent: Sequence[str] | None = None,
) -> Adapter:
    """The adapter for this process, as it is now: ask again for each crash.

    `shell` is IPython's shell (default: the running one), `parent` the command line of the process
    that started this one (default: read from the system).
    """
    shell = shell or _running_shell(modules)
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return Adapter("terminal", "exit and start ipython again", interrupt="Ctrl-C")
    started_by = _programs(_parent_command() if parent is None else parent)
    if _headless(shell, environ, modules, started_by):
        name = "Kaggle batch run" if _kaggle(environ) else "headless run"
        return Adapter(name, "a new run of the notebook starts a new kernel", headless=True)
    return _front_end(shell, environ, modules, started_by)


def _front_end(
    shell: Any, environ: Mapping[str, str], modules: Mapping[str, Any], started_by: frozenset[str]
) -> Adapter:
    kernel = shell.kernel

    def shut_down() -> None:
        # Through the loop: on another thread do_shutdown leaves the kernel alive, and within a
        # cell it would cut off the cell's own reply.
        kernel.io_loop.add_callback(kernel.do_shutdown, True)

    def kill() -> None:
        # Never runtime.unassign(): it gives the whole machine and its files back.
        # A moment later, so that the cell's reply still gets out.
        loop = kernel.io_loop
        loop.add_callback(loop.call_later, 0.2, os.kill, os.getpid(), signal.SIGKILL)

    served = bool(started_by & SERVERS)
    if _kaggle(environ):  # before Colab: Kaggle's image is built on Colab's
        return Adapter(
            "Kaggle",
            "Run > Restart & clear cell outputs",
            'Kaggle may say that the notebook "tried to allocate more memory than is available":'
            " it is only the restart",
            end=shut_down,
        )
    if "google.colab" in modules or any(name.startswith("COLAB_") for name in environ):
        return Adapter(
            "Colab",
            "Runtime > Restart session (Ctrl+M .)",
            'Colab will say "Your session crashed": it is only the restart; files are kept',
            end=kill,
        )
    if VSCODE_MARK in shell.user_ns or (not served and "VSCODE_PID" in environ):
        # VS Code starts no kernel again that has ended by itself (microsoft/vscode-jupyter#5487):
        # it can be restarted from inside only where a Jupyter server does it.
        return Adapter(
            "VS Code",
            "Restart button in the notebook toolbar",
            'VS Code may say "The Kernel crashed": it is only the restart' if served else "",
            end=shut_down if served else None,
        )
    if served or "JPY_SESSION_NAME" in environ:
        return Adapter(
            "Jupyter",
            "Kernel > Restart Kernel… (0 0 in command mode)",
            'JupyterLab will say that the kernel "appears to have died": it is only the restart',
            end=shut_down,
        )
    return Adapter("Jupyter kernel", "Restart button or menu of your notebook program")


def _headless(
    shell: Any, environ: Mapping[str, str], modules: Mapping[str, Any], started_by: frozenset[str]
) -> bool:
    """True where nobody sits before the notebook. No driver says so: it shows by its signs."""
    if environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch":
        return True
    if getattr(shell.kernel, "_allow_stdin", True):  # nbclient and papermill never allow input
        return False
    if started_by & HEADLESS_TOOLS:
        return True
    # Front ends send requests without input, too (variable viewers, for example).
    if started_by & SERVERS or VSCODE_MARK in shell.user_ns:
        return False
    if _kaggle(environ) or "google.colab" in modules:
        return False
    # What is left is a Python program that drives nbclient. Run from a notebook it inherits that
    # notebook's JPY_SESSION_NAME, so the name counts only where the parent cannot be seen.
    return bool(started_by) or "JPY_SESSION_NAME" not in environ


def _kaggle(environ: Mapping[str, str]) -> bool:
    return "KAGGLE_KERNEL_RUN_TYPE" in environ


def _running_shell(modules: Mapping[str, Any]) -> Any:
    ipython = modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _parent_command() -> Sequence[str]:
    import psutil

    try:
        return tuple(psutil.Process(os.getppid()).cmdline())
    except psutil.Error:
        return ()


def _programs(command: Iterable[str]) -> frozenset[str]:
    """The names among the first words of a command line (interpreter, flags, script or module)."""
    names = (PurePath(word).name for word in list(command)[:4])
    return frozenset(name.removesuffix(".exe").removesuffix("-script.py") for name in names)
