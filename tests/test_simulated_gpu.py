"""The simulated GPU: it computes, mixes no devices, dies of a bad index, and stays dead.

It cannot be turned off, so each script runs in a process of its own; each of its cases in a fork,
which is a fresh GPU because the parent has not used it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from kernels import Kernel

from nb_assertdoc import catalogue

pytest.importorskip("torch")

PRELUDE = """
import json, os, sys, tempfile, traceback
import torch
import torch.nn.functional as F
from torch import nn
from nb_assertdoc import simulated_gpu
simulated_gpu.load()
assert "torch._dynamo" not in sys.modules
torch.set_num_threads(1)
results = {}

def outcome(call):
    try:
        return ["returns", repr(call())[:200]]
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "error_code", None)]

def case(function):
    # runs in a fork; fd 2 goes to a file, as the driver's lines do
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stderr.fileno(), 2)
            try:
                said = function()
            except BaseException:
                said = {"failed": traceback.format_exc()}
            os.write(answer.fileno(), json.dumps(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0); stderr.seek(0)
        results[function.__name__] = [json.loads(answer.read()), stderr.read().decode()]

def kill():
    # a doomed context that the host knows of
    return outcome(lambda: torch.arange(3, device="cuda")[torch.tensor([7], device="cuda")].cpu())

calls = simulated_gpu.calls_after_death
"""


def run(script: str, **environment: str) -> dict[str, Any]:
    """The results of a script's cases: name -> (what it returned, what fd 2 got)."""
    code = PRELUDE + textwrap.dedent(script) + "\nprint(json.dumps(results))\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for said, stderr in results.values():
        assert not (isinstance(said, dict) and "failed" in said), said["failed"] + stderr
    return results


DEATHS = """
@case
def surfaces_at_item():
    table = torch.nn.Embedding(4, 2).cuda()
    rows = table(torch.tensor([1, 4], device="cuda"))   # the bad line goes on
    total = rows.sum()
    return {"shape": list(rows.shape), "item": outcome(total.item), "again": outcome(total.item),
            "calls": calls()}

@case
def surfaces_some_launches_later():
    x = torch.ones(3, device="cuda")
    x[torch.tensor([3], device="cuda")]
    for launch in range(1000):
        try:
            x + 1
        except RuntimeError as error:
            return {"launch": launch, "text": str(error)}

@case
def surfaces_in_backward_and_in_the_next_batch():
    x = torch.randn(4, 3, device="cuda", requires_grad=True)
    loss = F.cross_entropy(x, torch.tensor([0, 1, 2, 3], device="cuda"))
    loss.backward()                                       # few launches: it passes
    return {"next batch": outcome(lambda: torch.ones(2).to("cuda")), "grad": str(x.grad.device)}

@case
def pinned_copies_do_not_wait():
    pinned = torch.ones(2).pin_memory()
    torch.ones(3, device="cuda")[torch.tensor([3], device="cuda")]
    return [outcome(lambda: pinned.cuda(non_blocking=True).device),
            outcome(lambda: torch.ones(2).cuda())]

@case
def every_call_fails():
    t = torch.arange(6.0, device="cuda").view(2, 3)
    cpu, pinned = torch.ones(3), torch.ones(2).pin_memory()
    model = nn.Linear(3, 2).cuda()
    model(t)                                              # cuBLAS runs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(t).sum()
    first = kill()
    before = calls()
    free = lambda: (t.shape, t.dtype, t.device, t.is_cuda, t.stride(), t.numel(), t.requires_grad,
                    t.grad, t.data_ptr(), id(t), hash(t), len(t), repr(model), t.is_contiguous(),
                    torch.cuda.is_available(), torch.cuda.device_count(), cpu + 1,
                    torch.cuda.get_device_name(0), torch.cuda.memory_allocated(0),
                    {k: v.shape for k, v in model.state_dict().items()} and None,
                    optimizer.zero_grad(), torch.default_generator.manual_seed(0))
    import io, copy, pickle
    raising = {name: outcome(call) for name, call in {
        "repr": lambda: repr(t), "format": lambda: f"{t}", "item": t[0, 0].item, "cpu": t.cpu,
        "tolist": t.tolist, "bool": lambda: bool(t[0, 0]), "==": lambda: t == t,
        "+": lambda: t + 1, "@": lambda: t @ t.T, "clone": t.clone,
        "deepcopy": lambda: copy.deepcopy(t), "pickle": lambda: pickle.dumps(t),
        "save": lambda: torch.save(model.state_dict(), io.BytesIO()), "model.cpu": model.cpu,
        "backward": loss.backward, "zeros": lambda: torch.zeros(3, device="cuda"),
        "to": lambda: cpu.to("cuda"), "synchronize": torch.cuda.synchronize,
        "set_device": lambda: torch.cuda.set_device(0), "mem_get_info": torch.cuda.mem_get_info,
        "Stream": torch.cuda.Stream, "Event": lambda: torch.cuda.Event().record(),
        "get_rng_state": torch.cuda.get_rng_state, "manual_seed": lambda: torch.manual_seed(0),
        "pin_memory": cpu.pin_memory, "is_pinned": cpu.is_pinned,
        "non_blocking": lambda: pinned.to("cuda", non_blocking=True),
    }.items()}
    after = calls()
    returning = {name: outcome(call)[0] for name, call in {
        "view": lambda: t[0].shape, "transpose": lambda: t.T.shape,
        "empty": lambda: torch.empty(3, device="cuda").shape,
        "current_device": torch.cuda.current_device, "memory": torch.cuda.memory_allocated,
    }.items()}
    counted = calls() - after
    start = calls(); freely = outcome(free); unchanged = calls() - start
    numpy = outcome(t.numpy)
    return {"first": first, "before": before, "raising": raising, "returning": returning,
            "counted": counted, "calls": after, "free": [freely, unchanged], "numpy": numpy}

@case
def swallowed_by_user_code():
    losses = []
    for step in range(3):
        try:
            x = torch.zeros(2, 3, device="cuda")
            losses.append(F.cross_entropy(x, torch.tensor([0, 3], device="cuda")).item())
        except Exception:
            losses.append(None)
    return {"losses": losses, "later": outcome(lambda: torch.zeros(1, device="cuda")),
            "cpu": torch.ones(2).sum().item()}

@case
def first_matrix_product_is_the_messenger():
    linear = nn.Linear(2, 2).cuda()
    x = nn.Embedding(4, 2).cuda()(torch.tensor([[9]], device="cuda"))
    return [outcome(lambda: linear(x)), outcome(x.cpu), outcome(lambda: linear(x))]

@case
def fails_after_launches():
    x = torch.ones(2, device="cuda")
    simulated_gpu.fail_after(2, "CUDA error: an illegal memory access was encountered\\n")
    return [outcome(lambda: x + 1)[0], outcome(lambda: x + 1)[0], outcome(lambda: x + 1),
            outcome(x.tolist)]

@case
def data_loader_workers_are_not_disturbed():
    class Numbers(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return torch.tensor(float(i)), os.getpid()
    kill()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1)
    batches = [(x.tolist(), str(x.device), pid.tolist()) for x, pid in loader]
    return {"values": [b[0] for b in batches], "devices": [b[1] for b in batches],
            "here": os.getpid() in batches[0][2], "calls": calls()}
"""


@pytest.fixture(scope="module")
def deaths() -> dict[str, Any]:
    return run(DEATHS)


def is_assert(said: list[Any]) -> bool:
    import torch

    name, text, code = said
    known = getattr(torch, "AcceleratorError", None)
    assert name == (known.__name__ if known else "RuntimeError")
    assert code == (710 if known else None)
    assert text.startswith("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert'")
    assert "might be asynchronously reported" in text and text.endswith(".\n")
    return True


def test_bad_lookup_goes_on_and_item_raises(deaths: dict[str, Any]) -> None:
    said, stderr = deaths["surfaces_at_item"]
    assert said["shape"] == [2, 2]
    assert is_assert(said["item"]) and is_assert(said["again"])
    assert said["calls"] == 1
    (line,) = catalogue.fold(catalogue.parse(stderr))
    assert (line.kernel_file, line.count) == ("Indexing.cu", 32)
    assert "embedding" in (catalogue.operators_of([line]) or ())


def test_launches_discover_it_when_the_queue_is_full(deaths: dict[str, Any]) -> None:
    said, stderr = deaths["surfaces_some_launches_later"]
    assert 10 < said["launch"] < 999
    assert said["text"].startswith("CUDA error: device-side assert triggered")
    assert "index out of bounds" in stderr


def test_backward_runs_on_and_the_next_batch_raises(deaths: dict[str, Any]) -> None:
    said, stderr = deaths["surfaces_in_backward_and_in_the_next_batch"]
    assert is_assert(said["next batch"]) and said["grad"] == "cuda:0"
    (line,) = catalogue.fold(catalogue.parse(stderr))
    assert "cross_entropy" in (catalogue.operators_of([line]) or ())


def test_a_pinned_non_blocking_copy_does_not_wait(deaths: dict[str, Any]) -> None:
    pinned, pageable = deaths["pinned_copies_do_not_wait"][0]
    assert pinned[0] == "returns" and is_assert(pageable)


def test_a_dead_context_answers_as_the_real_one(deaths: dict[str, Any]) -> None:
    said, _ = deaths["every_call_fails"]
    assert is_assert(said["first"]) and said["before"] == 0
    for name, answer in said["raising"].items():
        assert answer[0] != "returns", name
        assert is_assert(answer), name
    assert said["calls"] >= len(said["raising"])
    assert set(said["returning"].values()) == {"returns"}
    assert said["counted"] >= len(said["returning"])
    assert said["numpy"][0] == "TypeError" and "can't convert cuda:0" in said["numpy"][1]


def test_metadata_counts_nothing(deaths: dict[str, Any]) -> None:
    (answer, calls) = deaths["every_call_fails"][0]["free"]
    assert (answer[0], calls) == ("returns", 0), answer


def test_a_swallowed_error_comes_again(deaths: dict[str, Any]) -> None:
    said, stderr = deaths["swallowed_by_user_code"]
    assert said["losses"] == [None] * 3 and said["cpu"] == 2
    assert is_assert(said["later"])
    (line,) = catalogue.fold(catalogue.parse(stderr))
    assert line.kernel_file == "Loss.cu" and line.count == 32


def test_cublas_brings_the_news(deaths: dict[str, Any]) -> None:
    (linear, cpu, again), stderr = deaths["first_matrix_product_is_the_messenger"]
    words = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert linear == ["RuntimeError", words, None] == again
    assert is_assert(cpu) and "srcIndex < srcSelectDimSize" in stderr


def test_fail_after(deaths: dict[str, Any]) -> None:
    (one, two, three, read), stderr = deaths["fails_after_launches"]
    assert (one, two) == ("returns", "returns") and stderr == ""
    assert "illegal memory access" in three[1] and three[2] in (700, None)
    assert read == three


def test_data_loader_workers(deaths: dict[str, Any]) -> None:
    said, _ = deaths["data_loader_workers_are_not_disturbed"]
    assert said == {
        "values": [[0, 1], [2, 3]],
        "devices": ["cpu", "cpu"],
        "here": False,
        "calls": 0,
    }


LIFE = """
@case
def mixing():
    x = torch.ones(2, 3, device="cuda")
    cpu, index = torch.ones(2, 3), torch.tensor([1])
    y = torch.zeros(2, 3, device="cuda"); y[index] = 1.0
    return {
        "add": outcome(lambda: x + cpu), "linear": outcome(lambda: nn.Linear(3, 2)(x)),
        "embedding": outcome(lambda: nn.Embedding(3, 2).cuda()(index)),
        "factory": outcome(lambda: x + torch.zeros(2, 3)),
        "loss": outcome(lambda: F.cross_entropy(x, torch.tensor([0, 1]))),
        "number": outcome(lambda: (x + torch.tensor(1.0)).sum().item()),
        "cpu index": outcome(lambda: x[index].tolist()), "set": y.tolist(),
        "cuda index": outcome(lambda: cpu[index.cuda()]),
        "copies": outcome(lambda: torch.zeros(2, 3).copy_(x).device),
        "one_hot": outcome(lambda: F.one_hot(index.cuda(), 3) + x[:1]),
        "other gpu": outcome(lambda: x.to("cuda:1")),
    }

@case
def training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)).cuda()
    target = torch.tensor([0, 1, 2, 0, 1], device="cuda")
    x = torch.randn(5, 4, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda") if hasattr(torch.amp, "GradScaler") else None
    losses = []
    for _ in range(30):
        with torch.autocast("cuda"):
            loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    torch.cuda.synchronize()
    return {"first": losses[0], "last": losses[-1], "calls": calls(),
            "device": str(next(net.parameters()).grad.device)}

def dies(name, operation):
    def function():
        return outcome(lambda: (operation(), torch.cuda.synchronize()))
    function.__name__ = name
    case(function)

on = dict(device="cuda")
dies("cross_entropy", lambda: F.cross_entropy(torch.zeros(2, 3, **on), torch.tensor([0, -1], **on)))
dies("cross_entropy_2d", lambda: F.cross_entropy(
    torch.zeros(1, 2, 4, 4, **on), torch.full((1, 4, 4), 255, **on)))
dies("gather", lambda: torch.zeros(2, 3, **on).gather(1, torch.tensor([[3], [0]], **on)))
dies("scatter_add_", lambda: torch.zeros(3, **on).scatter_add_(
    0, torch.tensor([3], **on), torch.ones(1, **on)))
dies("one_hot", lambda: F.one_hot(torch.tensor([5], **on), 3))
dies("binary_cross_entropy", lambda: F.binary_cross_entropy(
    torch.tensor([1.5], **on), torch.ones(1, **on)))
dies("multinomial", lambda: torch.multinomial(torch.tensor([0.5, float("nan")], **on), 1))
dies("embedding_bag", lambda: nn.EmbeddingBag(4, 2).cuda()(torch.tensor([[4]], **on)))
dies("index", lambda: torch.zeros(3, **on)[torch.tensor([3])])
dies("index_put_", lambda: torch.zeros(3, **on).__setitem__(torch.tensor([-4], **on), 1.0))
dies("nothing", lambda: F.cross_entropy(
    torch.zeros(2, 3, **on), torch.tensor([0, -100], **on)).item() and None)
"""


@pytest.fixture(scope="module")
def life() -> dict[str, Any]:
    return run(LIFE)


def test_devices_do_not_mix(life: dict[str, Any]) -> None:
    said, _ = life["mixing"]
    words = "Expected all tensors to be on the same device, but found at least two devices, "
    for name in ("add", "linear", "embedding", "factory", "loss"):
        assert said[name] == ["RuntimeError", words + "cuda:0 and cpu!", None], name
    assert said["number"] == ["returns", "12.0"]
    assert said["cpu index"] == ["returns", "[[1.0, 1.0, 1.0]]"]
    assert said["set"] == [[0, 0, 0], [1, 1, 1]]
    assert "indices should be either on cpu" in said["cuda index"][1]
    assert said["copies"] == ["returns", "device(type='cpu')"]
    assert said["one_hot"][0] == "returns"
    assert "invalid device ordinal" in said["other gpu"][1]


def test_a_healthy_training_run(life: dict[str, Any]) -> None:
    said, stderr = life["training"]
    assert said["last"] < said["first"] / 2
    assert (said["calls"], said["device"]) == (0, "cuda:0")
    assert "Assertion" not in stderr


@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("cross_entropy", "Loss.cu"),
        ("cross_entropy_2d", "NLLLoss2d.cu"),
        ("gather", "ScatterGatherKernel.cu"),
        ("scatter_add_", "ScatterGatherKernel.cu"),
        ("one_hot", "ScatterGatherKernel.cu"),
        ("binary_cross_entropy", "Loss.cu"),
        ("multinomial", None),
        ("embedding_bag", "EmbeddingBag.cu"),
        ("index", "IndexKernel.cu"),
        ("index_put_", None),
    ],
)
def test_what_each_operator_prints(life: dict[str, Any], case: str, file: str | None) -> None:
    said, stderr = life[case]
    assert is_assert(said)
    (line,) = catalogue.fold(catalogue.parse(stderr))
    assert file is None or line.kernel_file == file
    assert case.removesuffix("_2d") in (catalogue.operators_of([line]) or {case})
    assert line.count > 1


def test_an_ignored_index_kills_nothing(life: dict[str, Any]) -> None:
    assert life["nothing"] == [["returns", "(None, None)"], ""]


def test_launch_blocking_raises_on_the_line() -> None:
    script = """
    @case
    def blocking():
        x = torch.zeros(3, device="cuda")
        return outcome(lambda: x[torch.tensor([3], device="cuda")])
    """
    said, stderr = run(script, CUDA_LAUNCH_BLOCKING="1")["blocking"]
    assert said[1].startswith("CUDA error: device-side assert triggered")
    assert "asynchronously" not in said[1] and "Assertion" in stderr


def test_in_a_running_kernel() -> None:
    with Kernel() as kernel:
        first = kernel.run("import torch; print(torch.cuda.is_available())")
        assert (first.status, first.stdout) == ("ok", "False\n")
        loaded = kernel.run("%load_ext nb_assertdoc.simulated_gpu")
        assert (loaded.status, loaded.text) == ("ok", "")
        shown = kernel.run("x = torch.arange(3, device='cuda'); x")
        assert shown.displays[0]["text/plain"] == "tensor([0, 1, 2], device='cuda:0')"
        failed = kernel.run("y = x[torch.tensor([3])]\ny")
        assert failed.error is not None
        assert failed.error["evalue"].startswith("CUDA error: device-side assert triggered")
        assert kernel.run("print(x.shape, 1 + 1)").stdout == "torch.Size([3]) 2\n"
