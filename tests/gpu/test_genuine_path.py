"""torch's own C++ error path: its exception, the driver's lines, a context that is really dead."""

from __future__ import annotations

import json

import pytest
from kernels import MIME, KernelDied

from nb_assertdoc.catalogue import driver_line

PREPARE = """
import torch
table = torch.nn.Embedding(10, 4).cuda()
ids = torch.tensor([[1, 2], [3, 12]])
"""
FAIL = """
out = table(ids.cuda())
total = out * 2
print(total.sum().item())
"""
PINNED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 8), torch.arange(64) % 6)
model = torch.nn.Linear(8, 5).cuda()
"""
PINNED_LOOP = """
for x, y in DataLoader(data, batch_size=8, pin_memory=True):
    logits = model(x.cuda(non_blocking=True))
    loss = torch.nn.functional.cross_entropy(logits, y.cuda(non_blocking=True))
    print(loss.item())
"""
FREE_PINNED = "x = y = None"  # the sources of copies that a dead context can't finish


@pytest.fixture(scope="module")
def crashed(start_for_module):
    """A kernel after the crash, and the outcome of the cell that crashed; only looked at."""
    kernel = start_for_module()
    return kernel, kernel.run_cells(PREPARE, FAIL)


def test_no_cuda_call_from_the_traceback_to_the_end_of_the_cell(crashed):
    """First of all: it counts the calls up to now."""
    kernel, outcome = crashed

    assert outcome.report["finding"]["bad_values"] == [12]
    assert kernel.calls_since_traceback() == 0


def test_the_genuine_error_is_recognised_and_diagnosed(crashed):
    _, outcome = crashed

    assert outcome.error["ename"] == "AcceleratorError"
    assert outcome.status == "error"
    report = outcome.report
    crash, finding = report["crash"], report["finding"]
    assert crash["exception"].endswith("AcceleratorError")
    assert crash["error_code"] == 710
    assert "device-side assert triggered" in crash["message"]
    assert [line["kernel_file"].rsplit("/", 1)[-1] for line in crash["assert_lines"]] == [
        "Indexing.cu"
    ]
    assert crash["assert_lines"][0]["count"] >= 1
    assert crash["assert_lines"][0]["catalogue_id"] is not None
    assert crash["surface"]["source"].strip() == "print(total.sum().item())"
    assert crash["stale"] is False
    assert report["confidence"] == "certain"
    assert (finding["op"], finding["argument"]) == ("embedding", "input")
    assert (finding["bad_values"], finding["bad_count"], finding["total"]) == ([12], 1, 4)
    assert finding["positions"] == [[1, 1]]
    assert (finding["bound"]["low"], finding["bound"]["high"]) == (0, 10)
    assert finding["location"]["source"].strip() == "out = table(ids.cuda())"


def test_the_card_comes_first_and_the_report_takes_its_place(crashed):
    _, outcome = crashed

    kinds = ("error", "display_data", "update_display_data")
    shown = [m for m in outcome.messages if m["msg_type"] in kinds]
    assert shown[0]["msg_type"] == "error", "the user's traceback comes before anything of ours"
    card = shown[1]["content"]
    assert MIME not in card["data"]
    assert "restart" in card["data"]["text/plain"].lower()
    (place,) = {
        m["content"]["transient"]["display_id"] for m in shown[1:] if MIME in m["content"]["data"]
    }
    assert place == card["transient"]["display_id"]


def test_no_cuda_call_while_the_report_is_shown_saved_or_asked_for_again(crashed):
    kernel, outcome = crashed
    shown = outcome.report
    before = kernel.calls()

    for magic in ("%assertdoc", "%assertdoc report", "%assertdoc save report.json", "%cpu_replay"):
        outcome = kernel.run(magic)
        assert outcome.error is None, outcome.text
        assert kernel.calls() == before, magic
    assert json.loads((kernel.cwd / "report.json").read_text()) == shown
    assert outcome.report["finding"]["bad_values"] == [12]


def test_a_later_failure_names_the_execution_that_really_failed(start):
    kernel = start()
    kernel.run_cells(PREPARE, FAIL)
    later = kernel.run("zeros = torch.zeros(3, device='cuda')\nprint(zeros.sum().item())")

    assert later.error is not None
    crash = later.report["crash"]
    assert crash["stale"] is True
    assert crash["execution_count"] == 3
    assert crash["first_failed"]["execution_count"] == 2
    assert crash["first_failed"]["source"].strip() == FAIL.strip()
    assert later.report["finding"]["bad_values"] == [12]


def test_a_cublas_error_is_only_the_messenger(start):
    outcome = start().run_cells(
        "import torch\nx = torch.rand(4, 4, device='cuda')\nrow = torch.tensor([4])",
        "picked = x[row.cuda()]\nproduct = x @ x\nprint(product.sum().item())",
    )

    report = outcome.report
    if "CUBLAS" in outcome.error["evalue"]:
        assert report["crash"]["messenger"] == "cuBLAS"
    finding = report["finding"]
    assert (finding["op"], finding["bad_values"]) == ("index", [4])
    assert finding["bound"]["high"] == 4
    assert finding["location"]["source"].strip() == "picked = x[row.cuda()]"


def test_swallowed_by_the_user_it_is_told_at_the_end_of_the_cell(start):
    swallowed = FAIL.strip().replace("\n", "\n    ")
    outcome = start().run_cells(
        PREPARE, f"try:\n    {swallowed}\nexcept RuntimeError:\n    print('skipped')"
    )

    assert outcome.status == "ok"
    assert "skipped" in outcome.stdout
    assert outcome.report["finding"]["bad_values"] == [12]


def test_a_childs_assert_and_a_swallowed_one_beside_a_child(start):
    swallowed = FAIL.strip().replace("\n", "\n    ")
    prints = f"import subprocess, sys\nline = {driver_line('nll_target')!r}\n" + (
        "done = subprocess.run([sys.executable, '-Sc', 'import sys; sys.stderr.write(sys.argv[1])',"
        " line + chr(10)])\n"
    )
    kernel = start()
    assert kernel.run_cells(PREPARE, prints).stdout.count("program that this cell started") == 1
    assert kernel.run("print(torch.ones(3, device='cuda').sum().item())").stdout.endswith("3.0\n")
    outcome = kernel.run(f"{prints}try:\n    {swallowed}\nexcept RuntimeError:\n    pass")

    assert outcome.status == "ok"
    assert "program that this cell started" not in outcome.stdout
    assert outcome.report["finding"]["bad_values"] == [12]


def test_a_pinned_loader_takes_an_unprotected_kernel_down(start):
    """The control of the next test: what torch does by itself."""
    kernel = start(extension=False)
    assert kernel.run_cells(PINNED, PINNED_LOOP).error["ename"] == "AcceleratorError"
    with pytest.raises(KernelDied):
        kernel.run(FREE_PINNED)


def test_a_pinned_loader_no_longer_takes_the_kernel_down(start):
    kernel = start()
    outcome = kernel.run_cells(PINNED, PINNED_LOOP)

    assert outcome.error["ename"] == "AcceleratorError"
    finding = outcome.report["finding"]
    assert (finding["op"], finding["argument"]) == ("cross_entropy", "target")
    assert finding["bad_values"] == [5]
    assert (finding["bound"]["low"], finding["bound"]["high"]) == (0, 5)
    assert finding["step"]["iteration"] == 0
    assert finding["step"]["batch_rows"] == [5]
    assert finding["step"]["dataset_indices"] == [5]
    assert not [b for b in outcome.displays if "pinned allocator" in b.get("text/plain", "")]
    assert kernel.run(FREE_PINNED).error is None
    assert kernel.value("data[5][1].item()") == 5, "the kernel lives on, with its CPU data"


def test_the_users_allocator_settings_are_kept(start):
    kernel = start(env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    outcome = kernel.run_cells(
        "import torch", "settings = torch._C._accelerator_getAllocatorSettings()"
    )

    assert outcome.error is None, outcome.text
    assert sorted(kernel.value("settings").split(",")) == [
        "max_split_size_mb:64",
        "pinned_free_catch_all:True",
    ]


def test_settings_of_a_running_allocator_are_left_alone(start):
    """Changing them under a living CUDA would replace the user's: not worth it."""
    kernel = start(env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    kernel.run_cells("import torch; torch.ones(1, device='cuda')", "pass")

    assert kernel.value("torch._C._accelerator_getAllocatorSettings()") == "max_split_size_mb:64"


def test_a_healthy_notebook_gets_no_report(start):
    kernel = start()
    outcome = kernel.run_cells(PREPARE, FAIL.replace("ids", "(ids % 10)"))

    assert outcome.error is None, outcome.text
    assert outcome.displays == []
    assert kernel.run("torch.ones(2, device='cuda') @ torch.ones(3, device='cuda')").reports == []
