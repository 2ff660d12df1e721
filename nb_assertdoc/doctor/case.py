"""One cell to be diagnosed, and the records that are made of what the host saw."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from .. import frames
from ..detector import Sighting
from ..errors import NothingToReplay
from ..model import Crash, Environment, FirstFailed, Place, Report, Source
from ..recorder import Execution, Loop


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
    rng: Any = None
    integers: Mapping[int, Any] = field(default_factory=dict)
    loop: Loop | None = None
    cwd: str = ""
    max_steps: int | None = None
    doubts: tuple[str, ...] = ()  # what lowers the confidence from the start
    environment: Environment | None = None


def check_code(cell: str) -> None:
    """Refuse a cell that has no Python to replay.

    Raises `NothingToReplay` for an empty cell, one with only magics, or a syntax error.
    """
    code = frames.body(cell)
    try:
        compiled = compile(code, "<cell>", "exec", flags=0x2000, dont_inherit=True)  # await allowed
    except (SyntaxError, ValueError) as error:
        raise NothingToReplay(f"the cell is not valid Python: {error}") from error
    lines = [line.strip() for line in cell.splitlines()]
    useful = [x for x in lines if x and not x.startswith(("%", "!", "#"))]
    if not useful or not compiled.co_code:
        raise NothingToReplay("the cell holds no Python code to replay, only magics or comments")


def crash_of(
    sighting: Sighting,
    execution_count: int | None,
    tb: TracebackType | None,
    cells: frames.Cells,
) -> Crash:
    """The record of what the host saw."""
    entries = frames.user_traceback(tb, cells)
    surface = frames.place(entries[-1], cells) if entries else Place(line=0, source="")
    return Crash(
        exception=sighting.exception,
        message=sighting.message,
        error_code=sighting.error_code,
        messenger=sighting.messenger,
        assert_lines=sighting.assert_lines,
        surface=surface,
        execution_count=execution_count,
        rank=sighting.rank,
    )


def swallowed(crash: Crash, source: str, execution_count: int | None) -> Crash:
    """A crash that no traceback showed: user code caught it. The surface is the `except` line."""
    lines = source.splitlines()
    number = next((i for i, x in enumerate(lines, 1) if x.strip().startswith("except")), 0)
    where = Place(
        line=number,
        source=lines[number - 1] if number else "",
        execution_count=execution_count,
    )
    caught = f"`{where.source.strip()}` in line {number}" if number else "an except in called code"
    return msgspec.structs.replace(
        crash,
        exception="",
        message=f"The error was swallowed by {caught} of In [{execution_count}].",
        surface=where,
    )


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
        stale=True,
        first_failed=FirstFailed(execution_count=first.execution_count, source=first.source),
    )
    return msgspec.structs.replace(report, crash=crash)


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
