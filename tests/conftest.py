"""Fixtures shared by all tests. Kernels are real: see kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from kernels import Kernel


@pytest.fixture
def start_kernel() -> Iterator[Callable[..., Kernel]]:
    """Starts kernels (the arguments of `Kernel`) that end with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Kernel(**options))


@pytest.fixture
def gpu_kernel() -> Iterator[Kernel]:
    """A notebook on the simulated GPU with nb_assertdoc loaded. A dead context can't be shared."""
    with Kernel(simulated_gpu=True, extension=True) as kernel:
        yield kernel


@pytest.fixture(scope="session")
def cpu_kernel() -> Iterator[Kernel]:
    """A notebook without a GPU, nb_assertdoc loaded, shared: leave its shell as you found it."""
    with Kernel(extension=True) as kernel:
        yield kernel
