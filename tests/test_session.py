"""What outlives a kernel lies in a room that only its user can read, is found again, and goes."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernels import PATIENT, Kernel

from nb_assertdoc import model, session
from nb_assertdoc.errors import StorageError
from nb_assertdoc.settings import settings

REPORT = model.Report(
    confidence="certain",
    headline="Label 3 does not exist.",
    environment=model.Environment(python="3.11", ipython="9", platform="Linux"),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_is_kept_comes_back_with_its_age(home: Path) -> None:
    session.save(REPORT, "kernel-1")
    found = session.load("kernel-1")
    assert found is not None
    report, age = found
    assert report == REPORT
    assert 0 <= age < 60
    assert session.load("kernel-2") is None


def test_only_the_user_can_read_it(home: Path) -> None:
    session.save(REPORT, "kernel-1")
    session.ask_launch_blocking("kernel-1")
    session.leave_signs("kernel-1")
    (folder,) = home.iterdir()
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*")) if p.is_dir()}
    assert modes == {0o700}
    modes = {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    assert modes == {0o600}


def test_a_folder_that_leads_elsewhere_is_refused(home: Path) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    (home / f"nb_assertdoc-{os.getuid()}").symlink_to(elsewhere)
    session.save(REPORT, "kernel-1")  # says nothing: a report that is not kept is no failure
    assert list(elsewhere.iterdir()) == []
    with pytest.raises(StorageError, match="belongs to somebody else"):
        session.folder()


def fill(name: str, count: int, days: float = 0.0) -> None:
    """A room whose newest file is so many days old."""
    room = session.room(name)
    (room / "variables").mkdir()
    (room / "variables" / "buffers.bin").write_bytes(bytes(count))
    past = time.time() - days * 24 * 3600
    for path in (room / "variables" / "buffers.bin", room / "variables", room):
        os.utime(path, (past, past))


def rooms() -> set[str]:
    return {path.name for path in session.folder().iterdir() if path.is_dir()}


def test_rooms_go_after_the_days_that_are_promised(home: Path) -> None:
    fill("old", 10, days=settings().keep_days + 0.1)
    fill("new", 10, days=settings().keep_days - 0.1)
    session.tidy(own="mine")
    assert rooms() == {"new"}


def test_the_oldest_rooms_go_above_the_size_that_is_promised(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings(), "keep_total_bytes", 250_000)
    for days, name in enumerate(("third", "second", "first", "mine")):
        fill(name, 100_000, days=days / 10)
    session.tidy(own="mine")  # the oldest of all, and spared
    assert rooms() == {"mine", "third"}


LIVING = """
import sys
from nb_assertdoc import session
session.room("living")
session.leave_signs("living")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_room_of_a_living_kernel_is_neither_offered_nor_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("living", 100_000, days=1)
    environ = {**os.environ, "TMPDIR": str(home), "JPY_SESSION_NAME": "study.ipynb"}
    monkeypatch.setenv("JPY_SESSION_NAME", "study.ipynb")
    monkeypatch.setattr(settings(), "keep_total_bytes", 0)
    command = [sys.executable, "-c", LIVING]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        session.tidy()
        assert rooms() == {"living"}
        assert session.last_key() == session.key()
        process.kill()
    assert session.last_key() == "living"
    session.tidy()
    assert rooms() == set()


def test_a_new_kernel_id_finds_the_room_by_the_notebook(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "study.ipynb")
    fill("kernel-1", 10)
    session.leave_signs("kernel-1")
    assert session.last_key() == "kernel-1"

    monkeypatch.chdir(home)  # another folder, the same notebook
    assert session.last_key() == "kernel-1"

    monkeypatch.setenv("JPY_SESSION_NAME", "other.ipynb")
    assert session.last_key() == session.key()


CRASH = """
import torch
labels = [1]
def pick(i):
    return torch.zeros(3).cuda()[torch.tensor([i]).cuda()]
pick(5).cpu()"""


def test_another_kernel_in_the_folder_is_named_and_never_taken_for_this_one(home: Path) -> None:
    env, choice = {"TMPDIR": str(home)}, {**PATIENT, "replay": False}
    setup = "__vsc_ipynb_file__ = '/home/me/study.ipynb'"
    here: dict[str, Any] = {"simulated_gpu": True, "cwd": home, "env": env, "settings": choice}
    with Kernel(extension=True, setup=setup, **here) as crashed:
        assert crashed.run(CRASH).error is not None
        room = crashed.folder.name
    session.save(REPORT, room)
    with Kernel(**here) as kernel:  # the front end tells no notebook's name
        said = kernel.run("%load_ext nb_assertdoc").stdout
        assert "2 variables wait from another kernel in this folder (In [1] of study.ipynb" in said
        assert "%assertdoc restore --from-folder" in said
        assert "there is no report yet" in kernel.run("%assertdoc report").stdout
        assert "no failing replay is stored" in kernel.run("%assertdoc verify").stdout
        assert "Stored" not in kernel.run("%assertdoc").stdout
        assert "nothing is stored" in kernel.run("%assertdoc restore").stdout
        assert kernel.value("'labels' in globals()") is False
        kernel.run("%assertdoc forget")  # its own, not the other's

        said = kernel.run("%assertdoc restore --from-folder").stdout
        assert "given back    labels, pick" in said
        the_code_that_came_back_has_its_lines(kernel)

        kernel.run("from nb_assertdoc import session")
        assert kernel.value("session.nearby_key(get_ipython())") == room
        kernel.run("__vsc_ipynb_file__ = '/home/me/other.ipynb'")
        assert kernel.value("session.nearby_key(get_ipython())") is None
        kernel.run("%assertdoc forget --all")
        said = kernel.run("%assertdoc restore --from-folder").stdout
        assert "no other kernel that has ended left variables in this folder" in said


def the_code_that_came_back_has_its_lines(kernel: Kernel) -> None:
    line = "    return torch.zeros(3).cuda()[torch.tensor([i]).cuda()]"
    assert line in kernel.value("__import__('inspect').getsource(pick)")
    failed = kernel.run("pick('no')").text
    assert "Could not get source" not in failed
    assert "torch.tensor([i])" in re.sub(r"\x1b\[[0-9;]*m", "", failed)
    place = kernel.run("%%cpu_replay\npick(7)").report["finding"]["location"]
    assert (place["source"], place["function"].partition("(")[0]) == (line, "pick")


def test_the_own_kernel_id_comes_first(home: Path) -> None:
    fill("kernel-1", 10)
    session.leave_signs("kernel-1")
    fill(session.key(), 10)
    assert session.last_key() == session.key()


def test_forgetting_one_and_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "study.ipynb")
    for name in ("one", "two"):
        fill(name, 1000)
        session.leave_signs(name)
    assert session.forget("one") > 1000
    assert rooms() == {"two"}
    assert session.last_key() == "two"  # whose signs are the newer ones
    session.forget(None)
    assert list(session.folder().iterdir()) == []


def test_what_is_no_report_is_no_answer(home: Path) -> None:
    (session.room("broken") / "report.json").write_text("{")
    assert session.load("broken") is None


def test_report_is_shown_again_after_the_restart() -> None:
    crash = (
        "import torch\n"
        "labels = torch.tensor([1, 2, 3]).cuda()\n"
        "loss = torch.nn.functional.cross_entropy(torch.randn(3, 3).cuda(), labels)\n"
        "loss.item()"
    )
    with Kernel(extension=True, simulated_gpu=True) as kernel:
        first = kernel.run(crash)
        assert first.report is not None
        kernel.restart()
        kernel.run("%load_ext nb_assertdoc", store_history=False)
        again = kernel.run("%assertdoc report")
        assert again.report == first.report
        assert "From before the restart" in again.text


def test_next_kernel_is_told_once(home: Path) -> None:
    assert not session.launch_blocking_asked("kernel-1")
    session.ask_launch_blocking("kernel-1")
    assert not session.launch_blocking_asked("kernel-2")
    assert session.launch_blocking_asked("kernel-1")
    assert not session.launch_blocking_asked("kernel-1")


def test_a_crash_has_a_room_of_its_own_and_none_is_no_failure(home: Path) -> None:
    notebook = SimpleNamespace(user_ns={"__vsc_ipynb_file__": "/home/me/study.ipynb"})
    session.room("old")
    session.leave_signs("old", notebook)
    for sign in home.rglob("at-*"):
        sign.write_text(sign.read_text().replace(str(os.getpid()), "999999999"))  # it has ended
    options = {"keep": False, "replay": False}
    setup = f"__vsc_ipynb_file__ = {notebook.user_ns['__vsc_ipynb_file__']!r}"
    flow = "get_ipython()._nb_assertdoc.flow"
    with Kernel(
        simulated_gpu=True,
        extension=True,
        settings=options,
        setup=setup,
        env={"TMPDIR": str(home)},
    ) as kernel:
        assert kernel.value(f"{flow}.last_room()") == "old"
        kernel.run("import torch\ntorch.ones(3, device='cuda')[[5]].cpu()")
        assert kernel.value(f"{flow}.last_room()") == kernel.folder.name
        shutil.rmtree(session.folder())
        (home / f"nb_assertdoc-{os.getuid()}").write_text("a file")
        for words in ("", "verify", "forget", "restart --launch-blocking"):
            outcome = kernel.run(f"%assertdoc {words}")
            assert outcome.error is None
            assert "nb_assertdoc: nothing can be stored: " in outcome.stdout


def test_restart_with_launch_blocking_reaches_the_next_kernel() -> None:
    with Kernel(extension=True) as kernel:
        kernel.run("from nb_assertdoc import session")
        kernel.run("session.ask_launch_blocking(session.key(get_ipython()))")
        kernel.restart()
        said = kernel.run("%load_ext nb_assertdoc")
        assert "CUDA_LAUNCH_BLOCKING=1" in said.stdout
        assert kernel.value("__import__('os').environ['CUDA_LAUNCH_BLOCKING']") == "1"
