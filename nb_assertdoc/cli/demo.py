"""The notebook of `nb-assertdoc demo`, and what its diagnosis must be.

The commonest cause in an everyday layout: classes are numbered from 1 in the file, the loss wants
them from 0, and the GPU's error surfaces one line later, at `.item()`.
"""

from __future__ import annotations

from typing import Any

from nb_assertdoc import model

CELLS = (
    """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)""",
    """# seeds.csv: seven measurements of each grain; the varieties are numbered 1, 2, 3
variety = torch.arange(1, 4).repeat(70)
measurements = torch.randn(210, 7) + variety[:, None]
loader = DataLoader(TensorDataset(measurements, variety), batch_size=32, shuffle=True)""",
    """model = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)""",
    """losses = []
for grains, target in loader:
    grains, target = grains.to(device), target.to(device)
    loss = criterion(model(grains), target)
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()""",
)


def notebook() -> Any:
    """A new copy of the notebook, as nbformat's node."""
    from nbformat.v4 import new_code_cell, new_notebook

    return new_notebook(cells=[new_code_cell(source) for source in CELLS])


def is_right(report: model.Report) -> bool:
    """True if `report` says what is wrong with the notebook."""
    finding, cause = report.finding, report.cause
    return (
        report.confidence == "certain"
        and finding is not None
        and (finding.op, finding.argument, finding.bad_values) == ("cross_entropy", "target", (3,))
        and finding.bound is not None
        and (finding.bound.low, finding.bound.high) == (0, 3)
        and "criterion(" in finding.location.source
        and cause is not None
        and cause.key == "label_starts_at_1"
    )
