"""Where `nb-assertdoc check` reads from. Nothing here makes a CUDA call or imports torch.

A reader that cannot read raises `OSError`, whose text says why and what to do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nb_assertdoc import replay
from nb_assertdoc.errors import AssertdocError

_SECONDS = 20  # a driver in trouble lets its tools hang


@dataclass(frozen=True)
class GraphicsCard:
    """One GPU. The counters are uncorrected ECC errors; None where the card has no ECC."""

    name: str
    driver: str
    since_start: int | None  # of the driver
    ever: int | None


@dataclass(frozen=True)
class Kernel:
    """What a fresh kernel of this Python said of itself."""

    seconds: float  # until it answered
    error_hook: bool  # the method that shows tracebacks can be wrapped
    cell_events: bool
    driver_lines: bool  # text on file descriptor 2 was seen


def installed(name: str) -> str | None:
    """Version of an installed distribution, from its metadata."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> str:
    """Source of the module in which torch keeps the versions that it was built with."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise OSError("torch is not installed") from error
    return Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")


def file(path: str) -> str:
    """Text of a file."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def command(*words: str) -> str:
    """Standard output of a program; `OSError` where it is missing, fails or hangs."""
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            env=environ,
            check=False,
        )
    except FileNotFoundError as error:
        raise OSError(f"{words[0]} is not here") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} did not answer in {_SECONDS} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise OSError(said[-1] if said else f"{words[0]} ended with {done.returncode}")
    return done.stdout.decode(errors="replace")


def nvml_cards() -> tuple[GraphicsCard, ...]:
    """The GPUs by NVML, which is not CUDA and works beside a dead context."""
    try:
        import pynvml
    except ImportError as error:
        raise OSError("nvidia-ml-py is not installed: pip install 'nb-assertdoc[gpu]'") from error
    try:
        pynvml.nvmlInit()
        try:
            return tuple(_nvml_cards(pynvml))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error


def _nvml_cards(pynvml: Any) -> Iterator[GraphicsCard]:
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        counts: list[int | None] = []
        for which in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC):
            try:
                kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
                counts.append(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, which))
            except pynvml.NVMLError:  # most cards for games have no ECC
                counts.append(None)
        yield GraphicsCard(_text(pynvml.nvmlDeviceGetName(handle)), driver, *counts)


def _text(answer: bytes | str) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer  # bytes in old releases


_PROBE = """
import json, os
from IPython import get_ipython
from nb_assertdoc.detector import StderrTap
tap = StderrTap()
tap.install()
mark = tap.mark()
os.write(2, b"Assertion `nb-assertdoc check` failed.\\n")
said = {{
    "error_hook": callable(getattr(get_ipython(), "_showtraceback", None)),
    "cell_events": {{"pre_run_cell", "post_run_cell"}} <= set(get_ipython().events.callbacks),
    "driver_lines": "nb-assertdoc check" in tap.since(mark, wait=2.0),
}}
tap.uninstall()
with open({path!r}, "w") as file:
    json.dump(said, file)
"""


def fresh_kernel() -> Kernel:
    """Start a kernel as a replay does, and try there what the extension hooks into."""
    with tempfile.TemporaryDirectory(prefix="nb-assertdoc-check-") as folder:
        path = Path(folder, "said.json")
        try:
            seconds = replay.try_out(_PROBE.format(path=str(path)), Path(folder))
            return Kernel(seconds, **json.loads(path.read_bytes()))
        except (AssertdocError, ImportError) as error:
            raise OSError(str(error)) from error


def autoload() -> tuple[list[str], list[str]]:
    """Files that load the extension in every kernel, and what is wrong with others."""
    from . import autoload as places

    files, problems = [], []
    for place in places.places():
        try:
            if places.is_on(place.path):
                files.append(f"{place.path} ({place.option})")
        except AssertdocError as error:
            problems.append(str(error))
    return files, problems


def folder_mode() -> int:
    """Permissions of a new folder as saved variables lie in, in which a file could be written."""
    with tempfile.TemporaryDirectory(prefix="nb-assertdoc-check-") as folder:
        Path(folder, "written").write_bytes(bytes(4096))
        return Path(folder).stat().st_mode & 0o777


@dataclass(frozen=True)
class Readers:
    """All of them, so that a test can put others in their place."""

    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=platform.platform)
    installed: Callable[[str], str | None] = installed
    torch_build: Callable[[], str] = torch_build
    file: Callable[[str], str] = file
    command: Callable[..., str] = command
    cards: Callable[[], tuple[GraphicsCard, ...]] = nvml_cards
    kernel: Callable[[], Kernel] = fresh_kernel
    folder_mode: Callable[[], int] = folder_mode
    autoload: Callable[[], tuple[list[str], list[str]]] = autoload
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
