"""The tests of this folder need a CUDA device: a real one, or the fake runtime of tests/fakecuda.

With FAKECUDA_BUILD set (the folder that tests/fakecuda/build.sh made) they run on the fake one, and
then count the CUDA calls that are made after the context has died.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kernels import Kernel, Outcome

FAKE = bool(os.environ.get("FAKECUDA_BUILD"))
FAKECUDA = Path(__file__).resolve().parent.parent / "fakecuda"

# Calls made before the user's own traceback is shown are the user's and torch's; what comes after
# is ours. This wrap sits inside the extension's, which is loaded later.
WATCH = """
import fakecuda
def _watch(shell=get_ipython(), calls=fakecuda.calls_after_death):
    show = shell._showtraceback
    def shown(*args, **kwargs):
        show(*args, **kwargs)
        shell.calls_when_shown = calls()
    shell._showtraceback = shown
_watch(); del _watch, fakecuda
"""


class CudaKernel(Kernel):
    """A kernel with a CUDA device; on the fake runtime it counts calls on a dead context."""

    def __init__(self, *, env: dict[str, str] | None = None, extension: bool = True) -> None:
        if not FAKE:
            super().__init__(extension=extension, env=env)
            return
        path = os.pathsep.join(filter(None, [str(FAKECUDA), os.environ.get("PYTHONPATH", "")]))
        super().__init__(extension=extension, setup=WATCH, env={"PYTHONPATH": path, **(env or {})})

    def calls(self) -> int:
        """CUDA calls since the kernel asserted; skips the test on a real GPU, which can't tell."""
        if not FAKE:
            pytest.skip("a real GPU does not count its calls; tests/fakecuda does")
        return int(self.value("__import__('fakecuda').calls_after_death()"))

    def calls_since_traceback(self) -> int:
        return self.calls() - int(self.value("get_ipython().calls_when_shown"))

    def run_cells(self, *codes: str) -> Outcome:
        """Run all cells; only the last may fail. Returns its outcome."""
        for code in codes[:-1]:
            outcome = self.run(code)
            assert outcome.error is None, outcome.text
        return self.run(codes[-1])


def pytest_sessionstart() -> None:
    if FAKE:
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "tests/gpu needs a CUDA device: run it on a GPU, or build tests/fakecuda and set "
            "FAKECUDA_BUILD (see CONTRIBUTING.md)"
        )


def _starter() -> Iterator[Callable[..., CudaKernel]]:
    """Starts kernels (the arguments of `CudaKernel`), and ends them with the fixture."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(CudaKernel(**options))


start = pytest.fixture(_starter, name="start")
start_for_module = pytest.fixture(_starter, name="start_for_module", scope="module")
