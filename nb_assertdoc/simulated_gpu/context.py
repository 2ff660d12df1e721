"""The life and death of the simulated CUDA context.

After an assert the context is *doomed*: the host does not know. A call that waits for the device,
or the launch that finds the queue full, discovers it, and from then on it is *dead*: every CUDA
call fails.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

QUEUE = 60  # launches that a doomed context still accepts

_ASSERT = "CUDA error: device-side assert triggered\n"
_SEARCH = (
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\n"
)
_ASYNC = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
_DSA = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
_CODES = {
    "device-side assert triggered": 710,
    "an illegal memory access was encountered": 700,
    "unspecified launch failure": 719,
}


def blocking() -> bool:
    """Whether each launch waits for its end."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"


def assert_text() -> str:
    """What torch says of an assert."""
    return _ASSERT + _SEARCH + ("" if blocking() else _ASYNC) + _DSA


def error(text: str) -> RuntimeError:
    """The exception that torch raises with this text: its class, and its `error_code`."""
    code = next((code for words, code in _CODES.items() if words in text), None)
    if code is None or not text.startswith("CUDA error:"):
        return RuntimeError(text)
    accelerator_error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    raised = accelerator_error(text)
    if accelerator_error is not RuntimeError:
        raised.error_code = code  # type: ignore[attr-defined]
    return raised


class Context:
    """State of the one simulated context. Every method is one CUDA call of the host."""

    def __init__(self) -> None:
        self.dead = False
        self.calls = 0  # CUDA calls made since it is dead
        self._text = ""
        self._lines: list[str] = []
        self._room: int | None = None  # launches that the queue still takes; None: not doomed
        self._fail_after: int | None = None
        self._cublas = False  # whether a matrix product has run

    @property
    def doomed(self) -> bool:
        """An assert has happened; the host may not know it yet."""
        return self.dead or self._room is not None

    def doom(self, lines: Sequence[str], text: str | None = None) -> None:
        """A kernel that was launched just now has failed; `lines` are the driver's."""
        if not self.doomed:
            self._text, self._lines, self._room = text or assert_text(), list(lines), QUEUE
            if blocking():
                self.wait()

    def fail_after(self, launches: int, text: str | None) -> None:
        """Let the launch fail that comes after `launches` more."""
        self._fail_after, self._text = launches, text or assert_text()

    def touch(self) -> None:
        """A call that a dead context still answers."""
        self.calls += self.dead

    def call(self) -> None:
        """A call that a dead context refuses, and that notices nothing before."""
        if self.dead:
            self.calls += 1
            raise error(self._text)

    def launch(self, matrix_product: bool = False) -> None:
        """A kernel is launched."""
        if matrix_product and self.doomed and not self._cublas:
            self.calls += self.dead
            self._die()
            raise RuntimeError(CUBLAS)
        self._cublas |= matrix_product
        self.call()
        if self._fail_after is not None:
            self._fail_after -= 1
            if self._fail_after < 0:
                self._die()
                raise error(self._text)
        if self._room is not None:
            self._room -= 1
            if self._room < 0:
                self.wait()

    def wait(self) -> None:
        """The host waits for the device."""
        self.call()
        if self.doomed:
            self._die()
            raise error(self._text)

    def _die(self) -> None:
        self.dead, self._room, self._fail_after = True, None, None
        if self._lines:
            os.write(2, "".join(line + "\n" for line in self._lines).encode())
            self._lines = []
