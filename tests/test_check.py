"""`nb-assertdoc check`: what it says of a machine, from given inputs and on this very machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kernels import ROOT

from nb_assertdoc import model, report
from nb_assertdoc.cli import check, main
from nb_assertdoc.cli.readers import GraphicsCard, Kernel, Readers

BUILD = "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Oct  6 22:04:56 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
QUIET = "[    1.0] nvidia: loading out-of-tree module taints kernel.\n"
VERSIONS = {
    "torch": "2.14.1",
    "ipython": "9.18.1",
    "ipykernel": "7.4.0",
    "ipywidgets": "8.1.9",
    "jupyter_client": "8.10.0",
    "nbclient": "0.11.0",
    "nvidia-cudnn-cu13": "9.20.0",
    "nvidia-nccl-cu13": "2.28.9",
}
A100 = GraphicsCard("NVIDIA A100-SXM4-40GB", "580.95.05", 0, 0)


def unreadable(reason: str) -> Callable[..., Any]:
    def read(*_: str) -> Any:
        raise OSError(reason)

    return read


def machine(
    *,
    cards: tuple[GraphicsCard, ...] | None = (A100,),
    smi: str | None = None,
    proc: str | None = None,
    dmesg: str | None = QUIET,
    journal: str | None = None,
    logs: dict[str, str] | None = None,
    versions: dict[str, str] | None = None,
    build: str = BUILD,
    **readers: Any,
) -> tuple[check.Item, ...]:
    """What is said of a machine; None stands for what cannot be read there."""
    files = {**({"/proc/driver/nvidia/version": proc} if proc else {}), **(logs or {})}
    programs = {"nvidia-smi": smi, "dmesg": dmesg, "journalctl": journal}
    refusals = {"dmesg": "dmesg: read kernel buffer failed: Operation not permitted"}

    def file(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return files[path]

    def command(name: str, *_: str) -> str:
        answer = programs[name]
        if answer is None:
            raise OSError(refusals.get(name, f"{name} is not here"))
        return answer

    given: dict[str, Any] = {
        "python": "3.12.1",
        "system": "Linux-6.1",
        "installed": (VERSIONS if versions is None else versions).get,
        "torch_build": lambda: build,
        "file": file,
        "command": command,
        "cards": unreadable("NVML: not found") if cards is None else lambda: cards,
        "kernel": lambda: Kernel(1.25, True, True, True),
        "folder_mode": lambda: 0o700,
        "autoload": lambda: ([], []),
        "environ": {},
    }
    return check.check(Readers(**(given | readers)))


def says(items: tuple[check.Item, ...], section: str) -> str:
    return "\n".join(item.text for item in items if item.section == section)


def marked(items: tuple[check.Item, ...]) -> str:
    return "\n".join(item.text for item in check.suspicious(items))


def test_a_healthy_machine() -> None:
    items = machine()
    assert check.suspicious(items) == []
    text = check.text(items)
    for fact in (
        "Python 3.12.1",
        "torch 2.14.1, built for CUDA 13.0, cuDNN 9.20.0, NCCL 2.28.9",
        "NVIDIA driver 580.95.05",
        "1 x NVIDIA A100-SXM4-40GB (read by NVML)",
        "no report of asserts on valid data",
        "no Xid error in dmesg",
        "uncorrected memory errors 0 since the driver started, 0 ever",
        "a fresh kernel answers in 1.2 s",
        "nothing speaks against this machine",
        "nearly always an index out of range",
    ):
        assert fact in " ".join(text.split())
    assert "(!)" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_driver_of_which_bad_things_were_reported() -> None:
    items = machine(cards=None, proc=DRIVER.format("545.23.08"), build="cuda = '12.4'")
    assert "NVIDIA driver 545.23.08" in says(items, "GPU")
    assert "545; 535 ended them" in marked(items)
    assert "DeepSeek-MoE/issues/4" in marked(items)
    text = check.text(items)
    assert "(!) asserts on valid data" in text
    assert "1 thing to look at" in text
    assert check.suspicious(machine(cards=None, proc=DRIVER.format("535.154.05"), build="")) == []


def test_the_driver_of_open_kernel_modules_is_read() -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
    assert "NVIDIA driver 570.124.06" in says(machine(cards=None, proc=line, build=""), "GPU")


@pytest.mark.parametrize(
    ("driver", "cuda", "old"),
    [
        ("575.57.08", "13.0", True),
        ("580.65.06", "13.0", False),
        ("470.82.01", "12.8", True),
        ("525.60.13", "12.8", False),
        ("470.82.01", "11.8", False),
        ("999.1", "14.0", False),
    ],
)
def test_a_driver_too_old_for_this_torch(driver: str, cuda: str, old: bool) -> None:
    card = GraphicsCard("Tesla T4", driver, 0, 0)
    items = machine(cards=(card,), build=f"cuda: Optional[str] = '{cuda}'\n")
    assert ("is older than" in marked(items)) is old
    assert bool(check.suspicious(items)) is old


@pytest.mark.parametrize(
    ("torch", "told"), [("1.8.1+cu111", "torch 1.8"), ("1.10.0", "expand()"), ("1.18.0", "")]
)
def test_torch_versions_with_reports(torch: str, told: str) -> None:
    items = machine(versions=VERSIONS | {"torch": torch})
    assert told in marked(items)
    assert bool(check.suspicious(items)) is bool(told)


def test_several_cards_are_no_fault_but_have_a_way_to_look() -> None:
    two = (A100, A100)
    items = machine(cards=two)
    assert "2 x NVIDIA A100" in says(items, "GPU")
    assert "NCCL_P2P_DISABLE=1" in says(items, "REPORTS")
    assert check.suspicious(items) == []
    already = machine(cards=two, environ={"NCCL_P2P_DISABLE": "1"})
    assert "NCCL_P2P_DISABLE" not in says(already, "REPORTS")


XIDS = """\
[  10.1] NVRM: Xid (PCI:0000:06:00): 31, pid=1896, name=python, Ch 00000008, intr 00000000
[  11.1] NVRM: Xid (PCI:0000:06:00): 31, pid=1896, name=python, Ch 00000008, intr 00000000
[  12.1] NVRM: Xid (PCI:0000:10:1c): 79, pid='<unknown>', GPU has fallen off the bus.
[  13.1] NVRM: Xid (0000:01:00): 777, something new
[  14.1] python[25440]: segfault at 0 ip 00007f6f55b85ad8
"""


def test_xid_lines_of_the_card_and_of_programs_are_told_apart() -> None:
    items = machine(dmesg=XIDS)
    assert says(items, "XID").splitlines() == [
        "Xid 31 of 0000:06:00, 2 times in dmesg: an access outside memory, mostly of the program",
        "Xid 79 of 0000:10:1c, once in dmesg: the card fell off the bus",
        "Xid 777 of 0000:01:00, once in dmesg: see docs.nvidia.com/deploy/xid-errors",
    ]
    assert [item.text[:7] for item in check.suspicious(items)] == ["Xid 79 ", "Xid 777"]


def test_where_the_kernels_log_is_read() -> None:
    assert "in journalctl" in says(machine(dmesg=None, journal=XIDS), "XID")
    assert "in journalctl" in says(machine(dmesg=" \n", journal=XIDS), "XID")
    log = {"/var/log/syslog": XIDS}
    assert "in /var/log/syslog" in says(machine(dmesg=None, logs=log), "XID")


def test_an_unreadable_log_is_said_and_is_no_suspicion() -> None:
    items = machine(dmesg=None)
    told = says(items, "XID")
    assert "cannot be read here: dmesg: read kernel buffer failed: Operation not permitted" in told
    assert "journalctl is not here" in told
    assert "/var/log/kern.log: No such file or directory" in told
    assert "sudo dmesg" in told
    assert check.suspicious(items) == []


def test_memory_errors_of_a_card() -> None:
    cards = (
        A100,
        GraphicsCard("NVIDIA H100", "580.95.05", 2, 5),
        GraphicsCard("GeForce", "580.95.05", None, None),
    )
    items = machine(cards=cards)
    assert marked(items) == (
        "card 1 (NVIDIA H100): uncorrected memory errors 2 since the driver started, 5 ever"
    )
    assert "card 2 (GeForce) does not count memory errors" in says(items, "ECC")


def test_nvidia_smi_where_nvml_is_missing() -> None:
    rows = "NVIDIA A10G, 550.54.15, 0, 3\nNVIDIA GeForce RTX 3090, 550.54.15, [N/A], [N/A]\n"
    items = machine(cards=None, smi=rows, build="cuda = '12.4'")
    assert "(read by nvidia-smi)" in says(items, "GPU")
    assert "driver 550.54.15" in says(items, "GPU")
    assert marked(items) == (
        "card 0 (NVIDIA A10G): uncorrected memory errors 0 since the driver started, 3 ever"
    )
    assert "card 1 (NVIDIA GeForce RTX 3090) does not count" in says(items, "ECC")


@pytest.mark.parametrize(
    ("smi", "reason"),
    [
        (None, "nvidia-smi is not here"),
        ("Unable to determine the device handle", "nvidia-smi: Unable to determine"),
        ("", "nvidia-smi lists no card"),
    ],
)
def test_a_machine_without_a_readable_card(smi: str | None, reason: str) -> None:
    items = machine(cards=None, smi=smi)
    assert "no NVIDIA driver was found" in says(items, "GPU")
    assert f"NVML: not found; {reason}" in says(items, "ECC")
    assert check.suspicious(items) == []


def test_what_nb_assertdoc_would_lack() -> None:
    items = machine(
        versions=VERSIONS | {"ipykernel": "5.5.6"},
        folder_mode=unreadable("Read-only file system"),
        kernel=unreadable("the replay's kernel did not start"),
        environ={"NB_ASSERTDOC": "off", "COLAB_GPU": "1"},
    )
    hooks = says(items, "HOOKS")
    assert "ipykernel 5.5.6 is older than 6.17: nb_assertdoc needs ipykernel>=6.17" in hooks
    assert "not writable (Read-only file system); set TMPDIR" in hooks
    assert "no replay: the replay's kernel did not start" in hooks
    assert "switched off" in hooks
    assert "Colab" in says(items, "HERE")
    assert check.suspicious(items) == [], "this says nothing of the hardware"

    bare = machine(versions={}, kernel=lambda: Kernel(2.0, True, False, False))
    assert "torch is not installed" in says(bare, "VERSIONS")
    assert "ipywidgets is not installed" in says(bare, "HOOKS")
    assert "errors and cells are seen: no" in says(bare, "HOOKS")
    assert "(fd 2) are seen: no" in says(bare, "HOOKS")


def test_the_oldest_versions_are_those_of_the_package() -> None:
    packaging = (ROOT / "pyproject.toml").read_text()
    floors = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)",', packaging, re.MULTILINE))
    assert {name: floors[name] for name in check.FLOORS} == check.FLOORS


def test_a_report_without_a_finding_points_to_the_check() -> None:
    place = model.Place(line=1, source="loss.item()", execution_count=3)
    environment = model.Environment(python="3.12", ipython="9", platform="Linux")
    words = "device-side assert triggered"
    crash = model.Crash(exception="E", message=words, surface=place, execution_count=3)
    lost = model.Report(confidence="not_found", headline="?", environment=environment, crash=crash)
    finding = model.Finding(
        op="embedding",
        aten_op="aten::embedding",
        argument="input",
        bad_values=(9,),
        distinct_bad=1,
        bad_count=1,
        total=1,
        positions=((0,),),
        bound=model.Bound(low=0, high=9),
        margin=1.0,
        location=place,
    )
    found = msgspec.structs.replace(lost, finding=finding, confidence="certain")
    asked = "Is it my hardware? {}nb-assertdoc check{} in a terminal"
    assert asked.format("`", "`") in " ".join(report.text(lost).split())
    assert asked.format("<code>", "</code>") in " ".join(report.html(lost).split())
    for shown in (report.text, report.html):
        assert "my hardware" not in shown(found)

    messenger = report.Card(3, "", messenger="cuBLAS")
    assert "`nb-assertdoc check`" in report.card_text(messenger)
    assert "nb-assertdoc check" not in report.card_text(report.Card(3, "", "cuBLAS", lines=5))
    assert "nb-assertdoc check" not in report.card_text(report.Card(3, ""))


def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for items, code in ((machine(), 0), (machine(dmesg=XIDS), 1)):
        monkeypatch.setattr(check, "check", lambda items=items: items)
        assert main(["check"]) == code
        assert capsys.readouterr().out == check.text(items) + "\n"


def test_this_machine_without_torch_or_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # it changes how a kernel shows fd 2
    code = (
        "import sys; from nb_assertdoc.cli import main; code = main(['check']); "
        "print(code in (0, 1), sorted({'torch', 'numpy', 'ipywidgets'} & set(sys.modules))); "
        "maps = open('/proc/self/maps').read(); print('libcuda' in maps)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *told, modules, cuda = done.stdout.splitlines()
    assert modules == "True []"
    assert cuda == "False"
    assert max(map(len, told)) <= 100
    text = " ".join(" ".join(told).split())
    for section in ("VERSIONS", "GPU", "REPORTS", "XID", "ECC", "HOOKS", "HERE", "ANSWER"):
        assert section in text
    assert "errors and cells are seen: yes" in text
    assert "the driver's lines (fd 2) are seen: yes" in text
    assert "temporary folder: writable, private" in text
    assert re.search(r"a fresh kernel answers in \d+\.\d s", text)
