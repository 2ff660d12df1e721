"""Training as libraries do it: Hugging Face Trainer, accelerate, Lightning, torch_geometric.

Each library's cells run in real replays: a planted fault is found, and the clean cell ends clean.
Then the same in notebooks on the simulated GPU, where the failing batch is late and comes from
worker processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import replays
from kernels import Kernel
from replays import Snippet

from nb_assertdoc import diagnosis

LIBRARIES = ("transformers", "accelerate", "lightning", "torch_geometric", "sklearn")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs the extra `frameworks`: {', '.join(MISSING)}"
)
COMMON = """
import logging, warnings
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
warnings.filterwarnings("ignore")
"""

TEXTS = """
class Texts(Dataset):
    def __init__(self, rows, label=None, token=None, at=0):
        g = torch.Generator().manual_seed(rows)
        self.ids = torch.randint(1, 50, (rows, 9), generator=g)
        self.labels = torch.randint(0, 3, (rows,), generator=g).tolist()
        if label is not None:
            self.labels[at] = label
        if token is not None:
            self.ids[at, 4] = token
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}
"""

BERT = """
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=16, num_labels=3,
)
"""

TRAINER = """
from transformers import Trainer, TrainingArguments
def accuracy(p):
    from sklearn.metrics import accuracy_score, f1_score
    predicted = p.predictions.argmax(-1)
    return {
        "accuracy": accuracy_score(p.label_ids, predicted),
        "f1": f1_score(p.label_ids, predicted, average="macro", zero_division=0),
    }
def trainer_of(train, valid, **more):
    given = dict(
        output_dir="out", max_steps=6, per_device_train_batch_size=4, seed=3, report_to=[],
        fp16=True, gradient_accumulation_steps=2, warmup_steps=2, logging_steps=2,
        eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
    )
    return Trainer(
        model=BertForSequenceClassification(config), args=TrainingArguments(**{**given, **more}),
        train_dataset=train, eval_dataset=valid, compute_metrics=accuracy,
    )
"""

ACCELERATE = """
from accelerate import Accelerator
from transformers import get_linear_schedule_with_warmup
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
def prepared(train, valid, workers=0):
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 20)
    return accelerator.prepare(
        model, optimizer, schedule,
        DataLoader(train, batch_size=4, shuffle=True, num_workers=workers),
        DataLoader(valid, batch_size=4),
    )
def train(model, optimizer, schedule, batches):
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
def validate(model, batches):
    model.eval()
    right = total = 0
    for batch in batches:
        with torch.no_grad():
            out = model(**batch)
        found, labels = accelerator.gather_for_metrics((out.logits.argmax(-1), batch["labels"]))
        right += (found == labels).sum().item()
        total += len(labels)
    return right / total
"""

LIGHTNING = """
import lightning as L
from torchmetrics.classification import MulticlassAccuracy
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(50, 16)
        hidden = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(hidden, nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3)
    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))
    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch["input_ids"]), batch["labels"])
        self.log("loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, index):
        logits = self(batch["input_ids"])
        self.log("val_loss", F.cross_entropy(logits, batch["labels"]), prog_bar=True)
        self.accuracy(logits, batch["labels"])
        self.log("val_accuracy", self.accuracy)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]
def fit(train, valid, workers=0, **more):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    given = dict(
        accelerator="gpu", devices=1, precision="16-mixed", max_epochs=2, gradient_clip_val=1.0,
        accumulate_grad_batches=2, num_sanity_val_steps=0, enable_model_summary=False,
        callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")],
    )
    trainer = L.Trainer(**{**given, **more})
    model = Classifier()
    trainer.fit(
        model,
        DataLoader(train, batch_size=4, shuffle=True, num_workers=workers),
        DataLoader(valid, batch_size=4),
    )
    return trainer, model
"""

GRAPHS = """
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool
class Net(nn.Module):
    def __init__(self, *sizes, conv=GCNConv):
        super().__init__()
        self.first, self.second = conv(sizes[0], sizes[1]), conv(sizes[1], sizes[2])
    def forward(self, x, edge_index):
        x = F.dropout(F.relu(self.first(x, edge_index)), training=self.training)
        return self.second(x, edge_index)
def graph(nodes, bad_edge=None, bad_label=None):
    g = torch.Generator().manual_seed(nodes)
    edges = torch.randint(0, nodes, (2, 4 * nodes), generator=g)
    y = torch.randint(0, 3, (nodes,), generator=g)
    if bad_edge is not None:
        edges[0, 5] = bad_edge
    if bad_label is not None:
        y[2] = bad_label
    mask = torch.rand(nodes, generator=g) < 0.8
    mask[2] = True
    return Data(x=torch.randn(nodes, 8, generator=g), edge_index=edges, y=y, train_mask=mask)
def train_on(data, conv=GCNConv, epochs=3):
    data = data.to("cuda")
    net = Net(8, 16, 3, conv=conv).to("cuda")
    optimizer = torch.optim.Adam(net.parameters(), weight_decay=5e-4)
    for epoch in range(epochs):
        net.train()
        optimizer.zero_grad()
        out = net(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
    net.eval()
    found = net(data.x, data.edge_index).argmax(1)
    return (found == data.y).float().mean().item()
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = Net(8, 16, 16), nn.Linear(16, 2)
    def forward(self, batch):
        return self.head(global_mean_pool(self.net(batch.x, batch.edge_index), batch.batch))
def train_pooled(labels):
    graphs = [graph(5 + n) for n in range(len(labels))]
    for g, label in zip(graphs, labels):
        g.y = torch.tensor([label])
    model = Pooled().to("cuda")
    for batch in GraphLoader(graphs, batch_size=4):
        batch = batch.to("cuda")
        F.cross_entropy(model(batch), batch.y).backward()
"""


@dataclass(frozen=True)
class Planted:
    """A cell with one bad value, and what is to be said of it."""

    cell: str
    op: str
    value: int
    cause: str
    line: str  # text of the faulty line
    module: str | None = None
    row: int | None = None  # of the data set


HF = COMMON + TEXTS + BERT + TRAINER
ACC = COMMON + TEXTS + BERT + ACCELERATE
PL = COMMON + TEXTS + LIGHTNING
PYG = COMMON + GRAPHS

PLANTED = {
    "trainer, training": Planted(
        HF + "trainer_of(Texts(16, label=3, at=5), Texts(8), dataloader_num_workers=2).train()",
        "cross_entropy",
        3,
        "label_ge_num_classes",
        "trainer_of(Texts(16,",
        row=5,
    ),
    "trainer, validation": Planted(
        HF + "trainer_of(Texts(16), Texts(8, token=50, at=6)).train()",
        "embedding",
        50,
        "token_id_ge_vocab",
        "trainer_of(Texts(16)",
        "bert.embeddings.word_embeddings",
        row=6,
    ),
    "accelerate, validation": Planted(
        ACC
        + """
data = Texts(16), Texts(8, label=-1, at=7)
model, optimizer, schedule, batches, valid = prepared(*data, workers=2)
train(model, optimizer, schedule, batches)
validate(model, valid)
""",
        "cross_entropy",
        -1,
        "label_negative_sentinel",
        "out = model(**batch)",
        "model",
        row=7,
    ),
    "lightning, training": Planted(
        PL + "fit(Texts(16, token=77, at=3), Texts(8), workers=2)",
        "embedding",
        77,
        "token_id_ge_vocab",
        "return self.head(self.embed(ids).mean(1))",
        "model.embed",
        row=3,
    ),
    "lightning, validation": Planted(
        PL + "fit(Texts(16), Texts(8, label=3, at=5))",
        "cross_entropy",
        3,
        "label_ge_num_classes",
        'self.log("val_loss", F.cross_entropy(logits',
        "model",
        row=5,
    ),
    "geometric, edges": Planted(
        PYG + "train_on(graph(20, bad_edge=20), epochs=1)",
        "index",
        20,
        "node_index_ge_num_nodes",
        "F.relu(self.first(x, edge_index))",
        "net.first",
    ),
    "geometric, attention": Planted(
        PYG + "train_on(graph(20, bad_edge=25), GATConv, epochs=1)",
        "index_select",
        25,
        "node_index_ge_num_nodes",
        "F.relu(self.first(x, edge_index))",
        "net.first",
    ),
    "geometric, labels": Planted(
        PYG + "train_on(graph(20, bad_label=3), SAGEConv, epochs=1)",
        "cross_entropy",
        3,
        "label_ge_num_classes",
        "loss = F.cross_entropy(out[data.train_mask]",
    ),
    "geometric, many graphs": Planted(
        PYG + "train_pooled([0, 1, 1, 0, 1, 0, 2, 1])",
        "cross_entropy",
        2,
        "label_ge_num_classes",
        "F.cross_entropy(model(batch), batch.y).backward()",
        row=6,
    ),
    "geometric, more graphs than said": Planted(
        PYG
        + """
from torch_geometric.nn import global_add_pool
member = torch.tensor([0, 0, 1, 2, 2, 3]).cuda()
pooled = global_add_pool(torch.ones(6, 4).cuda(), member, size=3)
""",
        "scatter_add_",
        3,
        "group_id_ge_num_groups",
        "global_add_pool(torch.ones(6, 4)",
    ),
    "geometric, ids of shape [nodes, 1]": Planted(
        PYG
        + """
emb, layer = torch.nn.Embedding(9, 4).cuda(), SAGEConv(4, 4).cuda()
h = emb(torch.tensor([[3], [5]]).cuda())
layer(h, torch.tensor([[1], [0]]).cuda())
""",
        "index_select",
        1,
        "node_features_extra_dimension",
        "layer(h, torch.tensor(",
    ),
}

CLEAN = {
    "trainer": HF
    + """
trainer = trainer_of(Texts(16), Texts(8), load_best_model_at_end=True)
trainer.train()
found = trainer.evaluate()
predicted = trainer.predict(Texts(8)).predictions.argmax(-1)
trainer.save_model("best")
said = [sorted(found), list(predicted.shape)]
""",
    "trainer, generation": COMMON
    + """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
)).to("cuda").eval()
ids = torch.randint(1, 40, (2, 5), device="cuda")
out = model.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0)
assert out.shape[0] == 2 and out.shape[1] <= 11
""",
    "accelerate": ACC
    + """
model, optimizer, schedule, batches, valid = prepared(Texts(16), Texts(8))
for epoch in range(2):
    train(model, optimizer, schedule, batches)
    accelerator.print(validate(model, valid))
accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
""",
    "lightning": PL
    + """
trainer, model = fit(Texts(16), Texts(8))
found = trainer.validate(model, DataLoader(Texts(8), batch_size=4), verbose=False)
said = sorted(found[0])
trainer.predict(model.float().eval(), DataLoader(Texts(8).ids, batch_size=4))
""",
    "geometric": PYG
    + """
for conv in (GCNConv, SAGEConv, GATConv):
    train_on(graph(20), conv)
train_pooled([0, 1, 1, 0, 1, 0, 0, 1])
""",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snippet]:
    """All cells, in one worker."""
    texts = {f"planted {n}": planted.cell for n, planted in PLANTED.items()}
    texts |= {f"clean {n}": text for n, text in CLEAN.items()}
    texts = {name: text.strip() for name, text in texts.items()}
    return replays.run_each(texts, tmp_path_factory.mktemp("frameworks"), seconds=240.0)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(ran: dict[str, Snippet], name: str) -> None:
    planted, snippet = PLANTED[name], ran[f"planted {name}"]
    first = snippet.observed[0]
    finding = first.finding
    assert (finding.op, finding.bad_values) == (planted.op, (planted.value,))
    assert planted.line in finding.location.source
    assert diagnosis.diagnose(first)[0].key == planted.cause
    assert first.unknown == ()
    if planted.module is not None:
        assert finding.module is not None
        assert finding.module.endswith(planted.module)
    if planted.row is not None:
        assert finding.step is not None
        assert finding.step.dataset_indices == (planted.row,)
    values = {value for o in snippet.observed for value in o.finding.bad_values}
    assert values == {planted.value}  # what follows of it, and nothing else


@pytest.mark.parametrize("name", CLEAN)
def test_clean_cell_ends_clean(ran: dict[str, Snippet], name: str) -> None:
    snippet = ran[f"clean {name}"]
    assert snippet.error == ""
    assert snippet.observed == ()


def test_evaluation_gives_its_figures(ran: dict[str, Snippet]) -> None:
    """Made-up values come through the libraries' own metrics."""
    names, shape = ran["clean trainer"].said
    assert {"eval_accuracy", "eval_f1", "eval_loss"} <= set(names)
    assert shape == [8]
    assert ran["clean lightning"].said == ["val_accuracy", "val_loss"]


# ---- the same from a notebook, by the first replay


@dataclass(frozen=True)
class Late:
    """The same fault in one late batch of a notebook's long loop."""

    prepare: str
    cell: str
    found: tuple[str, list[int], str]  # operator, values, cause
    row: int
    iteration: int | None = None  # where the loop does not shuffle


LATE = {
    "trainer": Late(
        HF,
        """
trainer = trainer_of(
    Texts(160, label=3, at=77), Texts(8), dataloader_num_workers=2, max_steps=20, eval_steps=99,
    save_steps=99,
)
trainer.train()
""",
        ("cross_entropy", [3], "label_ge_num_classes"),
        77,
    ),
    "accelerate": Late(
        ACC
        + "parts = prepared(Texts(160, token=55, at=99), Texts(8), workers=2)\n"
        + "model, optimizer, schedule, batches, valid = parts",
        """
for epoch in range(2):
    train(model, optimizer, schedule, batches)
    print(validate(model, valid))
""",
        ("embedding", [55], "token_id_ge_vocab"),
        99,
    ),
    "lightning": Late(
        PL,
        "fit(Texts(32), Texts(160, label=3, at=118), workers=2)",
        ("cross_entropy", [3], "label_ge_num_classes"),
        118,
        29,
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_failing_batch_in_a_notebook(name: str, start_kernel: Callable[..., Kernel]) -> None:
    late = LATE[name]
    kernel = start_kernel(simulated_gpu=True, extension=True)
    prepared = kernel.run(late.prepare, timeout=240)
    assert prepared.error is None, prepared.text
    outcome = kernel.run(late.cell, timeout=280)
    report = outcome.report
    finding = report["finding"]
    assert finding is not None, outcome.text
    found = (finding["op"], finding["bad_values"], report["cause"]["key"])
    assert found == late.found
    assert finding["step"]["dataset_indices"] == [late.row]
    assert late.iteration in (None, finding["step"]["iteration"])
    (replay,) = report["replays"]
    assert (replay["engine"], replay["outcome"]) == ("ghost", "fault")
    assert report["confidence"] == "certain"
