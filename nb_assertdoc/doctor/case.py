"""One cell to be diagnosed, and the records that are made of what the host saw."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from .. import frames
from ..detector import Sighting
from ..errors import NothingToReplay, TorchMissing
from ..model import Crash, Environment, FirstFailed, Place, Report, Source
from ..recorder import Execution, LoaderLoop

TORCH_FLOOR = (2, 4)


@dataclass
class Case:
    """One cell to be replayed, with all that the host knows about it."""

    cell: Source
    sources: tuple[Source, ...] = ()
    earlier: tuple[Source, ...] = ()  # executions that may be run again, in order
    namespace: Mapping[str, Any] | None = None  # None: there is no state (a saved notebook)
    now: Mapping[str, Any] = field(default_factory=dict)  # the namespace as it is now
    gone: tuple[str, ...] = ()
    crash: Crash | None = None
    rng: Any = None  # states of the global random generators; None: the start was not recorded
    random: Mapping[int | None, Any] = field(default_factory=dict)  # the same, by `In [count]`
    seconds: Mapping[int | None, float] = field(default_factory=dict)  # that `earlier` ones took
    generators: Mapping[tuple[str, str | None], Any] = field(default_factory=dict)  # of variables
    patches: tuple[Any, ...] = ()  # what puts back values that the cell changed in place
    integers: Mapping[int, Any] = field(default_factory=dict)
    loop: LoaderLoop | None = None  # the one that asked for a batch last
    loops: tuple[LoaderLoop, ...] = ()  # all of the cell's
    cwd: str = ""
    max_steps: int | None = None
    batches: int | None = None  # measure so many of each loop, and go on after a fault
    others_follow: bool = False  # where this cell is innocent, an earlier one is tried next
    doubts: tuple[str, ...] = ()  # what lowers the confidence from the start
    environment: Environment | None = None
    keep_as: str | None = None  # the session's room that keeps the replay of a fault for `verify`


def check_code(cell: str) -> None:
    """Refuse a cell that has no Python to replay.

    Raises `NothingToReplay` for an empty cell, one with only magics, or a syntax error.
    """
    try:
        compiled = frames.compiled(cell)
    except (SyntaxError, ValueError) as error:
        raise NothingToReplay(f"the cell is not valid Python: {error}") from error
    lines = [line.strip() for line in cell.splitlines()]
    useful = [x for x in lines if x and not x.startswith(("%", "!", "#"))]
    if not useful or not compiled.co_code:
        raise NothingToReplay("the cell holds no Python code to replay, only magics or comments")


def check_torch() -> None:
    """Raise `TorchMissing` where a replay has no torch to run with, or a too old one."""
    torch = sys.modules.get("torch")
    if torch is None and importlib.util.find_spec("torch") is None:
        raise TorchMissing(f"a replay needs torch, and {sys.executable} has none")
    version = getattr(torch, "__version__", None) or importlib.metadata.version("torch")
    found = tuple(int(part) for part in re.findall(r"\d+", str(version))[:2])
    if found < TORCH_FLOOR:
        least = ".".join(map(str, TORCH_FLOOR))
        raise TorchMissing(f"a replay needs torch {least} or newer; this is torch {version}")


def crash_of(
    sighting: Sighting,
    cell: Source,
    tb: TracebackType | None,
    cells: frames.Cells,
) -> Crash:
    """The record of what the host saw as `cell` ran. `tb`: None where no traceback is at hand."""
    entries = frames.user_traceback(tb, cells)
    if entries:
        surface = frames.place(entries[-1], cells)
    elif tb is not None:
        surface = _last_statement(cell)  # no user code on it: IPython showed the cell's value
    else:
        surface = Place(line=0, source="")
    return Crash(
        exception=sighting.exception,
        message=sighting.message,
        error_code=sighting.error_code,
        messenger=sighting.messenger,
        assert_lines=sighting.assert_lines,
        surface=surface,
        execution_count=cell.execution_count,
        rank=sighting.rank,
    )


def _last_statement(cell: Source) -> Place:
    with contextlib.suppress(SyntaxError, ValueError):
        code = frames.body(cell.source)
        statements = ast.parse(code).body
        if statements:
            line = statements[-1].lineno
            return Place(
                line=line + cell.above,
                source=code.splitlines()[line - 1],
                execution_count=cell.execution_count,
                cell_id=cell.cell_id,
            )
    return Place(line=0, source="")


def swallowed(crash: Crash, cell: Source) -> Crash:
    """A crash that did not end the cell: user code caught it (the surface is then the `except`
    line), or it ended a thread."""
    lines = cell.source.splitlines()
    number = next((i for i, x in enumerate(lines, 1) if x.strip().startswith("except")), 0)
    where = Place(
        line=number,
        source=lines[number - 1] if number else "",
        execution_count=cell.execution_count,
        cell_id=cell.cell_id,
    )
    if number:
        by = f"`{where.source.strip()}` in line {number}"
    else:
        by = "a thread or an `except` in called code"
    return msgspec.structs.replace(
        crash,
        exception="",
        message=f"The error was swallowed by {by} of In [{cell.execution_count}].",
        surface=where,
    )


def replayable(cell: str) -> bool:
    """The cell holds Python that a replay can run."""
    with contextlib.suppress(NothingToReplay):
        check_code(cell)
        return True
    return False


def of_earlier(crash: Crash, first: Execution) -> Crash:
    """The crash, where the kernel that failed had been started by an earlier cell."""
    failed = FirstFailed(execution_count=first.execution_count, source=first.source)
    return msgspec.structs.replace(crash, stale=True, first_failed=failed)


def stale(
    report: Report,
    sighting: Sighting,
    execution: Execution,
    first: Execution,
    surface: Place,
) -> Report:
    """The first failure's report, told of a later failure of the same dead context."""
    crash = Crash(
        exception=sighting.exception,
        message=sighting.message,
        error_code=sighting.error_code,
        messenger=sighting.messenger,
        assert_lines=report.crash.assert_lines if report.crash is not None else (),
        surface=surface,
        execution_count=execution.execution_count,
    )
    return msgspec.structs.replace(report, crash=of_earlier(crash, first))


def environment_now() -> Environment:
    """Versions of this process; no CUDA call is made."""
    import platform

    import IPython

    torch = sys.modules.get("torch")
    devices = devices_now()
    return Environment(
        python=platform.python_version(),
        ipython=IPython.__version__,
        platform=platform.platform(),
        torch=str(torch.__version__) if torch is not None else None,
        devices=(devices["device_name"],) * devices["device_count"] if devices else (),
    )


def defaults_now() -> dict[str, Any]:
    """What tensors are made as where nothing is said; no CUDA call is made."""
    torch: Any = sys.modules.get("torch")
    try:
        # `torch.get_default_device` makes a tensor there.
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        device = str(context.device) if context is not None else None
        return {"default_dtype": dtype, "default_device": device}
    except AttributeError:
        return {}  # no torch, or another one: the defaults of `Order`


def devices_now() -> dict[str, Any]:
    """The user's devices, from figures that torch has cached: no CUDA call is made."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return {}
        properties = torch.cuda.get_device_properties(0)
        return {
            "device_count": int(torch.cuda.device_count()),
            "device_name": str(properties.name),
            "capability": (int(properties.major), int(properties.minor)),
            "device_memory": int(properties.total_memory),
        }
    except Exception:
        return {}  # the defaults of `Order`: one device
