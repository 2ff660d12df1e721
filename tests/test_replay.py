"""The host's side of a replay: limits, deaths, interrupts, and the user's own batches."""

from __future__ import annotations

import colorsys
import contextlib
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import replays
from kernels import Kernel

import nb_assertdoc
from nb_assertdoc.errors import WorkerError

FAULT = 'torch.nn.Embedding(3, 2).to("cuda")(torch.tensor([3], device="cuda"))'


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("import os; os._exit(7)", "ended by itself with exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_a_worker_that_dies_is_told(tmp_path: Path, cell: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        replays.run(cell, tmp_path / "order")


def test_a_kernel_that_cannot_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "ipykernel_launcher.py"
    broken.write_text("raise ImportError('a broken ipykernel')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerError, match=r"did not start: .*\n?.*a broken ipykernel$"):
        replays.run("1", tmp_path / "order")


INSTALLED = """
import os, pathlib, sys, typing
sys.path.insert(0, {site!r})
import nb_assertdoc
sys.path.append(sys.path.pop(0))
sys.path.insert(0, {tests!r})
import replays
import nb_assertdoc.worker.entry
assert nb_assertdoc.worker.entry.__file__.startswith({site!r})
os.environ.update(PYTHONPATH={other!r}, IPYTHONDIR={profile!r})
cell = '''import nb_assertdoc.worker.entry as entry, pathlib, queue, colorsys
raise OSError(f"{{entry}} {{pathlib}} {{queue}} {{colorsys}}")'''
print(replays.run(cell, pathlib.Path({order!r})).error.message)
"""


def test_the_worker_is_of_the_very_package_that_the_host_has(tmp_path: Path) -> None:
    """Not of one on PYTHONPATH, in the notebook's folder or loaded by the configuration; and files
    beside the package that are named as Python's own modules stand in nobody's way."""
    package = Path(nb_assertdoc.__file__).parent
    site, other, home = (tmp_path / name for name in ("site", "other", "order/home"))
    shutil.copytree(package, site / "nb_assertdoc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pathlib", "typing", "queue", "colorsys", "ipykernel_launcher"):
        (site / f"{name}.py").write_text("raise ImportError('a backport')")
    for folder in (other, home):
        (folder / "nb_assertdoc").mkdir(parents=True)
        (folder / "nb_assertdoc/__init__.py").write_text(
            f"def load_ipython_extension(shell): open({str(folder / 'loaded')!r}, 'w')"
        )
    profile = tmp_path / "ipython/profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.json").write_text(
        '{"InteractiveShellApp": {"extensions": ["nb_assertdoc"]}}'
    )
    script = INSTALLED.format(
        site=str(site),
        tests=str(Path(__file__).parent),
        other=str(other),
        profile=str(profile.parent),
        order=str(home.parent),
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"'{site}/nb_assertdoc/worker/entry.py'" in done.stdout, done.stderr
    assert f"'{pathlib.__file__}'" in done.stdout
    assert f"'{queue.__file__}'" in done.stdout
    assert f"'{colorsys.__file__}'" in done.stdout  # nobody has imported it before the cell
    assert (other / "loaded").exists(), "the configuration had loaded another one"


@pytest.mark.parametrize(
    "cell",
    [
        "while True: pass",
        "import ctypes; ctypes.CDLL(None).pause()",
        "while True:\n    try:\n        while True: pass\n    except KeyboardInterrupt: pass",
        "try:\n    while True: pass\nexcept KeyboardInterrupt: pass",
    ],
)
def test_a_cell_that_never_ends_is_stopped(tmp_path: Path, cell: str) -> None:
    evidence = replays.run(cell, tmp_path / "order", seconds=1.0)
    assert evidence.outcome == "stopped"
    assert "the replay's time was up" in evidence.differences


def test_memory_is_limited(tmp_path: Path) -> None:
    cell = "held = []\nwhile True: held.append(bytearray(10_000_000))"
    evidence = replays.run(cell, tmp_path / "order", memory_bytes=900_000_000)
    assert evidence.outcome == "stopped"
    assert "the replay needed more than 0.9 GB of memory" in evidence.differences


def test_output_goes_nowhere(tmp_path: Path) -> None:
    cell = """
        import os, sys
        from IPython.display import HTML, display
        for _ in range(100):
            print("x" * 1_000_000)
            sys.stderr.write("y" * 1_000_000)
            os.write(1, b"z" * 1_000_000)
            display(HTML("h" * 1_000_000))
    """
    host = psutil.Process()
    before = host.memory_info().rss
    evidence = replays.run(cell, tmp_path / "order")
    assert evidence.outcome == "clean"
    assert host.memory_info().rss - before < 50_000_000
    assert (tmp_path / "order" / "kernel.log").stat().st_size < 1_000_000


def test_magics_commands_and_await(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    cell = textwrap.dedent(
        f"""\
        %matplotlib inline
        %config InlineBackend.figure_format = "retina"
        !touch {harm}
        %pip install nothing
        import asyncio, os, torch
        os.system("touch {harm}")
        await asyncio.sleep(0)
        {FAULT}"""
    )
    evidence = replays.run(cell, tmp_path / "order")
    (observed,) = evidence.observed
    assert (observed.finding.location.line, observed.finding.location.source) == (8, FAULT)
    assert not harm.exists()
    said = "\n".join(evidence.differences)
    assert f"touch {harm}" in said and "pip install nothing" in said


def test_input_has_no_answer(tmp_path: Path) -> None:
    evidence = replays.run("name = input('?')", tmp_path / "order")
    assert evidence.outcome == "other_error"
    assert "the cell asks for input(): a replay has no one to answer" in evidence.differences


# ---- interrupts and the host's death

HANGS = {
    "a loop": "while True: pass",
    "a call of C": "import ctypes; ctypes.CDLL(None).pause()",
    "one that catches": "while True:\n    try:\n        while True: pass\n"
    "    except KeyboardInterrupt: pass",
}


def workers(of: int) -> list[psutil.Process]:
    """The kernels that a process has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(of).children(recursive=True)
    return []


@pytest.mark.parametrize(
    ("moment", "hang"),
    [("saving", "a loop"), ("loading", "a loop"), *(("replaying", hang) for hang in HANGS)],
)
def test_an_interrupt_stops_the_replay(
    start_kernel: Callable[..., Kernel], moment: str, hang: str
) -> None:
    kernel = start_kernel(simulated_gpu=True, extension=True)
    pid = kernel.value("__import__('os').getpid()")
    again = textwrap.indent(HANGS[hang], "    ")
    cell = f"import torch\nif not torch.cuda.is_initialized():\n{again}\n{FAULT}.sum().item()"
    asked: list[str] = []

    def interrupt(message: dict[str, Any]) -> None:
        text = str(message["content"].get("data", {}).get("text/plain", ""))
        if moment in text and not asked:
            asked.append(text)
            kernel.interrupt()

    kernel.run("import torch; torch.ones(1, device='cuda')")
    outcome = kernel.run(cell, on_message=interrupt)
    assert asked
    assert outcome.status == "error"
    assert outcome.reply["ename"] == "AcceleratorError"
    assert outcome.report["confidence"] == "not_found"
    assert "interrupted" in outcome.report["headline"]
    assert workers(pid) == []


HOST = """
import sys
sys.path.insert(0, {tests!r})
import replays
from pathlib import Path
cell = "import os; open({mark!r}, 'w').write(str(os.getpid()))\\nwhile True: pass"
replays.run(cell, Path({folder!r}))
"""


def test_a_worker_dies_with_its_host(tmp_path: Path) -> None:
    mark = tmp_path / "order" / "running"
    os.mkfifo(_parent(mark))
    host = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOST.format(tests=str(Path(__file__).parent), mark=str(mark), folder=str(mark.parent)),
        ]
    )
    worker = psutil.Process(int(mark.read_text()))  # waits until the cell runs
    host.send_signal(signal.SIGKILL)
    host.wait()
    worker.wait(timeout=20)


def _parent(path: Path) -> Path:
    path.parent.mkdir()
    return path


def test_no_temporary_folder(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run("import torch, tempfile; tempfile.tempdir = '/nowhere'")
    outcome = kernel.run(f"{FAULT}.sum().item()")
    assert outcome.reply["ename"] == "AcceleratorError"
    assert "cannot use its temporary folder" in outcome.report["headline"]


INFERENCE = {  # calls that no autograd takes apart: what they look up, and the bad value
    "F.cross_entropy(out(x), y)": ("cross_entropy", [6]),
    "F.cross_entropy(out(x), y, ignore_index=0, label_smoothing=0.1)": ("cross_entropy", [6]),
    "F.cross_entropy(torch.zeros(2, 6, 3, 3).cuda(), masks)": ("cross_entropy", [9]),
    "F.nll_loss(out(x), y)": ("nll_loss", [6]),
    "bags(y[None])": ("embedding_bag", [6]),
    "table(y)": ("embedding", [6]),
    "x[y]": ("index", [6]),
    "x.gather(1, y[:, None])": ("gather", [6]),
    "F.one_hot(y, 5)": ("one_hot", [6]),
    "F.multi_margin_loss(x, y)": ("multi_margin_loss", [6]),
    "F.ctc_loss(logs, y[None, :2], torch.tensor([9]), torch.tensor([2]))": ("ctc_loss", [6]),
    "torch.multinomial(torch.tensor([0.5, -1.0]).cuda(), 1)": ("multinomial", [-1]),
}


@pytest.mark.parametrize("real", [False, True])
def test_calls_in_inference_mode_are_checked(tmp_path: Path, real: bool) -> None:
    found = {}
    lines = list(INFERENCE)
    for part in (lines[:6], lines[6:]):  # of one replay, some 8 are kept
        evidence = replays.run(
            "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
            "out, x = nn.Linear(4, 6).cuda(), torch.zeros(3, 4).cuda()\n"
            "y, masks = torch.tensor([1, 6, 0]).cuda(), torch.full((2, 3, 3), 9).cuda()\n"
            "bags, table = nn.EmbeddingBag(5, 3).cuda(), nn.Embedding(5, 3).cuda()\n"
            "logs = torch.zeros(9, 1, 4).cuda().log_softmax(-1)\n"
            "with torch.inference_mode():\n" + "".join(f"    {line}\n" for line in part),
            tmp_path / "order",
            engine="cpu" if real else "ghost",
            real_floats=real,
        )
        for seen in evidence.observed:
            finding = seen.finding
            found[finding.location.source.strip()] = (finding.op, list(finding.bad_values))
    assert found == INFERENCE


def test_the_kernels_own_loop_does_not_run_meanwhile(start_kernel: Callable[..., Kernel]) -> None:
    """What waits in it would run nested in the cell, and can take the kernel down."""
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run(
        "import asyncio\nticks = []\nasync def tick():\n    while True:\n"
        "        ticks.append(1)\n        await asyncio.sleep(0.01)\n"
        "task = asyncio.ensure_future(tick())"
    )
    asked = kernel.run(
        "before = len(ticks)\nget_ipython().run_cell_magic('cpu_replay', '', 'n = 1')\n"
        "after = len(ticks)"
    )
    assert asked.report["confidence"] == "clean"
    assert kernel.value("0 < before == after") is True
    assert kernel.value("len(ticks) > after") is True
    kernel.run("task.cancel()")
