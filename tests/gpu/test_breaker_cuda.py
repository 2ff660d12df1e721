"""Whatever a notebook holds and asks after the death: no CUDA call, and its own error stays."""

from __future__ import annotations

import pytest

HOLD = """
import collections, dataclasses, torch
model = torch.nn.Linear(4, 4).cuda()
opt = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4, device="cuda")).sum().backward(); opt.step()
stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
gen = torch.Generator(device="cuda")
scaler = torch.amp.GradScaler("cuda")
pinned = torch.ones(8).pin_memory()
shared = pinned.numpy()
sparse = torch.sparse_coo_tensor(size=(3, 3), device="cuda")
view = model.weight.detach()[1:]
hooked = torch.ones(3, device="cuda", requires_grad=True)
handle = hooked.register_hook(lambda grad: grad)
@dataclasses.dataclass
class Box:
    tensor: object
box, queue = Box(torch.ones(2, device="cuda")), collections.deque([torch.ones(2, device="cuda")])
def make(kept=torch.ones(2, device="cuda")):
    inner = torch.ones(2, device="cuda")
    return lambda: (inner, kept)
closure = make()
table = torch.nn.Embedding(10, 4).cuda()
everything = (model, opt, stream, event, gen, scaler, pinned, shared, sparse, view, hooked, box,
              queue, closure)
"""
FAIL = "everything\nprint(table(torch.tensor([12]).cuda()).sum().item(), everything[0].bias.shape)"
AFTER = [
    "%assertdoc",
    "%assertdoc report",
    "%assertdoc save report.json",
    "%assertdoc explain",
    "%cpu_replay",
    "%%cpu_replay\nprint(table(torch.tensor([3]).cuda()).sum().item())",
]


@pytest.fixture(scope="module")
def crashed(start_for_module):
    """A kernel that holds CUDA objects of all kinds, after its crash."""
    kernel = start_for_module()
    outcome = kernel.run_cells(HOLD, FAIL)
    return kernel, outcome


def test_the_crash_costs_no_call(crashed):
    kernel, outcome = crashed
    assert outcome.error["ename"] == "AcceleratorError"
    assert outcome.report["finding"]["bad_values"] == [12]
    assert kernel.calls_since_traceback() == 0


@pytest.mark.parametrize("asked", AFTER)
def test_what_is_asked_later_costs_no_call(crashed, asked):
    kernel, _ = crashed
    before = kernel.calls()
    outcome = kernel.run(asked)
    assert outcome.error is None, outcome.text
    assert kernel.calls() == before
