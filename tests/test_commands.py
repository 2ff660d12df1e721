"""A program that a cell starts with `!` and that dies of an assert: not this kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from kernels import Kernel

from nb_assertdoc import commands

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


NAMES = "command, name, n, where = 'echo hello', 'notebook', 3, {'a': 'here'}"
EXPANDED = {
    "!{command}": "hello",
    "!echo $name {n + 1} $n": "notebook 4 3",
    "!echo $$name-$n": "-3",  # `$$` is one for the command's own shell
    "!echo {where['a']} '$name' {{n}}": "here $name {n}",
    "!echo {missing} $n": "{missing}",
    "!echo $n; exit 3": "3",
    "print(_exit_code)": "3",
    "def f(name):\n    !echo got $name {name * 2} {n}\nf('ab')": "got ab abab 3",
    "def g(n):\n    def inner(x):\n        !echo $x {n}\n    inner(n + 1)\ng(7)": "8 3",
    "def h(n):\n    get_ipython().system('echo $n')\nh(8)": "8",
    "class C:\n    n = 9\n    !echo $n": "9",
    "x = !echo $name {n * 2}\nprint(x)": "['notebook 6']",
    "def k(n):\n    x = !echo $n\n    return x\nprint(k(5))": "['5']",
    "!!echo $name": "['notebook']",
    "%sx echo {n}": "['3']",
    "%%bash\necho {name} $name.": "{name} .",
    "%alias say echo said %s\n%say $name": "said notebook",
    "print('var_expand' in vars(get_ipython()))": "False",
}


def test_commands_see_the_names_that_they_see_without_us() -> None:
    def said(kernel: Kernel) -> dict[str, str]:
        outcomes = {cell: kernel.run(cell) for cell in (NAMES, *EXPANDED)}
        assert [each.text for each in outcomes.values() if each.error] == []
        return {cell: outcome.text.strip() for cell, outcome in outcomes.items()}

    with Kernel() as kernel:
        plain = said(kernel)
        kernel.run("%load_ext nb_assertdoc")
        with_it = said(kernel)
    assert with_it == plain
    assert {
        cell: text for cell, text in with_it.items() if EXPANDED.get(cell, "") not in text
    } == {}


def test_names_where_the_shell_has_a_system_of_its_own() -> None:
    """As Colab's: one call more between the cell and the expansion, and an argument more."""

    def run(shell: Any, command: str, also_return_output: bool = False) -> tuple[str, bool]:
        return shell.var_expand(command, depth=2), also_return_output

    class Shell:
        user_ns = {"n": 1}  # noqa: RUF012
        var_expand = InteractiveShell.var_expand

        def system(self, *args: Any, **kwargs: Any) -> Any:
            return run(self, *args, **kwargs)

    shell: Any = Shell()
    undo = commands.watch(shell)
    n = 2
    assert shell.system("echo $n", also_return_output=True) == (f"echo {n}", True)
    with pytest.raises(TypeError):
        shell.system()
    assert set(vars(shell)) == {"system"}
    undo()
    assert vars(shell) == {}


def test_a_command_in_a_thread_leaves_the_output_of_others_alone(tmp_path: Path) -> None:
    """`sys.stdout` belongs to all threads: it is exchanged for none but the main one's command."""
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    with Kernel(extension=True, cwd=tmp_path) as kernel:
        outcome = kernel.run(
            "import sys, threading\nplain, ip = sys.stdout, get_ipython()\n"
            "call = lambda: ip.system('echo > begun; cat go')\n"
            "thread = threading.Thread(target=call)\nthread.start()\n_ = open('begun').read()\n"
            "print(sys.stdout is plain)\nopen('go', 'w').close()\nthread.join()"
        )
        assert outcome.error is None
        assert outcome.stdout == "True\n"
