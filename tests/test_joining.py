"""A cell that loads the extension itself, and an interrupt while our hook waits."""

from __future__ import annotations

from kernels import Kernel

COUNTED = """calls = [0]
ids += 1
%load_ext nb_assertdoc
print(shelves(ids.cuda()).sum().item())"""


def test_a_cell_that_changes_data_before_it_loads_the_extension(start_kernel):
    """Its beginning runs twice on the same data in the replay: never certain."""
    kernel = start_kernel(simulated_gpu=True)
    kernel.run(
        "import torch; shelves = torch.nn.Embedding(4, 2).cuda(); ids = torch.tensor([1, 3])"
    )
    report = kernel.run(COUNTED).report
    assert report["confidence"] != "certain"
    assert "the cell loaded the extension" in str(report["replays"])


def test_loading_in_silent_or_earlier_cells_joins_nothing(start_kernel):
    kernel = start_kernel(simulated_gpu=True, settings={"replay": False})
    kernel.run("import torch; shelves = torch.nn.Embedding(4, 2).cuda(); ids = torch.tensor([9])")
    kernel.run("%load_ext nb_assertdoc", store_history=False)
    executions = "[e.execution_count for e in get_ipython()._nb_assertdoc.flow.recorder.executions]"
    assert kernel.value(executions) == []
    assert "assert in In [2]" in kernel.run("print(shelves(ids.cuda()).sum().item())").text
    assert kernel.value(executions) == [2]


SLOW = """
import time
recorder = get_ipython()._nb_assertdoc.flow.recorder
plain = recorder.begin
def begin(*given):  # as a copy that waits for the GPU
    print("hook waits", flush=True)
    time.sleep(600)
    return plain(*given)
"""


def test_an_interrupt_while_the_hook_waits_reaches_the_users_code(cpu_kernel: Kernel):
    cpu_kernel.run(SLOW, store_history=False)
    cpu_kernel.run("recorder.begin = begin", store_history=False)
    try:
        outcome = cpu_kernel.run(
            "print('cell runs', flush=True)\ntime.sleep(600)\nprint('not reached')",
            on_message=lambda message: (
                cpu_kernel.interrupt() if "hook waits" in str(message["content"]) else None
            ),
        )
    finally:
        cpu_kernel.run("del recorder.begin", store_history=False)
    assert outcome.error is not None
    assert outcome.error["ename"] == "KeyboardInterrupt"
    assert "cell runs" in outcome.stdout
    assert "not reached" not in outcome.stdout
    assert "Error in callback" not in outcome.text
    assert outcome.text.count("KeyboardInterrupt") < 4, "one traceback"

    fine = cpu_kernel.run("print('fine')")
    assert (fine.error, fine.stdout) == (None, "fine\n")


def test_loaded_late_when_another_error_came_after_the_crash(start_kernel):
    """IPython keeps the last error only: nothing is said of the crash, and status knows the way."""
    kernel = start_kernel(simulated_gpu=True)
    kernel.run(
        "import torch; shelves = torch.nn.Embedding(4, 2).cuda(); ids = torch.tensor([1, 7])"
    )
    assert kernel.run("print(shelves(ids.cuda()).sum().item())").error is not None
    kernel.run("1 / 0")

    assert kernel.run("%load_ext nb_assertdoc").text.strip() == ""
    status = kernel.run("%assertdoc").stdout
    assert "A cell from before the load that failed: `%cpu_replay N` replays In [N]." in status
    report = kernel.run("%cpu_replay 2").report
    assert report["finding"]["bad_values"] == [7]
    assert report["finding"]["location"]["execution_count"] == 2


def test_help_typos_and_topics(cpu_kernel):
    assert (
        "%cpu_replay [N] replays" in cpu_kernel.run("%assertdoc help", store_history=False).stdout
    )
    typo = cpu_kernel.run("%assertdoc expain\n%assertdoc sacn\n%assertdoc frobnicate").stdout
    assert "Did you mean explain?" in typo
    assert typo.count("Did you mean") == 2
    for name in ("hardware", "try-except", "verify"):
        assert name in cpu_kernel.run("%assertdoc explain", store_history=False).stdout
