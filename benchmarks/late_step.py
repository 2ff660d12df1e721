"""How long a user waits for the diagnosis of a training loop that fails late.

    python -m benchmarks.late_step [--step 400]

A small model on the simulated GPU; the bad label sits in one late batch. The time to the diagnosis
should not depend on the step, and be about that of a kernel's start and `import torch` together.
"""

from __future__ import annotations

import argparse
import time

from tests.kernels import MIME, Kernel, Message

BATCH = 16
PREPARE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
labels = torch.randint(0, 10, ({rows},))
labels[{bad}] = 10
loader = DataLoader(TensorDataset(torch.randn({rows}, 128), labels), batch_size={batch})
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
"""
TRAIN = """
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    last = loss.item()
"""


class Arrivals:
    """When the first message of each kind came, in seconds after the start of the cell."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def __call__(self, message: Message) -> None:
        kind, content = message["msg_type"], message["content"]
        if "data" in content:
            kind = "report" if MIME in content["data"] else "card"
        self.seconds.setdefault(kind, time.perf_counter() - self.started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=int, default=400, help="the step that fails (default: 400)")
    step = parser.parse_args().step

    started = time.perf_counter()
    with Kernel() as bare:
        start = time.perf_counter() - started
        bare.run("import time; started = time.perf_counter()\nimport torch")
        torch = float(bare.value("time.perf_counter() - started"))

    rows = (step + 20) * BATCH
    with Kernel(simulated_gpu=True, extension=True) as kernel:
        kernel.run(PREPARE.format(rows=rows, bad=step * BATCH + 3, batch=BATCH))
        arrivals = Arrivals()
        outcome = kernel.run(TRAIN, on_message=arrivals)

    seconds, finding = arrivals.seconds, outcome.report["finding"] or {}
    found = (finding.get("bad_values"), (finding.get("step") or {}).get("iteration"))
    if found != ([10], step):
        raise SystemExit(f"wrong diagnosis: value and step {found}, expected ([10], {step})")
    report = seconds["report"] - seconds["error"]
    print(f"start of a kernel                {start:7.2f} s")
    print(f"import torch                     {torch:7.2f} s")
    print(f"the {step} steps until the error   {seconds['error']:7.2f} s")
    print(f"from the error to the card       {seconds['card'] - seconds['error']:7.2f} s")
    print(f"from the error to the report     {report:7.2f} s")
    print(f"  beside start and import        {report / (start + torch):7.2f} times")


if __name__ == "__main__":
    main()
