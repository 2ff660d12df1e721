"""How a dead CUDA context shows on the host: the texts of exceptions and logs."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Surface:
    """One way in which the news reaches Python.

    `messenger` is None where the text itself says that an assert failed; otherwise it names who
    brought the news, which may also have another reason.
    """

    messenger: str | None
    pattern: str  # a regular expression; compiled at first use, which is no earlier than an error
    code: int | None  # of cudaError_t
    meaning: str


_LATER = (
    "It is often only the first library call after a kernel's assert: look for the driver's assert"
    " lines above it. "
)
_SICK = "NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR"

# In the order in which they are tried: a text that names the assert is never a mere messenger.
SURFACES = (
    Surface(
        None,
        r"device-side assert triggered|cudaErrorAssert\b|hipErrorAssert\b|CUDA_ERROR_ASSERT\b",
        710,
        "A check inside a GPU kernel failed, nearly always an index (a label, a token id, a row)"
        " out of range. The line that raised is only where Python waited for the GPU. The GPU state"
        " of this process is dead: restart the kernel. The GPU itself is fine.",
    ),
    Surface(
        "illegal memory access",
        r"an illegal memory access was encountered"
        r"|cudaErrorIllegalAddress\b|CUDA_ERROR_ILLEGAL_ADDRESS\b",
        700,
        "A kernel read or wrote outside its memory: an unchecked index (embedding_bag offsets, a"
        " backward pass, a custom kernel), or a bug of a library. The process must be restarted. A"
        " replay on the CPU can still name a bad index.",
    ),
    Surface(
        "unspecified launch failure",
        r"unspecified launch failure|cudaErrorLaunchFailure\b|CUDA_ERROR_LAUNCH_FAILED\b",
        719,
        "A kernel was stopped. On ROCm this is how an assert shows; on CUDA it is usually another"
        " fault of a kernel, sometimes of the driver or the card. The process must be restarted.",
    ),
    Surface(
        "misaligned address",
        r"misaligned address\b|cudaErrorMisalignedAddress\b",
        716,
        "A kernel used an address that is no multiple of the element size: a bug of a kernel, or"
        " memory that was overwritten. It is not an assert. The process must be restarted.",
    ),
    Surface(
        "hardware exception",
        r"an illegal instruction was encountered|hardware stack error"
        r"|HSA_STATUS_ERROR_EXCEPTION|invalid program counter",
        None,
        "The GPU stopped a kernel. On ROCm an assert can look like this; on CUDA it is a bug of a"
        " kernel or a fault of the machine. The process must be restarted.",
    ),
    Surface(
        "cuBLAS",
        rf"(?:CU|HIP)BLAS_STATUS_(?:{_SICK})\b",
        None,
        "A matrix product could not start. " + _LATER + "Without such lines: no GPU memory left"
        " (NOT_INITIALIZED, ALLOC_FAILED), or a driver that does not fit.",
    ),
    Surface(
        "cuDNN",
        rf"CUDNN_STATUS_(?:{_SICK})|miopenStatus(?:Unknown|Internal)Error",
        None,
        "A cuDNN call failed. " + _LATER + "Without such lines: a cuDNN that does not fit the GPU,"
        " or no GPU memory left.",
    ),
    Surface(
        "cuSOLVER",
        rf"CUSOLVER_STATUS_(?:{_SICK})\b",
        None,
        "A linear-algebra call failed. " + _LATER,
    ),
    Surface(
        "cuSPARSE",
        rf"CUSPARSE_STATUS_(?:{_SICK})\b",
        None,
        "A sparse call failed. " + _LATER,
    ),
    Surface(
        "cuFFT",
        r"CUFFT_(?:INTERNAL_ERROR|EXEC_FAILED|SETUP_FAILED|ALLOC_FAILED)\b",
        None,
        "A Fourier transform failed. " + _LATER,
    ),
    Surface(
        "NCCL",
        r"unhandled cuda error|ncclUnhandledCudaError\b|NCCL WARN Cuda failure",
        None,
        "The exchange between GPUs found a CUDA error of this rank. " + _LATER + "Other ranks then"
        " wait or time out: the first rank that failed owns the bug.",
    ),
    Surface(
        "Thrust",
        r"failed to synchronize",
        None,
        "A library waited for the GPU and was told of an earlier error. " + _LATER,
    ),
)

# Errors of CUDA that leave the context alive, or that are what they say.
NOT_OURS = (
    r"CUDA out of memory|HIP out of memory|(?:CUDA|HIP) error: (?:out of memory|invalid|no kernel"
    r" image|too many resources|peer access|initialization error|driver shutting down)"
)


# "failed to synchronize", "misaligned address": other programs have such errors, too.
_OF_A_GPU = r"(?i)cuda|cublas|cudnn|cusolver|cusparse|cufft|nccl|\bhip|hsa_|miopen|rocm"


def surface_of(text: str, asked: bool = False) -> tuple[Surface, re.Match[str]] | None:
    """How `text` tells of a dead context, with the match; None when it does not.

    A messenger's text must name the GPU's software, unless `asked`: a user says that it is its.
    """
    for surface in SURFACES:
        match = re.search(surface.pattern, text)
        if match is None:
            continue
        of_gpu = asked or re.search(_OF_A_GPU, text)
        if surface.messenger is None or (of_gpu and not re.search(NOT_OURS, text)):
            return surface, match
    return None


def surface_of_code(code: int) -> Surface | None:
    """The same by the number of a `cudaError_t`."""
    return next((surface for surface in SURFACES if surface.code == code), None)
