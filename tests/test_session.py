"""The last report outlives its kernel, in a folder that only its user can read."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
from kernels import Kernel

from nb_assertdoc import model, session

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
    (folder,) = home.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_leads_elsewhere_is_refused(home: Path) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    (home / f"nb_assertdoc-{os.getuid()}").symlink_to(elsewhere)
    session.save(REPORT, "kernel-1")  # says nothing: a report that is not kept is no failure
    assert list(elsewhere.iterdir()) == []
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        session.folder()


def test_old_reports_are_removed_and_new_ones_stay(home: Path) -> None:
    session.save(REPORT, "old")
    old = session.folder() / "old.report.json"
    past = time.time() - session.KEPT_SECONDS - 1
    os.utime(old, (past, past))
    session.save(REPORT, "new")
    assert session.load("old") is None
    assert session.load("new") is not None


def test_what_is_no_report_is_no_answer(home: Path) -> None:
    (session.folder() / "broken.report.json").write_text("{")
    assert session.load("broken") is None


def test_report_is_shown_again_after_the_restart(tmp_path: Path) -> None:
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


def test_restart_with_launch_blocking_reaches_the_next_kernel() -> None:
    with Kernel(extension=True) as kernel:
        kernel.run("from nb_assertdoc import session")
        kernel.run("session.ask_launch_blocking(session.key(get_ipython()))")
        kernel.restart()
        said = kernel.run("%load_ext nb_assertdoc")
        assert "CUDA_LAUNCH_BLOCKING=1" in said.stdout
        assert kernel.value("__import__('os').environ['CUDA_LAUNCH_BLOCKING']") == "1"
