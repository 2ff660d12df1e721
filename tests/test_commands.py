"""A program that a cell starts with `!` and that dies of an assert: not this kernel."""

from __future__ import annotations

from kernels import Kernel

LINE = (
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: "
    "block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed."
)
PROGRAM = f"""
import sys
print("epoch 0")
print({LINE!r}, file=sys.stderr)
raise RuntimeError("CUDA error: device-side assert triggered")
"""


def test_program_of_a_cell_is_not_the_kernel() -> None:
    with Kernel(extension=True, simulated_gpu=True) as kernel:
        kernel.run(f"open('train.py', 'w').write({PROGRAM!r})")
        said = kernel.run("import sys\n!{sys.executable} train.py")
        assert said.status == "ok"
        assert "epoch 0" in said.stdout  # the program's own output is handed on
        assert "the program that this cell started died" in said.stdout
        assert "needs no restart" in said.stdout
        assert "cross_entropy" in said.stdout  # the explanation of its assert line
        assert not said.reports
        after = kernel.run("import torch\nprint(torch.ones(2, device='cuda').sum().item())")
        assert after.stdout.strip().endswith("2.0")
        assert "dead" not in kernel.run("%assertdoc").stdout


def test_other_failures_and_unloading_leave_no_trace() -> None:
    with Kernel(extension=True) as kernel:
        said = kernel.run("!python -c 'raise SystemExit(3)'; echo CUDA; exit 3")
        assert "nb_assertdoc" not in said.stdout
        kernel.run("%unload_ext nb_assertdoc")
        assert kernel.value("'nb_assertdoc' in str(get_ipython().system)") is False
