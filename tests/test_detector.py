"""Recognising a dead context in errors and texts, and the copy of fd 2."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import ROOT, Kernel

from nb_assertdoc.catalogue import driver_line
from nb_assertdoc.detector import StderrTap, recognise, recognise_text


class AcceleratorError(RuntimeError):
    """As torch's: a RuntimeError that C++ gives an `error_code`."""

    def __init__(self, message: str, error_code: int | None = None) -> None:
        super().__init__(message)
        if error_code is not None:
            self.error_code = error_code


class OutOfMemoryError(RuntimeError):
    pass


ASSERT = "CUDA error: device-side assert triggered"
HINTS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace"
    " below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
LINE = driver_line("nll_target")

ASSERT_TEXTS = [
    ASSERT,
    f"{ASSERT}\n{HINTS}Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
    f"{ASSERT}\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/ for more"
    f" information.\n{HINTS}",
    f"{ASSERT}\n{HINTS}The CUDA driver logged these messages, which may provide useful details:\n"
    "Returning 719 (CUDA_ERROR_LAUNCH_FAILED) from cuCtxSynchronize_v2\n",
    f"{ASSERT}\nCUDA kernel errors might be asynchronously reported at some other API call,so the"
    " stacktrace below might be incorrect.",
    "cuda runtime error (59) : device-side assert triggered at /pytorch/aten/src/THC/THC.cu:265",
    "cuda runtime error (710) : device-side assert triggered at ../aten/src/THC/THC.cu:77",
    "Triton Error [CUDA]: device-side assert triggered",
    "transform: failed to synchronize: cudaErrorAssert: device-side assert triggered",
    "copy_if failed to synchronize: device-side assert triggered",
    "HIP error: device-side assert triggered\nCompile with `TORCH_USE_HIP_DSA` to enable",
    "NCCL error in: /pytorch/ProcessGroupNCCL.cpp:1275, unhandled cuda error, NCCL version 2.14\n"
    "NCCL WARN Cuda failure 710 'device-side assert triggered'",
]
MESSENGERS = [
    ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cuBLAS"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuBLAS"),
    ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, )`", "cuBLAS"),
    ("CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasGemmEx()`", "cuBLAS"),
    ("cuDNN error: CUDNN_STATUS_MAPPING_ERROR", "cuDNN"),
    ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART", "cuDNN"),
    ("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate`", "cuSOLVER"),
    ("CUDA error: CUSPARSE_STATUS_EXECUTION_FAILED when calling `cusparseSpMM()`", "cuSPARSE"),
    ("cuFFT error: CUFFT_EXEC_FAILED", "cuFFT"),
    ("NCCL error in: ProcessGroupNCCL.cpp:2, unhandled cuda error (run with NCCL_DEBUG=INFO)\n"
     "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n", "NCCL"),
    ("CUDA error: an illegal memory access was encountered\n" + HINTS, "illegal memory access"),
    ("CUDA error: unspecified launch failure\n" + HINTS, "unspecified launch failure"),
    ("HIP error: unspecified launch failure", "unspecified launch failure"),
    ("CUDA error: misaligned address", "misaligned address"),
    ("CUDA error: an illegal instruction was encountered", "hardware exception"),
    ("parallel_for: failed to synchronize: cudaErrorLaunchFailure", "unspecified launch failure"),
    ("for_each: failed to synchronize: cudaErrorECCUncorrectable: uncorrectable ECC", "Thrust"),
]  # fmt: skip
NOT_OURS = [
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity)",
    "CUDA error: out of memory\n" + HINTS,
    "CUDA error: invalid device ordinal\n" + HINTS,
    "CUDA error: invalid argument",
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: too many resources requested for launch",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu",
    "CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`",
    "index 7 is out of bounds for dimension 0 with size 5",
    "Target 10 is out of bounds.",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "",
]


@pytest.mark.parametrize("kind", [RuntimeError, AcceleratorError])
@pytest.mark.parametrize("text", ASSERT_TEXTS)
def test_texts_of_an_assert(text: str, kind: type[RuntimeError]) -> None:
    error = kind(text)
    seen = recognise(error)
    assert seen is not None
    assert (seen.error, seen.exception, seen.message) == (error, kind.__name__, text)
    assert (seen.certain, seen.messenger, seen.assert_lines) == (True, None, ())


@pytest.mark.parametrize(("text", "messenger"), MESSENGERS)
def test_messengers_are_certain_only_with_assert_lines(text: str, messenger: str) -> None:
    alone = recognise(RuntimeError(text))
    assert alone is not None
    assert (alone.messenger, alone.certain) == (messenger, False)
    with_lines = recognise(RuntimeError(text), LINE + "\n" + LINE)
    assert with_lines is not None
    assert (with_lines.messenger, with_lines.certain) == (messenger, True)
    assert [(one.catalogue_id, one.count) for one in with_lines.assert_lines] == [("nll_target", 2)]


@pytest.mark.parametrize("kind", [RuntimeError, OutOfMemoryError, IndexError, ValueError])
@pytest.mark.parametrize("text", NOT_OURS)
def test_other_errors_leave_no_trace(text: str, kind: type[Exception]) -> None:
    assert recognise(kind(text)) is None
    assert recognise(kind(text), "Epoch 1: 3%\nsome warning") is None
    assert recognise_text(f"{kind.__name__}: {text}") is None


def test_no_error_at_all() -> None:
    assert recognise(None) is None
    assert recognise(KeyboardInterrupt()) is None
    assert recognise(RuntimeError(("a tuple", object()))) is None


def test_the_code_counts_where_the_text_is_silent() -> None:
    seen = recognise(AcceleratorError("the device is unhappy", 710))
    assert seen is not None
    assert (seen.certain, seen.error_code, seen.messenger) == (True, 710, None)
    seen = recognise(AcceleratorError("the device is unhappy", 700))
    assert seen is not None
    assert (seen.certain, seen.messenger) == (False, "illegal memory access")
    assert recognise(AcceleratorError("the device is unhappy", 2)) is None

    class HttpError(OSError):
        error_code = 710

    assert recognise(HttpError("a server's own number")) is None


def test_a_swallowed_error_is_seen_by_its_lines() -> None:
    for error in (None, ValueError("later")):
        seen = recognise(error, f"noise\n[rank3]: {LINE}\n")
        assert seen is not None
        assert (seen.error, seen.exception, seen.certain, seen.rank) == (None, "", True, 3)
        assert seen.assert_lines[0].catalogue_id == "nll_target"


def chained(*errors: BaseException, how: str) -> BaseException:
    """The last of `errors`, each raised while (or from) the one before."""
    for before, after in pairwise(errors):
        after.__context__ = before
        if how == "cause":
            after.__cause__ = before
        elif how == "suppressed":
            after.__suppress_context__ = True
    return errors[-1]


@pytest.mark.parametrize("how", ["cause", "context", "suppressed"])
def test_the_first_cuda_error_of_the_chain(how: str) -> None:
    first = AcceleratorError(ASSERT, 710)
    error = chained(
        ValueError("a"),
        first,
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
        AcceleratorError(ASSERT + "\nsecond", 710),
        ValueError("outer"),
        how=how,
    )
    seen = recognise(error)
    assert seen is not None
    assert seen.error is first
    assert seen.error_code == 710


def test_a_messenger_before_the_assert_is_first_and_certain() -> None:
    first = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`")
    seen = recognise(chained(first, AcceleratorError(ASSERT), how="context"))
    assert seen is not None
    assert (seen.error, seen.messenger, seen.certain) == (first, "cuBLAS", True)


def test_cycles_and_long_chains_end() -> None:
    one, two = ValueError("one"), AcceleratorError(ASSERT)
    one.__context__, two.__context__ = two, one
    seen = recognise(one)
    assert seen is not None
    assert seen.error is two
    long = chained(
        AcceleratorError(ASSERT), *(ValueError(str(n)) for n in range(5000)), how="cause"
    )
    assert recognise(long) is not None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_groups() -> None:
    inner = AcceleratorError(ASSERT)
    group = ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [inner, KeyError("y")])])  # noqa: F821
    seen = recognise(chained(group, ValueError("outer"), how="cause"))
    assert seen is not None
    assert seen.error is inner


def traceback_of(kind: str, message: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/lib/python3.11/site-packages/torch/x.py", line 9, in step\n'
        f"    raise RuntimeError('{ASSERT}')\n"
        f"{kind}: {message}\n"
    )


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("Caught AcceleratorError in replica 1 on device 1.\nOriginal ", None),
        ("Caught RuntimeError in DataLoader worker process 0.\nOriginal ", None),
        ("\n\n-- Process 2 terminated with the following error:\n", 2),
    ],
)
def test_errors_that_carry_a_traceback_of_elsewhere(text: str, rank: int | None) -> None:
    seen = recognise(
        AcceleratorError(text + traceback_of("torch.AcceleratorError", f"{ASSERT}\n{HINTS}"))
    )
    assert seen is not None
    assert seen.exception == "AcceleratorError"
    assert seen.message == f"{ASSERT}\n{HINTS}".strip()
    assert (seen.certain, seen.rank) == (True, rank)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_child_process_that_failed(as_text: bool) -> None:
    script = f"import sys; sys.stderr.write({LINE!r} + chr(10) + {ASSERT!r}); sys.exit(1)"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        subprocess.run(
            [sys.executable, "-c", script], check=True, stderr=subprocess.PIPE, text=as_text
        )
    seen = recognise(failed.value)
    assert seen is not None
    assert seen.certain


def test_the_text_of_tensors_is_never_asked_for() -> None:
    class Dead:
        def __repr__(self) -> str:
            raise AssertionError("this would touch the GPU")

        __str__ = __repr__

    assert recognise(ValueError("bad", Dead())) is None
    assert recognise(chained(AcceleratorError(ASSERT), ValueError(Dead()), how="cause")) is not None


@pytest.mark.parametrize(
    ("text", "exception", "message", "rank"),
    [
        (traceback_of("torch.AcceleratorError", ASSERT), "AcceleratorError", ASSERT, None),
        (traceback_of("RuntimeError", ASSERT) + "\nDuring handling of ...\n\n"
         + traceback_of("ValueError", "gave up"), "RuntimeError", ASSERT, None),
        (f"\x1b[31mAcceleratorError\x1b[39m: {ASSERT}\n{HINTS}", "AcceleratorError",
         f"{ASSERT}\n{HINTS}".strip(), None),
        ("[rank0]: RuntimeError: Connection closed\n"
         f"[rank1]: torch.AcceleratorError: {ASSERT}\n[rank1]: more", "AcceleratorError",
         f"{ASSERT}\n[rank1]: more", 1),
        (f"[PG 1 Rank 5] Process group watchdog thread terminated with exception: {ASSERT}\n",
         "", None, 5),
        (f"terminate called after throwing an instance of 'c10::Error'\n  what():  {ASSERT}\n",
         "c10::Error", ASSERT, None),
        (f"Exception in thread Thread-3:\n{traceback_of('RuntimeError', ASSERT)}", "RuntimeError",
         ASSERT, None),
    ],
)  # fmt: skip
def test_texts_of_children_and_notebooks(
    text: str, exception: str, message: str | None, rank: int | None
) -> None:
    seen = recognise_text(f"Epoch 1\n{text}")
    assert seen is not None
    assert (seen.exception, seen.error, seen.rank) == (exception, None, rank)
    assert seen.certain
    if message is not None:
        assert seen.message == message


def test_a_text_with_a_messenger_and_lines() -> None:
    text = traceback_of("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED").replace(
        ASSERT, "x"
    )
    alone = recognise_text(text)
    assert alone is not None
    assert (alone.messenger, alone.certain) == ("cuDNN", False)
    with_lines = recognise_text(LINE + "\n" + text)
    assert with_lines is not None
    assert (with_lines.messenger, with_lines.certain) == ("cuDNN", True)
    only_lines = recognise_text(LINE)
    assert only_lines is not None
    assert (only_lines.exception, only_lines.certain) == ("", True)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from([ASSERT, LINE[:90], LINE, "\n"]))))
def test_any_text_is_answered(parts: list[str]) -> None:
    text = "".join(parts)
    seen = recognise_text(text)
    assert seen is None or seen.certain
    assert (recognise(RuntimeError(text)) is None) == (
        seen is None or (ASSERT not in text and not seen.message)
    )


# ---- fd 2

TAP = f"""
import ctypes, os, subprocess, sys
from nb_assertdoc.detector import StderrTap
tap = StderrTap()
C = ctypes.CDLL(None)
LINE = {LINE!r}
def burst(count=300):
    for n in range(count):
        C.dprintf(2, b"%s", (LINE + "\\n").encode())
"""


def test_the_tap_in_a_kernel(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel(env={"PYTHONPATH": str(ROOT)})
    assert kernel.run(TAP + "before = sys.stderr.write; tap.install(); tap.install()").error is None
    # IPython 9 has put the old `write` back now; `ensure` is what the extension calls
    ensure = "get_ipython().events.register('pre_run_cell', lambda *info: tap.ensure())"
    assert kernel.run(ensure).error is None
    outcome = kernel.run(
        "m = tap.mark(); _ = os.write(2, b'by os.write\\n'); burst()\nlines = tap.since(m, 10)"
    )
    assert outcome.error is None
    lines = kernel.value("lines")
    assert lines.startswith("by os.write\n")
    assert "Assertion `" in lines
    # the whole burst arrives, in the cell as well as in the copy
    assert kernel.value("tap.since(m)").count(LINE) == 300
    kernel.run("m = tap.mark(); subprocess.run(['sh', '-c', 'echo child: Assertion x >&2'])")
    assert kernel.value("tap.since(m, 10)") == "child: Assertion x\n"
    # what Python itself writes, of a log for instance, is not the driver's
    kernel.run("m = tap.mark(); print('py Assertion y', file=sys.stderr)")
    assert kernel.value("tap.since(m, 0.2)") == ""
    # forked children write through the stream without our lock
    assert kernel.run(
        "import multiprocessing as mp\n"
        "p = mp.get_context('fork').Process(target=lambda: print('child', file=sys.stderr))\n"
        "p.start(); p.join(20); code = p.exitcode"
    ).error is None  # fmt: skip
    assert kernel.value("code") == 0
    kernel.run("tap.uninstall(); m = tap.mark(); _ = os.write(2, b'unseen Assertion\\n')")
    after = kernel.run("_ = os.write(2, b'shown\\n'); print(repr(tap.since(m, 0.2)))")
    assert after.stdout.strip() == "''"


def test_the_tap_survives_its_own_uninstall_under_another_wrapper() -> None:
    class Stream:
        watch_fd_thread = threading.current_thread()  # what others write is Python's own
        text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

    stream = Stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        tap = StderrTap()
        tap.install()
        ours = stream.write
        stream.write = lambda text: ours(text)  # as IPython 9 does while a cell runs
        mark = tap.mark()
        stream.write("a")
        tap.ensure()
        stream.write("b")
        assert tap.since(mark) == "ab"
        tap.uninstall()
        stream.write("c")
        assert (stream.text, tap.since(mark)) == ("abc", "ab")


def test_only_the_last_megabyte_is_kept() -> None:
    tap = StderrTap()
    for number in range(3000):
        tap._keep(f"{number:04}" + "x" * 996)
    text = tap.since(0)
    assert 1 << 20 <= len(text) < (1 << 20) + 1000
    assert text.startswith("1951")
    assert text[-1000:-996] == "2999"
    assert tap.mark() == 3_000_000
    assert tap.since(2_999_990) == "x" * 10


def run_script(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TAP + code],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def test_the_tap_in_a_plain_process(tmp_path: Path) -> None:
    done = run_script(
        """
tap.install(); tap.install()
m = tap.mark()
os.write(2, b"raw \\xff byte\\n")
burst()
seen = tap.since(m)                       # at once, without waiting
assert seen.startswith("raw \\ufffd byte\\n"), seen[:50]
assert seen.count(LINE) == 300, seen.count(LINE)
m = tap.mark()
subprocess.run(["sh", "-c", "echo child >&2"])
assert tap.since(m) == "child\\n", tap.since(m)
if os.fork() == 0:
    assert tap.since(0, 0.01) is not None; tap.uninstall()
    os.write(2, b"forked\\n"); os._exit(0)
os.wait()
assert tap.since(m) == "child\\nforked\\n", tap.since(m)
tap.uninstall()
m = tap.mark()
os.write(2, b"after\\n")
assert tap.since(m, 0.05) == ""
tap.install()
print("last words", file=sys.stderr)
C.dprintf(2, b"the very last\\n")
""",
        tmp_path,
    )
    before, _, rest = done.stderr.partition(LINE)
    assert before == "raw \ufffd byte\n"
    assert rest.count(LINE) == 299
    assert done.stderr.endswith("child\nforked\nafter\nlast words\nthe very last\n")


def test_a_process_that_leaves_a_child_behind_ends(tmp_path: Path) -> None:
    """The child holds the pipe: neither the exit of the parent nor its own text may wait for it."""
    done = run_script(
        """
tap.install()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("bye", file=sys.stderr)
tap.uninstall()
child.stdin.close(); child.wait()
""",
        tmp_path,
    )
    assert "bye" in done.stderr


def test_the_tap_without_an_fd_2(tmp_path: Path) -> None:
    done = run_script("os.close(2); tap.install(); tap.ensure(); print(tap.since(0))", tmp_path)
    assert done.stdout == "\n"


def test_a_kernel_that_does_not_capture_fd_2(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel(env={"PYTHONPATH": str(ROOT), "PYTEST_CURRENT_TEST": "x"})
    assert kernel.run(TAP + "tap.install()").error is None
    kernel.run("m = tap.mark(); burst(3)")
    assert kernel.value("tap.since(m)") == (LINE + "\n") * 3
    assert kernel.run("tap.uninstall(); import os; os.fstat(2)").error is None


def test_a_terminal_stays_one_for_python(tmp_path: Path) -> None:
    """Colours and progress bars look for a terminal; the driver's lines do not."""
    master, slave = pty.openpty()
    code = TAP + (
        "tap.install(); m = tap.mark(); C.dprintf(2, b'%s', LINE.encode())\n"
        "print(sys.stderr.isatty(), tap.since(m) == LINE); tap.uninstall()\n"
        "print(sys.stderr is sys.__stderr__, os.isatty(2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(slave)
    assert done.stdout == "True True\nTrue True\n"
    assert os.read(master, 4096).decode() == LINE
    os.close(master)
