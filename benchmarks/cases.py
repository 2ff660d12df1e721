"""Notebooks that fail on a GPU, for the benchmarks: models from their configs, no downloads.

Every notebook takes the device that is there, so the same text fails on the simulated GPU with a
device-side assert, and on the CPU with an IndexError at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

DEVICE = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'


@dataclass(frozen=True)
class Case:
    """A notebook of four cells; the last one fails.

    `batch` makes one batch of the same shapes, and `step` does with it, on any device, what a step
    of the failing cell does up to the gradients: what a diagnosis cannot do without.
    """

    name: str
    imports: str
    model: str  # makes `model`, on the default device
    data: str
    cell: str
    batch: str
    step: str
    found: tuple[str, int, int | None]  # operator, bad value, iteration of the loop

    def cells(self) -> list[str]:
        """The notebook."""
        return [self.imports, self.data, f"{self.model}\n{DEVICE}model.to(device);", self.cell]


BERT = Case(
    name="BERT-base fine-tuning on 32 texts of 128 tokens a step, 3rd step",
    imports="""
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification
""",
    data="""
torch.manual_seed(0)
ids, labels = torch.randint(0, 30522, (128, 128)), torch.randint(0, 2, (128,))
labels[2 * 32 + 5] = 2
loader = DataLoader(TensorDataset(ids, labels), batch_size=32)
""",
    model="model = BertForSequenceClassification(BertConfig(num_labels=2))",
    cell="""
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for x, y in loader:
    print("step", time.perf_counter())
    optimizer.zero_grad()
    loss = model(input_ids=x.to(device), labels=y.to(device)).loss
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
""",
    batch="x, y = torch.zeros(32, 128, dtype=torch.long), torch.zeros(32, dtype=torch.long)",
    step="model(input_ids=x, labels=y).loss.backward()",
    found=("cross_entropy", 2, 2),
)

RESNET = Case(
    name="ResNet-50 with a head too short, 2nd step",
    imports="""
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
""",
    data="""
torch.manual_seed(0)
images, labels = torch.randn(32, 3, 128, 128), torch.randint(0, 37, (32,))
labels[8 + 3] = 37
loader = DataLoader(TensorDataset(images, labels), batch_size=8)
""",
    model="""
class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )
        self.around = nn.Identity() if inside == outside else nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )
    def forward(self, x):
        return torch.relu(self.layers(x) + self.around(x))

class ResNet(nn.Module):
    def __init__(self, classes, blocks=(3, 4, 6, 3)):
        super().__init__()
        layers = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        inside = 64
        for number, count in enumerate(blocks):
            width = 64 << number
            for block in range(count):
                stride = 2 if number and not block else 1
                layers.append(Bottleneck(inside, width, stride))
                inside = 4 * width
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)
    def forward(self, x):
        return self.fc(self.pool(self.features(x)).flatten(1))

model = ResNet(37)
""",
    cell="""
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for x, y in loader:
    print("step", time.perf_counter())
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
""",
    batch="x, y = torch.zeros(8, 3, 128, 128), torch.zeros(8, dtype=torch.long)",
    step="nn.functional.cross_entropy(model(x), y).backward()",
    found=("cross_entropy", 37, 1),
)

GPT2 = Case(
    name="GPT-2 generating past its positions, 8th token",
    imports="""
import time, torch
from transformers import GPT2Config, GPT2LMHeadModel
""",
    data="""
torch.manual_seed(0)
ids = torch.randint(0, 50257, (2, 1017))
""",
    model="model = GPT2LMHeadModel(GPT2Config()).eval()",
    cell="""
out, past = ids.to(device), None
with torch.no_grad():
    for token in range(20):
        print("step", time.perf_counter())
        new = out if past is None else out[:, -1:]
        position = torch.arange(out.size(1) - new.size(1), out.size(1), device=device)
        answer = model(new, past_key_values=past, position_ids=position[None], use_cache=True)
        past = answer.past_key_values
        out = torch.cat([out, answer.logits[:, -1].argmax(-1, keepdim=True)], 1)
print(out.shape, out[0, -1].item())
""",
    batch="x = torch.zeros(2, 1017, dtype=torch.long)",
    step="""
with torch.no_grad():
    model(x, use_cache=True)
""",
    found=("embedding", 1024, 8),
)

GCN = Case(
    name="GCN on a graph of Cora's size, bad node id",
    imports="""
import time, torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv
""",
    data="""
torch.manual_seed(0)
features, labels = torch.rand(2708, 1433), torch.randint(0, 7, (2708,))
edges = torch.randint(0, 2708, (2, 10556))
edges[1, 77] = 2708
""",
    model="""
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(1433, 64), GCNConv(64, 7)
    def forward(self, x, edges):
        return self.second(F.dropout(F.relu(self.first(x, edges)), training=self.training), edges)

model = GCN()
""",
    cell="""
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
x, e, y = features.to(device), edges.to(device), labels.to(device)
for epoch in range(100):
    print("step", time.perf_counter())
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, e), y)
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
""",
    batch="""
x, y = torch.zeros(2708, 1433), torch.zeros(2708, dtype=torch.long)
e = torch.zeros(2, 10556, dtype=torch.long)
""",
    step="F.cross_entropy(model(x, e), y).backward()",
    found=("scatter_add_", 2708, 0),
)

CASES = (BERT, RESNET, GPT2, GCN)

# Built and run inside the replay: neither this machine nor its kernel ever holds the weights.
SEVEN_BILLION = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig()).to("cuda")
ids = torch.randint(0, 32000, (1, 256), device="cuda")
ids[0, 100] = 32000
with torch.no_grad():
    logits = model(ids).logits
"""

LATE_STEPS = (10, 400, 4000)
LATE_BATCH = 16


def late(step: int) -> tuple[str, str]:
    """A small model whose bad label comes in batch `step`: what prepares it, and what fails."""
    rows = (step + 20) * LATE_BATCH
    prepare = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
labels = torch.randint(0, 10, ({rows},))
labels[{step * LATE_BATCH + 3}] = 10
loader = DataLoader(TensorDataset(torch.randn({rows}, 32), labels), batch_size={LATE_BATCH})
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
"""
    cell = """
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    last = loss.item()
"""
    return prepare, cell
