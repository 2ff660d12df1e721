"""What nb_assertdoc costs before anything goes wrong, beside a bare kernel.

    python -m benchmarks.hooks [--cells 300]

Two kernels take turns with the same cell, one bare, one with the extension; a cell's time runs from
the request to the kernel's `idle`. Medians, since other processes disturb single cells.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tests.kernels import Kernel

LOAD = """
import sys, time
started = time.perf_counter()
get_ipython().run_line_magic("load_ext", "nb_assertdoc")
seconds, torch = time.perf_counter() - started, "torch" in sys.modules
"""
VARIABLES = "globals().update({f'variable_{n}': [n] for n in range(1000)})"


def cell_seconds(kernel: Kernel) -> float:
    started = time.perf_counter()
    kernel.run("pass")
    return time.perf_counter() - started


def load_seconds() -> tuple[float, bool]:
    """Seconds of `%load_ext` in a fresh kernel, and whether it imported torch."""
    with Kernel() as kernel:
        kernel.run(LOAD)
        return tuple(kernel.value("(seconds, torch)"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=300, help="cells a kernel (default: 300)")
    count = parser.parse_args().cells

    started = time.perf_counter()
    with Kernel() as bare:
        start = time.perf_counter() - started
        with Kernel(extension=True) as loaded:
            print(f"{'':24}{'bare':>10}{'loaded':>10}{'ratio':>8}")
            for title, before in (("an empty cell", ""), ("with 1,000 variables", VARIABLES)):
                for kernel in (bare, loaded):
                    kernel.run(before)
                pairs = [(cell_seconds(bare), cell_seconds(loaded)) for _ in range(count)]
                one, two = (statistics.median(times) for times in zip(*pairs, strict=True))
                print(f"{title:24}{one * 1e3:>7.2f} ms{two * 1e3:>7.2f} ms{two / one:>8.2f}")

    loads = [load_seconds() for _ in range(5)]
    seconds = statistics.median(seconds for seconds, _ in loads)
    torch = "yes" if any(torch for _, torch in loads) else "no"
    print(f"%load_ext nb_assertdoc  {seconds * 1e3:.1f} ms, torch imported: {torch}")
    print(f"  beside a kernel's start {seconds / start:.3f} times {start:.2f} s")


if __name__ == "__main__":
    main()
