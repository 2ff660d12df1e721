"""This process and its shell: the limits of a worker's life."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..model import Source


def draw_nothing(shell: Any) -> None:
    """`%matplotlib`, its settings (the library may be missing) and our own magics do nothing."""
    magics = shell.magics_manager.magics["line"]
    config, load = magics["config"], magics["load_ext"]
    magics["load_ext"] = lambda line: load(line) if "nb_assertdoc" not in line else None
    magics["assertdoc"] = magics["cpu_replay"] = lambda line: None
    magics["matplotlib"] = lambda line: None
    magics["config"] = lambda line: None if "InlineBackend" in line else config(line)


def name_cells(shell: Any, cells: Iterable[Source]) -> None:
    """Compile each cell under the host's file name: tracebacks and loop keys then agree."""
    by_source = {c.source.strip(): c.filename for c in cells}
    plain = shell.compile.get_code_name

    def get_code_name(raw: str, transformed: str, number: int) -> str:
        return str(by_source.get(raw.strip()) or plain(raw, transformed, number))

    shell.compile.get_code_name = get_code_name


def die_with_the_host() -> None:
    """A worker never outlives its host."""
    host = os.getppid()

    def watch() -> None:
        while os.getppid() == host:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="nb_assertdoc-host-watch").start()
    try:
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux
        Path("/proc/self/oom_score_adj").write_text("800")
    except (OSError, AttributeError):
        pass  # the watch above is enough


def peak_rss() -> int | None:
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    except ImportError:  # Windows
        return None
