"""What nb_assertdoc costs before anything goes wrong, beside a bare kernel.

    python -m benchmarks.hooks [--cells 300] [--loops 30]

Two kernels take turns with the same cell, one bare, one with the extension; a cell's time runs from
the request to the kernel's `idle`. Medians, since other processes disturb single cells.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from tests.kernels import Kernel

LOAD = """
import sys, time
started = time.perf_counter()
get_ipython().run_line_magic("load_ext", "nb_assertdoc")
seconds, torch = time.perf_counter() - started, "torch" in sys.modules
"""
VARIABLES = "globals().update({f'variable_{n}': [n] for n in range(1000)})"
TRAINING = """
import torch
from torch import nn
torch.set_num_threads(1)
rows = torch.utils.data.TensorDataset(torch.randn(3200, 16), torch.randint(0, 10, (3200,)))
loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
LOOP = """
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Cost:
    """Medians of one cell's time in seconds."""

    title: str
    bare: float
    loaded: float


@dataclass(frozen=True)
class Hooks:
    """All that the extension costs."""

    cells: tuple[Cost, ...]
    load: float  # seconds of %load_ext
    kernel_start: float
    imports_torch: bool


def measure(cells: int = 300, loops: int = 30) -> Hooks:
    """Measure a bare kernel and one with the extension, in turns."""
    started = time.perf_counter()
    with Kernel() as bare:
        start = time.perf_counter() - started
        with Kernel(extension=True) as loaded:
            kernels = (bare, loaded)
            costs = (
                _cost("an empty cell", kernels, "", "pass", cells),
                _cost("a cell beside 1,000 variables", kernels, VARIABLES, "pass", cells),
                _cost("a training loop of 200 steps", kernels, TRAINING, LOOP, loops),
            )
    loads = [_load() for _ in range(5)]
    return Hooks(
        cells=costs,
        load=statistics.median(seconds for seconds, _ in loads),
        kernel_start=start,
        imports_torch=any(torch for _, torch in loads),
    )


def _cost(title: str, kernels: tuple[Kernel, Kernel], before: str, cell: str, count: int) -> Cost:
    for kernel in kernels:
        kernel.run(before)
        _seconds(kernel, cell)
    pairs = [tuple(_seconds(kernel, cell) for kernel in kernels) for _ in range(count)]
    bare, loaded = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Cost(title, bare, loaded)


def _seconds(kernel: Kernel, cell: str) -> float:
    started = time.perf_counter()
    outcome = kernel.run(cell)
    if outcome.error:
        raise SystemExit(outcome.text)
    return time.perf_counter() - started


def _load() -> tuple[float, bool]:
    """Seconds of `%load_ext` in a fresh kernel, and whether it imported torch."""
    with Kernel() as kernel:
        kernel.run(LOAD)
        return tuple(kernel.value("(seconds, torch)"))


def table(hooks: Hooks) -> str:
    """The figures in Markdown."""
    torch = "and imports torch" if hooks.imports_torch else "without torch"
    lines = [
        "| | without | with | ratio | difference |",
        "|---|---|---|---|---|",
        *(
            f"| {c.title} | {c.bare * 1e3:.2f} ms | {c.loaded * 1e3:.2f} ms "
            f"| {c.loaded / c.bare:.2f} | {(c.loaded - c.bare) * 1e3:.2f} ms |"
            for c in hooks.cells
        ),
        "",
        f"`%load_ext nb_assertdoc` takes {hooks.load * 1e3:.0f} ms {torch}: "
        f"{hooks.load / hooks.kernel_start:.3f} times a kernel's start.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=300, help="cells a kernel (default: 300)")
    parser.add_argument("--loops", type=int, default=30, help="training loops (default: 30)")
    given = parser.parse_args()
    print(table(measure(given.cells, given.loops)))


if __name__ == "__main__":
    main()
