"""Causes that no finding can show: words for `explain` only. Key -> (title, text)."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str]] = {
    "torch_version_bug": (
        "A bug of this torch version",
        (
            "Some releases assert on valid data (an expanded target in cross-entropy's backward in "
            "1.10, index overflow in very large inputs) or pass bad data in silence. If the CPU "
            "finds every index in range, try the newest torch, .contiguous() on the target, or "
            "smaller batches."
        ),
    ),
    "compile_false_assert": (
        "The compiler's own bounds check fires on valid data",
        (
            "torch.compile puts its own assertions into generated kernels ('index out of bounds: 0 "
            "<= tmp4 < ...'). Run the step without torch.compile: if it passes, the data is fine "
            "and the compiler is not. If it fails too, it is an ordinary index error."
        ),
    ),
    "multi_gpu_device_bug": (
        "Only with several GPUs",
        (
            "Data that is right on one GPU arrives wrong on another: peer-to-peer copies (try "
            "NCCL_P2P_DISABLE=1), or .cuda() that always means GPU 0. Run on one GPU with "
            "CUDA_VISIBLE_DEVICES=0 first."
        ),
    ),
    "driver_or_hardware": (
        "The driver or the card",
        (
            "Rare. A broken GPU shows as Xid errors in the system log or as ECC errors in "
            "nvidia-smi -q, not as a device-side assert; `nb-assertdoc check` reads them where it "
            "can. If valid data fails on one card only, try another card, then another driver."
        ),
    ),
    "illegal_access": (
        "Illegal memory access",
        (
            "A kernel read or wrote outside its memory without an assertion: an unchecked index "
            "(offsets of embedding_bag, custom kernels), NaN in the input of a custom kernel, or a "
            "bug. The context is dead as after an assert. Check indices on the CPU, then use "
            "compute-sanitizer."
        ),
    ),
    "misattributed_oom": (
        "Not enough memory, reported as something else",
        (
            "cuBLAS or cuDNN could not get memory for its handle or workspace "
            "(CUBLAS_STATUS_ALLOC_FAILED, NOT_INITIALIZED). The same texts more often follow an "
            "index error: if the CPU finds every index in range, try a smaller batch."
        ),
    ),
    "stale_context": (
        "The CUDA context was dead before this cell",
        (
            "A device-side assert ends CUDA for the whole process. Every later GPU call fails with "
            "the same text, whatever it does; try/except and running a cell again cannot help. "
            "Restart the kernel, and look at the first cell that failed."
        ),
    ),
    "not_reproduced_on_cpu": (
        "The replay on the CPU found nothing",
        (
            "What the replay checked was in range. What it could not check, and what differs from "
            "the GPU run (random numbers, weights, code that only runs on the GPU), is listed in "
            "the report. Next: restart with CUDA_LAUNCH_BLOCKING=1 set before torch is used, "
            "without torch.compile, on one GPU."
        ),
    ),
}
