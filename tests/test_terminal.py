"""IPython in a terminal, without a kernel: a real pty, the simulated GPU, what a person reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

LOAD = ("%load_ext nb_assertdoc.simulated_gpu", "%load_ext nb_assertdoc")
CRASH = (
    "import torch; emb = torch.nn.Embedding(4, 2).cuda()",
    "ids = torch.tensor([1, 7])",
    "print(emb(ids.cuda()).sum().item())",
)
ERROR = "CUDA error: device-side assert triggered"
CARD = "CUDA device-side assert in In [{}]: an index or value is out of its valid range."
PLAIN = ("--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor")


class Terminal:
    """IPython on a pty. `run` types a line and returns what was printed until the next prompt."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.count = 1
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", *PLAIN],
            env=environment(folder, **environ),
            cwd=str(folder),
            encoding="utf-8",
            timeout=120,
            dimensions=(50, 200),
        )
        self._prompt()

    def _prompt(self) -> str:
        self.process.expect_exact(f"In [{self.count}]: ")
        return (self.process.before or "").replace("\r\n", "\n")

    def run(self, *lines: str) -> str:
        """Type cells of one line each; what the last one printed."""
        said = ""
        for line in lines:
            self.process.sendline(line)
            self.count += 1
            said = self._prompt().partition("\n")[2]
        return said

    def close(self) -> int:
        self.process.sendline("exit")
        self.process.expect(pexpect.EOF)
        self.process.close()
        status: int = self.process.exitstatus
        return status


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Ours, with a fresh IPython folder; replays are given time, as the machine is slow."""
    here = {"IPYTHONDIR": str(folder / "ipython"), "NB_ASSERTDOC_REPLAY_SECONDS": "90"}
    inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return {**inherited, **here, "TERM": "dumb", "TMPDIR": str(folder), **more}


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A session with both extensions that shows the card and replays nothing by itself."""
    started = Terminal(tmp_path, NB_ASSERTDOC_REPLAY="False")
    assert started.run(*LOAD) == "\n"
    yield started
    if started.process.isalive():
        assert started.close() == 0


def test_crash_report_status_and_a_later_cell(tmp_path):
    terminal = Terminal(tmp_path)
    terminal.run(*LOAD, "%xmode Minimal")

    said = terminal.run(*CRASH)
    at = terminal.count - 1
    assert said.index(ERROR) < said.index(CARD.format(at)) < said.index("WHERE   ")
    assert "Embedding.forward" not in said.partition(CARD.format(at))[0], "Minimal stays minimal"
    for fact in (
        "exit and start",
        "Ctrl-C stops this replay.",
        "Index 7 does not exist: `emb` has rows 0..3.",
        f"WHERE   In [{at}], line 1",
        "valid 0 <= index < 4     found 7     1 of 2 bad, first at [1]",
        "CERTAIN",
    ):
        assert fact in said
    assert "menu" not in said

    status = terminal.run("%assertdoc")
    assert f"GPU state is dead since In [{at}]" in status
    assert "Restart: exit and start ipython again." in status
    assert "Index 7 does not exist" in terminal.run("%assertdoc report")
    assert "no restart from inside is possible; exit and start ipython again" in terminal.run(
        "%assertdoc restart"
    )
    stale = terminal.run("print(torch.zeros(1, device='cuda').item())")
    assert f"is innocent: this kernel's GPU has been dead since In [{at}]" in stale
    assert terminal.run("1 + 1") == f"Out[{terminal.count - 1}]: 2\n\n"
    assert terminal.close() == 0


def handler(shows: bool) -> str:
    """What sets a handler of the user's own, that shows the traceback or keeps it to itself."""
    show = "self.showtraceback((kind, error, tb), tb_offset=tb_offset)" if shows else "None"
    body = f"[print('MINE ' + kind.__name__), {show}][1]"
    function = f"lambda self, kind, error, tb, tb_offset=None: {body}"
    return f"get_ipython().set_custom_exc((Exception,), {function})"


def test_a_crash_before_the_load(terminal):
    terminal.run("%unload_ext nb_assertdoc", "%xmode Verbose", handler(shows=True))
    said = terminal.run(*CRASH)
    assert said.index("MINE AcceleratorError") < said.index(ERROR)
    assert "emb = Embedding(4, 2)" in said, "Verbose stays verbose"
    at = terminal.count - 1
    assert f"In [{at}] died of a CUDA device-side assert" in terminal.run("%load_ext nb_assertdoc")
    assert f"GPU state is dead since In [{at}]" in terminal.run("%assertdoc")


def test_the_users_own_handlers_of_exceptions(terminal):
    terminal.run(handler(shows=False), *CRASH[:-1])
    hook = "import sys; sys.excepthook = lambda *error: print('HOOK'); "
    said = terminal.run(hook + CRASH[-1])
    assert said.index("MINE AcceleratorError") < said.index(CARD.format(terminal.count - 1))
    assert said.count("an index or value is out of its valid range") == 1
    assert ERROR not in said, "the handler did not show it"
    assert "dead since" in terminal.run("%assertdoc")
    assert "MINE ZeroDivisionError" in terminal.run("1 / 0")


@pytest.mark.parametrize("name", ["crash.py", "crash.ipy"])
def test_run_of_a_file(terminal, tmp_path, name):
    terminal.process.sendline("print('be' + 'gun'); import time; time.sleep(600)")
    terminal.process.expect_exact("begun")
    terminal.process.sendintr()
    terminal.count += 1
    assert "KeyboardInterrupt" in terminal._prompt()

    lines = (*CRASH, "%precision 3") if name.endswith("ipy") else CRASH
    (tmp_path / name).write_text("\n".join(lines))
    said = terminal.run(f"%run {name}")
    assert said.index(ERROR) < said.index(CARD.format(terminal.count - 1))
    assert f"dead since In [{terminal.count - 1}]" in terminal.run("%assertdoc")
    assert terminal.run("1 + 1") == f"Out[{terminal.count - 1}]: 2\n\n"


@pytest.mark.parametrize("how", ["-c", "file"])
def test_one_run_without_prompts(tmp_path, how):
    code = "\n".join((*LOAD, *CRASH, "print('never' + ' reached')"))
    (tmp_path / "all.ipy").write_text(code)
    words = ["-c", code] if how == "-c" else ["all.ipy"]
    done = subprocess.run(
        [sys.executable, "-m", "IPython", *PLAIN[1:], *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path, NB_ASSERTDOC_REPLAY="False"),
        stdin=subprocess.DEVNULL,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert ERROR in said
    assert CARD.partition("In [")[0] in said
    assert "never reached" not in said
