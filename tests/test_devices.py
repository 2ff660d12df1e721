"""The pretended devices: what a process without CUDA answers once `devices.install` ran.

It cannot be undone, so each script runs in a process of its own and prints what it saw.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PRELUDE = """
import copy, io, json, os, pickle, sys
import torch
import torch.nn.functional as F
from torch import nn
from nb_assertdoc import devices
torch.set_num_threads(1)
seen = {}

def raised(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]

def where(*tensors):
    return [str(t.device) for t in tensors]
"""


def run(script: str, cwd: Path | None = None) -> dict[str, Any]:
    """What a script left in `seen`."""
    code = PRELUDE + textwrap.dedent(script) + "\nprint('\\n' + json.dumps(seen))\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


PLAIN = """
import threading
shy = nn.Linear(2, 2)                                    # made before the installation
devices.install(devices.Devices(count=2, name="Test GPU", total_memory=5 << 30), devices.Hooks())
seen["twice"] = raised(lambda: devices.install(devices.Devices(), devices.Hooks()))

x = torch.arange(6.0).view(2, 3)
g = x.cuda()
seen["moves"] = where(
    x, g, x.to("cuda:1"), x.to(torch.device("cuda")), x.to(1), x.to(g), g.cpu(), g.to("cpu"),
    g.to(device="cuda:1"), g.to("cpu", torch.long), g.type("torch.FloatTensor"),
    x.type("torch.cuda.LongTensor"))
seen["same object"] = [g.cuda() is g, g.to("cuda:0") is g, x.cpu() is x, g.to(torch.float32) is g,
                       g.to("cuda", copy=True) is g]
seen["values"] = [g.cpu().tolist(), g.tolist(), g.sum().item(), g.to("cpu", torch.long).tolist()]
seen["answers"] = [g.is_cuda, g.is_cpu, g.get_device(), x.get_device(), g.type(), repr(g[0]),
                   f"{g.sum():.1f}"]
seen["numpy"] = raised(g.numpy)
seen["no such device"] = raised(lambda: x.to("cuda:2"))
seen["real"] = str(devices.real_device(g))
with devices.raw():
    seen["raw"] = where(g)
meta = torch.empty(2, device="meta")
seen["meta"] = [str(meta.device), meta.is_meta]
devices.tag(meta, torch.device("cuda:1"))
seen["tagged meta"] = [str(meta.device), meta.is_meta, str((meta + 1).device)]

cuda = dict(device="cuda")
seen["made"] = where(
    torch.zeros(2, **cuda), torch.randn(2, **cuda), torch.tensor([1], **cuda),
    torch.as_tensor(x, **cuda), torch.arange(3, device=1), torch.full((2,), 1.0, **cuda),
    torch.eye(2, **cuda), torch.randperm(3, **cuda), torch.zeros_like(g), x.new_zeros(2, **cuda),
    torch.empty_like(x, **cuda), g.new_tensor([1]), g.new(2), torch.fft.fftfreq(3, **cuda),
    torch.sparse_coo_tensor([[0]], [1.0], (1,), **cuda))
with torch.device("cuda"):
    seen["context"] = where(torch.zeros(1), torch.tensor([1]), nn.Linear(1, 1).weight,
                            torch.zeros(1, device="cpu"))
torch.set_default_device("cuda:1")
seen["default"] = where(torch.zeros(1), torch.tensor([1]))
torch.set_default_device(None)
seen["context over"] = where(torch.zeros(1), torch.tensor([1]))
leaf = torch.tensor([1.0], requires_grad=True, **cuda)
seen["leaf"] = [leaf.is_leaf, leaf.requires_grad]
seen["operators"] = where(
    g + 1, g.T, g[0], g[g > 1], g.nonzero(), g.topk(1).values, torch.cat([g, g]), g.data,
    g.detach(), F.one_hot(torch.tensor([1], **cuda), 3), torch.einsum("ij,kj", g, g),
    torch.vmap(lambda row: row * torch.ones(3, device=row.device))(g), g.double(), g.unique())

seen["device class"] = [
    str(torch.device(0)), isinstance(torch.device("cpu"), torch.device),
    type(torch.device("cpu")) == torch.device,
    str(pickle.loads(pickle.dumps(torch.device("cuda:1"))))]

properties = torch.cuda.get_device_properties(0)
seen["figures"] = [
    torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name(),
    torch.cuda.get_device_capability(), properties.total_memory, torch.cuda.mem_get_info(),
    torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0),
    torch.cuda.memory_stats()["allocated_bytes.all.current"], torch.cuda.memory_summary(),
    torch.cuda.is_bf16_supported(), torch.backends.cudnn.is_available()]
if hasattr(torch, "accelerator"):
    seen["accelerator"] = [torch.accelerator.is_available(), torch.accelerator.device_count(),
                           str(torch.accelerator.current_accelerator()),
                           torch.accelerator.current_device_index()]
with torch.cuda.device(1):
    inside = [torch.cuda.current_device(), *where(torch.zeros(1, **cuda), x.cuda())]
seen["current"] = [inside, torch.cuda.current_device()]
threads = []
thread = threading.Thread(target=lambda: threads.extend(where(g * 2, torch.ones(1, **cuda))))
thread.start(); thread.join()
seen["thread"] = threads

stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(stream):
    event.record()
torch.cuda.current_stream().wait_stream(stream)
g.record_stream(stream)
torch.cuda.synchronize()
seen["streams"] = [stream.device.index, event.query(), isinstance(stream, torch.cuda.Stream),
                   torch.cuda.current_stream().is_capturing()]

torch.manual_seed(1)
before = torch.get_rng_state()
first = torch.rand(2, **cuda); F.dropout(g)
seen["random apart"] = torch.equal(before, torch.get_rng_state())
torch.manual_seed(1)
seen["random again"] = torch.equal(first, torch.rand(2, **cuda))
kept = torch.cuda.get_rng_state()
second = torch.rand(2, **cuda)
torch.cuda.set_rng_state(kept)
seen["random state"] = torch.equal(second, torch.rand(2, **cuda))
generator = torch.Generator(device="cuda").manual_seed(5)
seen["generator"] = [str(generator.device), *where(torch.randn(2, generator=generator, **cuda)),
                     isinstance(torch.default_generator, torch.Generator)]
seen["dynamo"] = "torch._dynamo" in sys.modules

shy.cuda()
shy(torch.ones(3, 2, **cuda)).sum().backward()
seen["module"] = where(shy.weight, shy.weight.grad, copy.deepcopy(shy).weight,
                       nn.Parameter(g).data)
seen["parameter kept"] = [isinstance(shy.weight, nn.Parameter), shy.weight.is_leaf]
shy.to(torch.float64).to(1)
seen["module moved"] = [*where(shy.weight, shy.weight.grad), str(shy.weight.dtype)]
start = torch.ones(2, requires_grad=True)
(start.cuda() * 3).sum().backward()
seen["gradient goes home"] = [*where(start.grad), start.grad.tolist()]

file = io.BytesIO()
torch.save({"w": shy.weight, "t": g}, file)
def load(**options):
    file.seek(0)
    loaded = torch.load(file, **options)
    return [*where(loaded["w"], loaded["t"]), loaded["t"].tolist() == g.tolist()]
seen["loaded"] = [load(), load(map_location="cpu"), load(map_location="cuda:1"),
                  load(map_location={"cuda:1": "cuda:0"}, weights_only=False),
                  load(map_location=lambda storage, location: storage, weights_only=False)]
seen["file"] = [b"cuda:1" in file.getvalue(), b"_nb_" in file.getvalue()]
seen["pickled"] = where(pickle.loads(pickle.dumps(g)), copy.deepcopy(g), copy.copy(g))
"""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(PLAIN)


def test_moves(plain: dict[str, Any]) -> None:
    assert plain["moves"] == [
        *("cpu", "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0", "cpu", "cpu"),
        *("cuda:1", "cpu", "cpu", "cuda:0"),
    ]
    assert plain["same object"] == [True, True, True, True, False]
    rows = [[0, 1, 2], [3, 4, 5]]
    assert plain["values"] == [rows, rows, 15, rows]


def test_answers(plain: dict[str, Any]) -> None:
    shown = "tensor([0., 1., 2.], device='cuda:0')"
    assert plain["answers"] == [True, False, 0, -1, "torch.cuda.FloatTensor", shown, "15.0"]
    assert plain["numpy"][0] == "TypeError" and "cuda:0 device type tensor" in plain["numpy"][1]
    assert "invalid device ordinal" in plain["no such device"][1]
    assert (plain["real"], plain["raw"]) == ("cpu", ["cpu"])
    assert plain["meta"] == ["meta", True]
    assert plain["tagged meta"] == ["cuda:1", False, "cuda:1"]


def test_installs_once(plain: dict[str, Any]) -> None:
    name, message = plain["twice"]
    assert name == "AssertdocError" and "only once" in message


def test_factories_and_operators(plain: dict[str, Any]) -> None:
    assert plain["made"] == [*["cuda:0"] * 4, "cuda:1", *["cuda:0"] * 10]
    assert plain["context"] == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert plain["default"] == ["cuda:1", "cuda:1"]
    assert plain["context over"] == ["cpu", "cpu"]
    assert plain["leaf"] == [True, True]
    assert set(plain["operators"]) == {"cuda:0"}
    assert plain["device class"] == ["cuda:0", True, True, "cuda:1"]


def test_torch_cuda(plain: dict[str, Any]) -> None:
    memory = 5 << 30
    assert plain["figures"] == [
        *(True, 2, "Test GPU", [8, 0], memory, [memory, memory], 0, 0, 0, "", True, True)
    ]
    assert plain.get("accelerator", [True, 2, "cuda", 0]) == [True, 2, "cuda", 0]
    assert plain["current"] == [[1, "cuda:1", "cuda:1"], 0]
    assert plain["thread"] == ["cuda:0", "cuda:0"]
    assert plain["streams"] == [0, True, True, False]


def test_random_numbers_have_a_state_of_their_own(plain: dict[str, Any]) -> None:
    assert plain["random apart"] and plain["random again"] and plain["random state"]
    assert plain["generator"] == ["cuda:0", "cuda:0", True]


def test_dynamo_is_not_imported(plain: dict[str, Any]) -> None:
    assert plain["dynamo"] is False


def test_modules_and_gradients(plain: dict[str, Any]) -> None:
    assert plain["module"] == ["cuda:0"] * 4
    assert plain["parameter kept"] == [True, True]
    assert plain["module moved"] == ["cuda:1", "cuda:1", "torch.float64"]
    assert plain["gradient goes home"] == ["cpu", [3, 3]]


def test_saving_and_loading(plain: dict[str, Any]) -> None:
    assert plain["loaded"] == [
        ["cuda:1", "cuda:0", True],
        ["cpu", "cpu", True],
        ["cuda:1", "cuda:1", True],
        ["cuda:0", "cuda:0", True],
        ["cpu", "cpu", True],
    ]
    assert plain["file"] == [True, False]
    assert plain["pickled"] == ["cuda:0"] * 3


TRAINING = """
devices.install(devices.Devices(count=2), devices.Hooks())

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((3,), float(i)), i % 2

class Forbidden(Rows):
    def __getitem__(self, i): return torch.ones(1).cuda()

for workers, pin in ((0, True), (2, True), (1, False)):
    loader = torch.utils.data.DataLoader(Rows(), 4, num_workers=workers, pin_memory=pin)
    batches = [x for x, _ in loader]
    total = sum(x.cuda(non_blocking=True).sum().item() for x in batches)
    seen[f"loader {workers} {pin}"] = [*where(*batches), batches[0].is_pinned(), total]
failing = torch.utils.data.DataLoader(Forbidden(), num_workers=1)
seen["cuda in a worker"] = raised(lambda: next(iter(failing)))

replicas = []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(2))
    def forward(self, x):
        replicas.append(where(x, self.linear.weight, self.shift))
        return self.linear(x) + self.shift
net = nn.DataParallel(Net().cuda())
output = net(torch.randn(8, 3, device="cuda"))
output.sum().backward()
grad = net.module.linear.weight.grad
seen["parallel"] = [sorted(replicas), list(output.shape), *where(output, grad)]

model = nn.Linear(3, 2).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.cuda.amp.GradScaler()
with torch.autocast("cuda", dtype=torch.float16):
    loss = F.cross_entropy(model(torch.ones(2, 3, device="cuda")), torch.tensor([0, 1]).cuda())
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer); scaler.update()
seen["amp"] = [scaler.get_scale(), *where(scaler._scale, optimizer.state[model.weight]["exp_avg"])]

seen["optimizers"] = {}
for kind, options in ((torch.optim.Adam, {}), (torch.optim.AdamW, {"fused": True}),
                      (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}),
                      (torch.optim.RMSprop, {"foreach": True})):
    results = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3, device=device)).square().sum().backward()
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        results.append(model.weight.detach().cpu())
    seen["optimizers"][kind.__name__] = torch.allclose(*results)
seen["dynamo"] = "torch._dynamo" in sys.modules

met = []
class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        met.extend(where(x, grad))
        return grad * x.exp()
x = torch.zeros(2, requires_grad=True, device="cuda")
y = Exp.apply(x)
y.register_hook(lambda grad: met.extend(where(grad)))
y.sum().backward()
seen["function"] = [*met, *where(x.grad), x.grad.tolist()]

lstm = nn.LSTM(3, 4, 2, batch_first=True, dropout=0.1, bidirectional=True).cuda()
packed = nn.utils.rnn.pack_padded_sequence(
    torch.randn(2, 5, 3).cuda(), torch.tensor([5, 3]), batch_first=True)
padded, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
padded.sum().backward()
halves = nn.DataParallel(nn.Linear(3, 2).cuda())(torch.ones(4, 3))  # of a tensor on the CPU
seen["data parallel"] = [*where(halves), list(halves.shape)]
with torch.Stream("cuda"):
    torch.Event("cuda").record()

made = [torch.cuda.LongTensor([4, 5]), torch.cuda.FloatTensor(2, 3),
        torch.ones(2).type(torch.cuda.HalfTensor), torch.ones(2).type("torch.cuda.IntTensor")]
seen["old types"] = [[str(t.dtype), *where(t), t.type()] for t in made]
seen["old isinstance"] = [isinstance(made[0], torch.cuda.LongTensor),
                          isinstance(made[0].cpu(), torch.cuda.LongTensor),
                          isinstance(made[0], torch.cuda.FloatTensor), made[0].tolist()]
torch.set_default_tensor_type(torch.cuda.DoubleTensor)
seen["old default"] = [str(torch.zeros(1).dtype), *where(torch.zeros(1))]
torch.set_default_tensor_type(torch.FloatTensor)
seen["old default"] += [str(torch.zeros(1).dtype), *where(torch.zeros(1))]

seen["lstm"] = where(packed.data, packed.batch_sizes, padded, lengths, lstm.weight_ih_l0.grad)

from torch.utils.checkpoint import checkpoint
for reentrant in (True, False):
    model.zero_grad()
    inputs = torch.ones(2, 3, requires_grad=True).cuda()
    result = checkpoint(lambda x: F.dropout(model.cuda()(x)), inputs, use_reentrant=reentrant)
    result.sum().backward()
    seen[f"checkpoint {reentrant}"] = where(model.weight.grad)
seen["compile"] = where(torch.compile(lambda x: x + 1)(torch.ones(1, device="cuda")))
"""


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    return run(TRAINING)


def test_data_loaders(training: dict[str, Any]) -> None:
    assert training["loader 0 True"] == ["cpu", "cpu", True, 84]
    assert training["loader 2 True"] == ["cpu", "cpu", True, 84]
    assert training["loader 1 False"] == ["cpu", "cpu", False, 84]
    assert "Cannot re-initialize CUDA in forked subprocess" in training["cuda in a worker"][1]


def test_data_parallel(training: dict[str, Any]) -> None:
    assert training["parallel"] == [
        [["cuda:0"] * 3, ["cuda:1"] * 3],
        [8, 2],
        "cuda:0",
        "cuda:0",
    ]


def test_mixed_precision(training: dict[str, Any]) -> None:
    assert training["amp"] == [65536, "cuda:0", "cuda:0"]


def test_optimizers_step_as_on_the_cpu(training: dict[str, Any]) -> None:
    assert set(training["optimizers"].values()) == {True}
    assert training["dynamo"] is False


def test_autograd(training: dict[str, Any]) -> None:
    assert training["function"] == [*["cuda:0"] * 4, [1, 1]]
    assert training["checkpoint True"] == training["checkpoint False"] == ["cuda:0"]
    assert training["compile"] == ["cuda:0"]


def test_packed_sequences(training: dict[str, Any]) -> None:
    assert training["lstm"] == ["cuda:0", "cpu", "cuda:0", "cpu", "cuda:0"]
    assert training["data parallel"] == ["cuda:0", [4, 2]]
    assert training["old types"] == [
        ["torch.int64", "cuda:0", "torch.cuda.LongTensor"],
        ["torch.float32", "cuda:0", "torch.cuda.FloatTensor"],
        ["torch.float16", "cuda:0", "torch.cuda.HalfTensor"],
        ["torch.int32", "cuda:0", "torch.cuda.IntTensor"],
    ]
    assert training["old isinstance"] == [True, False, False, [4, 5]]
    assert training["old default"] == ["torch.float64", "cuda:0", "torch.float32", "cpu"]


HOOKED = """
class Ghosts(devices.Hooks):
    calls = []
    def move(self, tensor, device):
        self.calls.append(["move", str(tensor.device), str(device)])
        if tensor.is_floating_point():
            return devices.tag(torch.empty_like(tensor, device="meta"), device)
    def leave(self, tensor):
        self.calls.append(["leave", str(tensor.device)])
    def make(self, name, device):
        self.calls.append(["make", name, str(device)])
        return torch.device("meta") if name == "randn" else None
    def api(self, name):
        self.calls.append(["api", name])
    def read(self, tensor):
        self.calls.append(["read", str(tensor.device)])
    def dispatch(self, func, types, args, kwargs):
        if "mm" in str(func):
            self.calls.append(["dispatch", *where(*args)])
        return func(*args, **kwargs)

devices.install(devices.Devices(), Ghosts())
def said(call):
    Ghosts.calls.clear()
    call()
    return list(Ghosts.calls)
ints, ghost = torch.tensor([1]).cuda(), torch.ones(2, 2).cuda()
seen["ghost"] = [str(ghost.device), str(devices.real_device(ghost)), ghost.is_meta]
seen["result"] = [str((ghost @ ghost).device), str(devices.real_device(ghost @ ghost))]
made = torch.randn(2, device="cuda")
seen["made"] = [str(made.device), str(devices.real_device(made))]
seen["calls"] = [said(call) for call in (
    lambda: torch.ones(1).cuda(), lambda: ints.cpu(), lambda: torch.randn(1, device="cuda"),
    torch.cuda.synchronize, ints.item, lambda: bool(ints), lambda: ghost @ ghost)]
"""


def test_hooks_see_and_change() -> None:
    seen = run(HOOKED)
    assert seen["ghost"] == ["cuda:0", "meta", False]
    assert seen["result"] == seen["made"] == ["cuda:0", "meta"]
    assert seen["calls"] == [
        [["move", "cpu", "cuda:0"]],
        [["leave", "cuda:0"]],
        [["make", "randn", "cuda:0"]],
        [["api", "synchronize"]],
        [["read", "cuda:0"]],
        [["read", "cuda:0"]],
        [["dispatch", "meta", "meta"]],
    ]


TRAINERS = """
devices.install(devices.Devices(count=2), devices.Hooks())
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
rows = [dict(input_ids=torch.randint(0, 50, (6,)), labels=torch.tensor(i % 3)) for i in range(8)]
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16, num_labels=3, max_position_embeddings=16)
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=2, fp16=True,
                              report_to=[], eval_strategy="steps", eval_steps=1, save_steps=2,
                              disable_tqdm=True)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows,
                  eval_dataset=rows)
loss = trainer.train().training_loss
seen["trainer"] = [str(arguments.device), arguments.n_gpu, trainer.state.global_step, 0 < loss < 3,
                   *where(trainer.model.classifier.weight), os.path.exists("out/checkpoint-2")]

accelerator = Accelerator(mixed_precision="fp16")
model = nn.Linear(3, 2)
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
    torch.randn(8, 3), torch.arange(8) % 2), batch_size=4)
model, optimizer, batches = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), batches)
for x, y in batches:
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
accelerator.save_state("state")
accelerator.load_state("state")
seen["accelerate"] = where(x, y, model.weight, accelerator.gather(loss))
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
    reason="transformers and accelerate are not installed",
)
def test_trainers(tmp_path: Path) -> None:
    seen = run(TRAINERS, tmp_path)
    assert seen["trainer"] == ["cuda:0", 2, 2, True, "cuda:0", True]
    assert seen["accelerate"] == ["cuda:0"] * 4
