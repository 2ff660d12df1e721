"""The memory that a replay with real floats needs, and what there is for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TRAINING = 4  # weights, gradients and an optimizer's two states, in multiples of the weights
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = {  # by version: limit, use, and the line of memory.stat that can be had back
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def training_bytes(namespace: Mapping[str, Any] | None) -> int:
    """What the models of a notebook need when they are trained, from their shapes alone."""
    torch = sys.modules.get("torch")
    if torch is None or namespace is None:
        return 0
    weights: dict[int, int] = {}
    for value in namespace.values():
        held = getattr(value, "__dict__", None)  # a trainer holds its model
        parts = held.values() if type(held) is dict and not isinstance(value, type) else ()
        for each in (value, *parts):
            if isinstance(each, torch.nn.Module):
                weights.update((id(p), p.numel() * p.element_size()) for p in each.parameters())
    return _TRAINING * sum(weights.values())


def free_memory(own: Path = Path("/proc/self/cgroup"), cgroups: Path = _CGROUPS) -> int:
    """Bytes that a replay may hold: four fifths of what the machine, or its container, has free."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for folder, version in _groups(own, cgroups):
        limit, used, cached = _FILES[version]
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            most = int((folder / limit).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            held = int((folder / used).read_text()) - int(stat.get(cached, 0))
            free = min(free, max(most - held, 0))
    return free * 4 // 5


def _groups(own: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """The control groups of this process, up to the root: each may have a limit."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0":
                root, version = cgroups, 2
            elif "memory" in controllers.split(","):
                root, version = cgroups / "memory", 1
            else:
                continue
            group = Path(name.lstrip("/"))
            for part in (group, *group.parents):
                yield root / part, version
