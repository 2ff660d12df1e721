"""The rules of ghosts, in real workers: faults are found, and what is unknown never is one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import replays
from replays import Snippet

START = """\
import copy, json, math, pickle, random
import numpy as np
import torch, torch.nn.functional as F
from torch import nn
D = "cuda"
"""

# Each runs to its end, and its last statement alone holds a fault: operator and values.
PLANTED = {
    "leaving": (
        "embedding",
        (12,),
        """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    loss = F.mse_loss(m(x), torch.zeros(5, 9, device=D))
    l = [
        loss.item(),
        float(loss),
        int(loss),
        bool(loss),
        m(x).tolist()[0][0],
        m(x).detach().cpu().numpy().sum(),
        f"{loss:.3f} {loss.item():.4f} {loss}",
        "{}".format(loss),
        "%.3f" % loss,
        "%.3f" % loss.item(),
        repr(loss),
        str(m(x)),
        round(loss.item(), 3),
        round(float(loss), 3),
    ]
    print(loss, l)
    print(f"{loss.item():>10.2e}")
    np.mean([loss.item() for _ in range(3)])
    np.array(m(x).detach().cpu())
    np.asarray(loss.detach().cpu())
    a = m(x).argmax(1).tolist()
    sum(a)
    a[0]
    int(m(x).argmax())
    d = {0: "a", 1: "b"}
    d[m(x).argmax().item()]
    max(loss.item(), 3)
    min([loss.item(), loss.item()])
    sorted([loss.item(), 2.0])
    sum([loss.item()] * 3) / 3
    math.exp(loss.item())
    math.sqrt(loss.item())
    math.log(loss)
    torch.tensor([loss.item(), 3.0])
    torch.tensor([loss, loss])
    torch.tensor(a)
    torch.stack([loss, loss]).mean().item()
    complex(loss.item())
    json.dumps({"loss": loss.item(), "a": a})
    pickle.loads(pickle.dumps(loss.item()))
    copy.deepcopy(loss.detach())
    range(int(loss))
    list(range(m(x).argmax()))
    len(m(x))
    [r for r in m(x)]
    m(x).shape
    loss.data
    loss.detach().cpu().item()
    float(m(x).max())
    m(x).max().cpu().numpy().item()
    (m(x) > 0).float().mean().item()
    loss.cpu().detach().numpy() + 1
    (m(x).argmax(1) == torch.zeros(5, device=D)).sum().item() / 5

    F.embedding(torch.tensor([12], device=D), torch.zeros(9, 2, device=D))
    """,
    ),
    "health": (
        "embedding",
        (12,),
        """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    loss = m(x).sum()
    assert not torch.isnan(loss)
    assert torch.isfinite(loss)
    assert torch.isfinite(m(x)).all()
    assert not torch.isnan(m(x)).any()
    assert not torch.isinf(loss).item()
    assert not (loss == float("inf"))
    assert not (m(x) != m(x)).any()
    assert not math.isnan(loss.item()) and math.isfinite(loss)
    assert not torch.isnan(m(x)).sum().item()
    assert not torch.isnan(m(x)).any().item()
    assert loss == loss
    if not torch.isfinite(loss):
        raise ValueError
    assert not torch.any(torch.isnan(m(x)))
    assert torch.all(torch.isfinite(m(x)))
    assert not np.isnan(loss.item())
    assert not np.isnan(m(x).detach().cpu().numpy()).any()
    F.embedding(torch.tensor([12], device=D), torch.zeros(9, 2, device=D))
    """,
    ),
    "recurrent": (
        "embedding",
        (5,),
        """
    for R in (nn.LSTM, nn.GRU, nn.RNN):
        r = R(4, 5, 2, batch_first=True, bidirectional=True, dropout=0.1).to(D)
        x = torch.randn(3, 6, 4, device=D)
        y, h = r(x)
        y, h = r(x, h)
        p = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([6, 4, 2]), batch_first=True, enforce_sorted=False
        )
        y, h = r(p)
        z, n = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        assert n.tolist() == [6, 4, 2], n
        z.sum().backward()
    for C in (nn.LSTMCell, nn.GRUCell):
        c = C(4, 5).to(D)
        c(torch.randn(3, 4, device=D))
    s = nn.utils.rnn.pad_sequence([torch.randn(3, 4), torch.randn(2, 4)], batch_first=True).to(
        D
    )
    r = nn.LSTM(4, 5).to(D)
    r.flatten_parameters()
    r(s)
    e = nn.Embedding(5, 4).to(D)
    y, h = nn.LSTM(4, 5, batch_first=True).to(D)(e(torch.tensor([[0, 1], [4, 5]], device=D)))
    """,
    ),
    "autograd": (
        "cross_entropy",
        (3,),
        """
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * y


    from torch.utils.checkpoint import checkpoint

    m = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(D)
    x = torch.randn(6, 4, device=D)
    seen = []
    m[0].register_forward_hook(lambda mod, i, o: seen.append(o.shape))
    m[0].register_forward_pre_hook(lambda mod, i: None)
    m[2].register_full_backward_hook(lambda mod, gi, go: seen.append(go[0].shape))
    y = Fn.apply(m(x))
    y.register_hook(lambda g: g * 2)
    y.sum().backward()
    y = checkpoint(m, x, use_reentrant=False)
    y.sum().backward()
    y = checkpoint(m, x.requires_grad_(), use_reentrant=True)
    y.sum().backward()
    assert len(seen) >= 4, seen
    with torch.no_grad():
        m(x)
    with torch.inference_mode():
        m(x)
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    nn.utils.clip_grad_value_(m.parameters(), 1.0)
    g = torch.autograd.grad(m(x).sum(), list(m.parameters()), create_graph=True)
    sum((t**2).sum() for t in g).backward()
    tot = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)
    print(tot.item())
    F.cross_entropy(m(x), torch.tensor([0, 1, 2, 3, 0, 1], device=D)).backward()
    """,
    ),
    "mixed precision": (
        "cross_entropy",
        (3,),
        """
    m = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).to(D)
    o = torch.optim.AdamW(m.parameters())
    for S_ in (lambda: torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler):
        s = S_()
        for ctx in (
            torch.autocast("cuda", dtype=torch.float16),
            torch.amp.autocast("cuda"),
            torch.cuda.amp.autocast(),
            torch.autocast("cuda", dtype=torch.bfloat16),
        ):
            o.zero_grad(set_to_none=True)
            with ctx:
                l = F.cross_entropy(
                    m(torch.randn(5, 4, device=D)), torch.tensor([0, 1, 2, 0, 1], device=D)
                )
            s.scale(l).backward()
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            s.step(o)
            s.update()
    s.get_scale()
    s.state_dict()
    h = m.half()
    h(torch.randn(5, 4, device=D).half())
    b = m.bfloat16()
    b(torch.randn(5, 4, device=D, dtype=torch.bfloat16)).float()
    m.float()
    with torch.autocast("cuda"):
        l = F.cross_entropy(
            m(torch.randn(5, 4, device=D)), torch.tensor([0, 1, 2, 0, 3], device=D)
        )
    """,
    ),
    "training": (
        "cross_entropy",
        (3,),
        """
    m = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4, 3),
    ).to(D)
    ema = copy.deepcopy(m)
    for p in ema.parameters():
        p.requires_grad_(False)
    avg = torch.optim.swa_utils.AveragedModel(m)
    for O in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
    ):
        o = O(m.parameters(), lr=0.1)
        sch = [
            torch.optim.lr_scheduler.StepLR(o, 1),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
            torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
            torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        ]
        x = torch.randn(4, 3, 8, 8).to(D)
        y = torch.tensor([0, 1, 2, 1]).to(D)
        l = F.cross_entropy(m(x), y)
        o.zero_grad()
        l.backward()
        o.step()
        for q in sch:
            q.step(l.item()) if isinstance(
                q, torch.optim.lr_scheduler.ReduceLROnPlateau
            ) else q.step()
        o.param_groups[0]["lr"]
        sd = o.state_dict()
        o.load_state_dict(sd)
        avg.update_parameters(m)
        with torch.no_grad():
            for a, b in zip(ema.parameters(), m.parameters()):
                a.mul_(0.99).add_(b, alpha=0.01)
                a.data = 0.9 * a.data + 0.1 * b.data
            for a, b in zip(ema.buffers(), m.buffers()):
                a.copy_(b)
    oc = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD(m.parameters(), lr=0.1), 0.1, total_steps=5
    )
    oc.step()
    lb = torch.optim.LBFGS(m.parameters())
    calls = []


    def closure():
        calls.append(1)
        lb.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        return l


    lb.step(closure)
    assert calls
    sd = m.state_dict()
    m.load_state_dict(sd)
    ema.load_state_dict({k: v.cpu() for k, v in sd.items()})
    assert m[1].num_batches_tracked.item() >= 8, m[1].num_batches_tracked
    m.eval()
    m(x)
    m.train()
    torch.save(m.state_dict(), "best.pt")
    m.load_state_dict(torch.load("best.pt"))
    m.load_state_dict(torch.load("best.pt", map_location=D))
    torch.save({"model": m.state_dict(), "opt": o.state_dict(), "epoch": 3}, "ck.pt")
    c = torch.load("ck.pt", weights_only=False)
    m.load_state_dict(c["model"])
    assert c["epoch"] == 3
    for p in m.parameters():
        nn.init.constant_(p, 1.0)
    m.apply(lambda q: nn.init.xavier_uniform_(q.weight) if isinstance(q, nn.Linear) else None)
    sum(p.numel() for p in m.parameters())
    sum(p.norm().item() for p in m.parameters())
    F.cross_entropy(m(x), y + 1)
    """,
    ),
    "solid masks": (
        "cross_entropy",
        (6,),
        """
    x = torch.arange(6, device=D)
    mask = torch.tensor([True, False, True, True, False, False], device=D)
    m = nn.Linear(4, 6).to(D)
    h = m(torch.randn(6, 4, device=D))
    sel = h[mask]
    assert sel.shape == (3, 6), sel.shape
    y = torch.tensor([0, 5, 6], device=D)
    h[:, mask]
    h[mask, :2]
    h[mask][:, mask]
    h.masked_fill(mask, 0.0)
    h.masked_fill_(mask[:, None], -1e9)
    torch.where(mask, h, 0.0)
    h[mask] = 0.0
    h[mask] = sel
    h[mask, 0] += 1
    s = h.masked_select(mask)
    F.cross_entropy(sel, y)
    """,
    ),
    "data parallel": (
        "embedding",
        (7,),
        """
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(7, 4)
            self.l = nn.Linear(4, 3)
            self.bn = nn.BatchNorm1d(3)
            self.register_buffer("b", torch.ones(3))

        def forward(self, i):
            return self.bn(self.l(self.e(i)) + self.b)


    m = nn.DataParallel(M().to(D), device_ids=[0, 1])
    assert torch.cuda.device_count() == 2
    y = m(torch.arange(6).to(D))
    y.sum().backward()
    assert y.shape == (6, 3)
    m.module.state_dict()
    nn.DataParallel(M()).cuda()
    m(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]).to(D))
    """,
    ),
    "attention": (
        "embedding",
        (10,),
        """
    x = torch.randn(2, 5, 8, device=D)
    a = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1).to(D)
    pad = torch.zeros(2, 5, dtype=torch.bool, device=D)
    pad[1, 3:] = True
    o, w = a(x, x, x, key_padding_mask=pad)
    o.sum().backward()
    a(
        x,
        x,
        x,
        attn_mask=torch.triu(torch.full((5, 5), float("-inf"), device=D), 1),
        need_weights=False,
    )
    q = nn.Linear(8, 8).to(D)(x).view(2, 5, 2, 4).transpose(1, 2)
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    F.scaled_dot_product_attention(
        q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool, device=D)
    )
    enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to(D)
    enc(x, src_key_padding_mask=pad)
    enc.eval()
    with torch.no_grad():
        enc(x, src_key_padding_mask=pad)
    t = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).to(D)
    t(x, x, tgt_mask=t.generate_square_subsequent_mask(5, device=D))
    t(x, x, tgt_mask=t.generate_square_subsequent_mask(5).to(D))
    e = nn.Embedding(10, 8).to(D)
    enc(e(torch.tensor([[1, 10]], device=D)))
    """,
    ),
    "layers and losses": (
        "embedding_bag",
        (10,),
        """
    x = torch.randn(2, 3, 16, 16, device=D)
    c = nn.Conv2d(3, 4, 3, 2, 1).to(D)(x)
    nn.ConvTranspose2d(4, 3, 2, 2).to(D)(c)
    nn.MaxPool2d(2)(c)
    nn.AvgPool2d(2)(c)
    F.adaptive_max_pool2d(c, 1)
    p, i = F.max_pool2d(c, 2, return_indices=True)
    F.max_unpool2d(p, i, 2)
    F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
    F.interpolate(c, size=(5, 5))
    nn.Upsample(scale_factor=2)(c)
    nn.PixelShuffle(2)(c)
    nn.Conv1d(3, 4, 3).to(D)(torch.randn(2, 3, 9, device=D))
    nn.Conv3d(1, 2, 3).to(D)(torch.randn(1, 1, 5, 5, 5, device=D))
    F.grid_sample(c, torch.zeros(2, 4, 4, 2, device=D), align_corners=False)
    F.unfold(c, 2)
    F.pad(c, (1, 1, 1, 1), mode="reflect")
    nn.GroupNorm(2, 4).to(D)(c)
    nn.InstanceNorm2d(4).to(D)(c)
    nn.SyncBatchNorm(4)
    nn.BatchNorm2d(4).to(D)(c)
    eb = nn.EmbeddingBag(10, 3, mode="mean").to(D)
    eb(torch.tensor([1, 2, 4], device=D), torch.tensor([0, 2], device=D))
    eb(torch.tensor([[1, 2], [3, 9]], device=D))
    eb(
        torch.tensor([1, 2], device=D),
        torch.tensor([0], device=D),
    )
    nn.EmbeddingBag(10, 3, mode="sum").to(D)(
        torch.tensor([[1, 2]], device=D), per_sample_weights=torch.ones(1, 2, device=D)
    )
    w = nn.Linear(3, 3).to(D)(torch.randn(4, 3, device=D))
    torch.cdist(w, w)
    torch.einsum("bi,bj->ij", w, w)
    torch.bmm(w[None], w[None].mT)
    w @ w.T
    torch.baddbmm(w[None], w[None].mT.new_zeros(1, 4, 4), w[None])
    w.softmax(-1).log().clamp(min=-5)
    F.cosine_similarity(w, w)
    F.normalize(w)
    w.sort()
    w.topk(2)
    w.cumsum(0)
    torch.linalg.norm(w)
    torch.linalg.inv(w.T @ w + torch.eye(3, device=D))
    torch.linalg.svd(w)
    torch.linalg.eigh(w.T @ w)
    torch.linalg.cholesky(w.T @ w)
    F.kl_div(w.log_softmax(-1), w.softmax(-1), reduction="batchmean")
    F.binary_cross_entropy_with_logits(w, torch.ones(4, 3, device=D))
    F.mse_loss(w, w)
    F.smooth_l1_loss(w, w)
    F.binary_cross_entropy(w.sigmoid(), torch.ones(4, 3, device=D))
    nn.CTCLoss()(
        torch.randn(8, 2, 5, device=D).log_softmax(-1),
        torch.tensor([[1, 2], [3, 4]], device=D),
        torch.tensor([8, 8]),
        torch.tensor([2, 2]),
    )
    nn.TripletMarginLoss()(w, w, w)
    nn.CosineEmbeddingLoss()(w, w, torch.ones(4, device=D))
    nn.GaussianNLLLoss()(w, w, w.abs())
    nn.HuberLoss()(w, w)
    nn.PoissonNLLLoss()(w, w)
    torch.fft.rfft(w)
    torch.histc(w)
    torch.quantile(w, 0.5)
    w.median()
    w.std()
    torch.var_mean(w)
    torch.bincount(torch.tensor([1, 2], device=D))
    torch.multinomial(w.softmax(-1), 1)
    torch.distributions.Categorical(logits=w).sample()
    torch.distributions.Normal(w, 1.0).rsample()
    torch.distributions.Categorical(probs=w.softmax(-1)).log_prob(
        torch.tensor([0, 1, 2, 0], device=D)
    )
    torch.searchsorted(torch.arange(4.0, device=D), w)
    torch.bucketize(w, torch.arange(4.0, device=D))
    torch.scatter_add(
        torch.zeros(4, 3, device=D), 0, torch.zeros(4, 3, dtype=torch.long, device=D), w
    )
    torch.zeros(4, 3, device=D).index_add_(0, torch.tensor([0, 1, 2, 3], device=D), w)
    w.index_select(0, torch.tensor([1], device=D))
    torch.isin(w, torch.ones(1, device=D))
    w.unique()
    torch.roll(w, 1)
    w.flip(0)
    torch.kron(w, w)
    w.repeat_interleave(2, 0)
    torch.nan_to_num(w)
    w.new_tensor([1])
    torch.full_like(w, 1.0)
    torch.rand_like(w)
    torch.randn_like(w)
    w.bernoulli(0.3)
    torch.triu(w)
    torch.meshgrid(torch.arange(3, device=D), torch.arange(2, device=D), indexing="ij")
    torch.combinations(torch.arange(4, device=D))
    torch.block_diag(w, w)
    torch.trapz(w)
    torch.tensordot(w, w, dims=([0], [0]))
    torch.vmap(lambda r: r.sum())(w)
    torch.func.grad(lambda r: r.sum())(w)
    eb(torch.tensor([1, 10], device=D), torch.tensor([0], device=D))
    """,
    ),
    "compiled": (
        "cross_entropy",
        (3,),
        """
    m = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(D)
    c = torch.compile(m)
    c(torch.randn(2, 4, device=D)).sum().backward()


    @torch.compile
    def f(x):
        return x * 2


    f(torch.randn(2, device=D))
    torch.compile(m, mode="max-autotune")(torch.randn(2, 4, device=D))
    m.compile()
    m(torch.randn(2, 4, device=D))
    F.cross_entropy(c(torch.randn(2, 4, device=D)), torch.tensor([0, 3], device=D))
    """,
    ),
    "metrics": (
        "cross_entropy",
        (3,),
        """
    class Accuracy:
        def __init__(self, n):
            self.n = n
            self.cm = torch.zeros(n, n, dtype=torch.long, device=D)
            self.correct = torch.tensor(0, device=D)
            self.total = 0

        def update(self, p, t):
            p = p.argmax(-1)
            self.correct += (p == t).sum()
            self.total += t.numel()
            idx = t * self.n + p
            self.cm += torch.bincount(idx, minlength=self.n**2)[: self.n**2].view(
                self.n, self.n
            )

        def compute(self):
            return self.correct.float() / self.total


    m = nn.Linear(4, 3).to(D)
    acc = Accuracy(3)
    ps, ts = [], []
    for _ in range(3):
        x, t = torch.randn(5, 4).to(D), torch.tensor([0, 1, 2, 0, 1]).to(D)
        o = m(x)
        acc.update(o, t)
        ps += o.argmax(1).cpu().numpy().tolist()
        ts += t.cpu().tolist()
        (o.argmax(1) == t).sum().item()
        torch.eq(o.argmax(1), t).float().mean().cpu().item()
    a = acc.compute().item()
    acc.cm.diag().float() / acc.cm.sum(1).clamp(min=1)
    best = 0.0
    if a > best:
        best = a
    try:
        from sklearn.metrics import (
            f1_score,
            accuracy_score,
            classification_report,
            roc_auc_score,
            confusion_matrix,
        )

        f1_score(ts, ps, average="macro")
        accuracy_score(t.cpu().numpy(), o.argmax(1).cpu().numpy())
        classification_report(ts, ps)
        confusion_matrix(ts, ps)
        roc_auc_score([0, 1, 0, 1, 1], o.softmax(1)[:, 1].detach().cpu().numpy())
        said = "sklearn"
    except ImportError:
        said = "no sklearn"
    F.cross_entropy(o, t + 1)
    """,
    ),
    "without a meta kernel": (
        "embedding",
        (12,),
        """
    @torch.library.custom_op("mine::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2


    lib = torch.library.Library("older", "DEF")
    lib.define("triple(Tensor x) -> Tensor")
    lib.impl("triple", lambda x: x * 3, "CPU")

    x = nn.Linear(6, 6).to(D)(torch.randn(8, 6, device=D))
    assert double(x).shape == torch.ops.older.triple(x.detach()).shape == x.shape
    torch.histc(x, bins=4)
    torch.nanmedian(x)
    x.kthvalue(2)
    torch.linalg.eigvals(x[:6])
    torch.linalg.lstsq(x, x)
    torch.quantile(x, 0.5)
    torch.geqrf(x)
    torch.pinverse(x)
    logits = torch.randn(5, 2, 4, device=D).log_softmax(2)
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    F.ctc_loss(logits, torch.tensor([[1, 2], [1, 3]]), *lengths)
    nn.Embedding(12, 2).to(D)(torch.tensor([12], device=D))
    """,
    ),
    "in place and views": (
        "embedding",
        (13,),
        """
    w = nn.Parameter(torch.randn(6, 4, device=D))
    with torch.no_grad():
        w[0].zero_()
        w.view(-1)[3:5].fill_(1)
        w.t().mul_(2)
        w.data[1:].copy_(w.data[:-1])
        w.index_fill_(0, torch.tensor([1], device=D), 2.0)
        torch.add(w, 1, out=w)
        w.unfold(0, 2, 2).add_(1)
        w.as_strided((2, 2), (1, 1)).add_(1)
    x = w.detach().clone()
    x[..., 0] += 1
    x.resize_(3, 8).transpose_(0, 1)
    x.squeeze_().unsqueeze_(0)
    assert x.shape == (1, 8, 3)
    first, second = w.unbind(1)[:2]
    ids = torch.arange(6, device=D)
    view = ids.view(2, 3)[1:]
    ids[4] = 12
    view += 1
    nn.Embedding(12, 2).to(D)(ids)
    """,
    ),
    "progress bars": (
        "embedding",
        (12,),
        """
    from tqdm import tqdm, trange
    from tqdm.auto import tqdm as auto

    m = nn.Linear(4, 4).to(D)
    bar = tqdm(range(3), desc="steps")
    for i in bar:
        loss = m(torch.randn(2, 4, device=D)).sum()
        bar.set_postfix(loss=loss.item(), tensor=loss)
        bar.set_description(f"loss {loss:.3f}")
        tqdm.write(f"{loss.item()}")
    for i in trange(2, leave=False):
        pass
    with auto(total=3) as counter:
        counter.update(1)
        counter.set_postfix_str("%.2f" % loss.item())
    nn.Embedding(12, 2).to(D)(torch.tensor([12], device=D))
    """,
    ),
    "gradients of inputs": (
        "cross_entropy",
        (3,),
        """
    m = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(D)
    x = torch.randn(6, 4).to(D)
    x.requires_grad_(True)
    F.cross_entropy(m(x), torch.tensor([0, 1, 2, 0, 1, 2], device=D)).backward()
    adv = x + 0.1 * x.grad.sign()
    y = torch.randn(6, 4).to(D).requires_grad_()
    g = torch.autograd.grad(m(y).sum(), y, create_graph=True)[0]
    ((g.norm(2, dim=1) - 1) ** 2).mean().backward()
    z = torch.randn(6, 4, device=D, requires_grad=True)
    m(z).sum().backward()
    z.grad.zero_()
    w = torch.randn(6, 4, device=D)
    w.requires_grad = True
    m(w).sum().backward()
    v = torch.autograd.Variable(torch.randn(6, 4, device=D), requires_grad=True)
    m(v).sum().backward()
    u = torch.zeros(6, 4, requires_grad=True)
    (m(u.to(D))).sum().backward()
    assert u.grad is not None and u.grad.device.type == "cpu"
    delta = torch.zeros_like(x, requires_grad=True)
    m(x + delta).sum().backward()
    delta.data = (delta + delta.grad.sign()).clamp(-1, 1)
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    (a * 2).sum().backward()
    F.cross_entropy(m(adv), torch.tensor([0, 1, 2, 0, 1, 3], device=D))
    """,
    ),
}

# What was not computed reaches an index or a bound, on the way through Python too.
UNKNOWN = {
    "indices": """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    table = nn.Embedding(3, 2).to(D)
    i = m(x).argmax(-1)
    table(i)
    table(m(x).topk(2).indices)
    table((m(x) > 0).nonzero()[:, 0])
    mask = m(x)[:, 0] > 0
    y = torch.arange(5, device=D)
    table(y[mask])
    u = torch.unique(m(x).argmax(-1))
    table(u)
    solid = torch.zeros(5, dtype=torch.long, device=D)
    solid += 7
    solid[:] = m(x).argmax(-1)
    table(solid)
    solid2 = torch.full((5,), 9, device=D)
    solid2.copy_(i)
    table(solid2)
    table(solid2.cpu().to(D))
    n = (m(x) > 0).nonzero().size(0)
    table2 = torch.arange(n, device=D)
    F.embedding(table2, torch.zeros(3, 2, device=D))
    F.cross_entropy(m(x), i + 100)
    F.one_hot(i, 3)
    torch.zeros(3, device=D)[i]
    torch.zeros(5, 3, device=D).gather(1, i[:, None])
    k = int(i.max())
    F.embedding(torch.tensor([k + 5], device=D), torch.zeros(9, 2, device=D))
    """,
    "sizes": """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    kept = x[m(x)[:, 0] > 0]
    y = torch.tensor([0, 4], device=D)
    kept[y]
    z = m(x)[m(x).argmax(-1) == 3]
    z[torch.tensor([7], device=D)]
    sel = torch.masked_select(x, m(x)[:, :4] > 0)
    sel[torch.tensor([25], device=D)]
    """,
    "numbers": """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    n = m(x).argmax(-1).max().item() + 1
    e = nn.Embedding(n, 3).to(D)
    e(torch.tensor([4], device=D))
    F.embedding(torch.arange(n + 20, device=D), torch.zeros(9, 2, device=D))
    ids = torch.arange(9, device=D)
    F.embedding(ids[:n] + n + 30, torch.zeros(9, 2, device=D))
    ids[:n][torch.tensor([5], device=D)]
    F.embedding(torch.arange(5, device=D) + n * 7, torch.zeros(2, 2, device=D))
    F.one_hot(torch.tensor([5], device=D), n)
    torch.zeros(n, 3, device=D)[torch.tensor([3], device=D)]
    F.cross_entropy(torch.zeros(3, n, device=D), torch.tensor([1, 2, 3], device=D))
    F.embedding(torch.tensor([n + 4, 70], device=D), torch.zeros(9, 2, device=D))
    x.new_zeros(n)[torch.tensor([9], device=D)]
    F.embedding(torch.full((3,), n + 40, device=D), torch.zeros(9, 2, device=D))
    probs = m(x).softmax(-1)[0].tolist()
    F.embedding((torch.tensor(probs) * 100).long().to(D), torch.zeros(9, 2, device=D))
    lens = (m(x) > 0).sum(1)
    r = torch.repeat_interleave(torch.arange(5, device=D), lens)
    r[torch.tensor([90], device=D)]
    arr = m(x).detach().cpu().numpy()
    F.embedding(torch.from_numpy((arr * 100).astype(int)).to(D), torch.zeros(9, 2, device=D))
    F.embedding(torch.tensor(arr * 100).long().to(D), torch.zeros(9, 2, device=D))
    """,
}

CHOSEN = "a value that was not computed decided a branch"
OF_THE_GPU = "random numbers of the GPU, which the CPU cannot repeat"

# What the finding depends on was made up.
DOUBTFUL = {
    "floats": (
        CHOSEN,
        """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    loss = m(x).sum()
    if loss.item() < 0.5:
        pass
    if loss > 3:
        pass
    F.embedding(torch.tensor([12], device=D), torch.zeros(9, 2, device=D))
    """,
    ),
    "counts": (
        CHOSEN,
        """
    m = nn.Linear(4, 9).to(D)
    x = torch.randn(5, 4, device=D)
    correct = (m(x).argmax(-1) == 3).sum().item()
    if correct > 2:
        pass
    if 2 < correct / 5:
        pass
    acc = 100.0 * correct / 5
    F.embedding(torch.tensor([12], device=D), torch.zeros(9, 2, device=D))
    """,
    ),
    "randint": (
        OF_THE_GPU,
        """
    i = torch.randint(5, 9, (4,), device=D)
    F.embedding(i, torch.zeros(3, 2, device=D))
    """,
    ),
    "rand": (
        OF_THE_GPU,
        """
    i = (torch.rand(4, device=D) * 10).long() + 5
    F.embedding(i, torch.zeros(3, 2, device=D))
    """,
    ),
    "randperm": (
        OF_THE_GPU,
        """
    g = torch.Generator(device=D).manual_seed(3)
    i = torch.randperm(9, device=D)[:4]
    F.embedding(i + 5, torch.zeros(3, 2, device=D))
    """,
    ),
    "random_": (
        OF_THE_GPU,
        """
    x = torch.zeros(4, dtype=torch.long, device=D).random_(5, 9)
    F.embedding(x, torch.zeros(3, 2, device=D))
    """,
    ),
}

RANDOM = """
torch.manual_seed(7)
a = nn.Linear(10, 10)
b = nn.Embedding(6, 4)
c = nn.Conv2d(3, 4, 3)
d = nn.LSTM(3, 4)
nn.init.xavier_normal_(a.weight)
nn.init.kaiming_uniform_(c.weight)
nn.init.trunc_normal_(a.weight)
nn.init.orthogonal_(a.weight)
g = nn.Dropout(0.5)(torch.ones(50))
nn.MultiheadAttention(8, 2)
nn.Bilinear(2, 3, 4)
torch.randn(3, requires_grad=True)
p = torch.randperm(100).tolist()
x = torch.rand(7, device=D)
nn.Linear(4, 4, device=D)
F.dropout(torch.ones(9, device=D))
torch.randint(0, 5, (9,), device=D)
torch.randn(3, device=D).normal_()
torch.empty(3, device=D).uniform_()
nn.init.xavier_uniform_(nn.Linear(4, 4).to(D).weight)
q = torch.randperm(100).tolist()
r = torch.randint(0, 1000, (5,)).tolist()
said = [p, q, r, random.random() if random.seed(3) is None else 0]
"""

LOOPS = {  # the fault is in iteration 2; header of the innermost loop
    "for": (
        "for i in range(5):",
        """
    for i in range(5):
        n = i + 7
        F.embedding(torch.tensor([n], device=D), table)
    """,
    ),
    "while": (
        "while k < 5:",
        """
    k = 0
    while k < 5:
        F.embedding(torch.tensor([k + 7], device=D), table)
        k += 1
    """,
    ),
    "nested": (
        "for j in range(4):",
        """
    for i in range(3):
        for j in range(4):
            F.embedding(torch.tensor([(i == 1) * (j + 7)], device=D), table)
    """,
    ),
    "outer": (
        "for i in range(4):",
        """
    for i in range(4):
        for j in range(3):
            pass
        F.embedding(torch.tensor([i + 7], device=D), table)
    """,
    ),
    "one line": (
        "for i in range(5): F.embedding(torch.tensor([i + 7], device=D), table)",
        """
    for i in range(5): F.embedding(torch.tensor([i + 7], device=D), table)
    """,
    ),
    "generator": (
        "for v in numbers():",
        """
    def numbers():
        for k in range(9):
            yield k
    for v in numbers():
        F.embedding(torch.tensor([v + 7], device=D), table)
    """,
    ),
    "in a generator": (
        "for k in range(9):",
        """
    def rows():
        for k in range(9):
            yield F.embedding(torch.tensor([k + 7], device=D), table)
    list(rows())
    """,
    ),
    "continue": (
        "for i in range(6):",
        """
    for i in range(6):
        if i < 2:
            continue
        F.embedding(torch.tensor([i + 7], device=D), table)
    """,
    ),
    "else": (
        "for i in range(3):",
        """
    for j in range(2):
        pass
    else:
        for i in range(3):
            F.embedding(torch.tensor([i + 7], device=D), table)
    """,
    ),
    "long header": (
        "for i in range( 5, ):",
        """
    for i in range(
        5,
    ):
        F.embedding(torch.tensor([i + 7], device=D), table)
    """,
    ),
    "try": (
        "for i in range(5):",
        """
    for i in range(5):
        try:
            if i == 1:
                raise ValueError
            F.embedding(torch.tensor([i + 7], device=D), table)
        except ValueError:
            pass
    """,
    ),
    "function": (
        "for i in range(5):",
        """
    def step(n):
        return F.embedding(torch.tensor([n], device=D), table)
    def run():
        for i in range(5):
            step(i + 7)
    run()
    """,
    ),
    "again": (
        "for i in range(5):",
        """
    def run(a):
        for i in range(5):
            F.embedding(torch.tensor([a * (i + 7)], device=D), table)
    run(0)
    run(1)
    """,
    ),
    "async for": (
        "async for v in numbers():",
        """
    import asyncio, threading
    async def numbers():
        for k in range(9):
            yield k
    async def run():
        async for v in numbers():
            F.embedding(torch.tensor([v + 7], device=D), table)
    t = run()
    try:
        t.send(None)
    except StopIteration:
        pass
    """,
    ),
    "with": (
        "for i in range(5):",
        """
    for i in range(5):
        with torch.no_grad():
            F.embedding(torch.tensor([i + 7], device=D), table)
    """,
    ),
    "comprehension in a loop": (
        "for i in range(5):",
        """
    for i in range(5):
        [F.embedding(torch.tensor([n], device=D), table) for n in range(i + 6, i + 8)]
    """,
    ),
}

LOOP_FREE = """
[F.embedding(torch.tensor([n], device=D), table) for n in range(6, 10)]
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snippet]:
    """All snippets, in one worker with two pretended GPUs."""
    texts = {f"planted {n}": text for n, (_, _, text) in PLANTED.items()}
    texts |= {f"unknown {n}": text for n, text in UNKNOWN.items()}
    texts |= {f"doubtful {n}": text for n, (_, text) in DOUBTFUL.items()}
    texts |= {f"loop {n}": f"{TABLE}{textwrap.dedent(t)}" for n, (_, t) in LOOPS.items()}
    texts |= {"no loop": f"{TABLE}{LOOP_FREE}", "random": RANDOM}
    texts = {name: START + textwrap.dedent(text) for name, text in texts.items()}
    return replays.run_each(texts, tmp_path_factory.mktemp("ghosts"), device_count=2)


TABLE = "table = torch.zeros(9, 2, device=D)\n"


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found_and_nothing_else(ran: dict[str, Snippet], name: str) -> None:
    op, values, text = PLANTED[name]
    snippet = ran[f"planted {name}"]
    assert snippet.error == ""
    ((found_op, found_values, line),) = snippet.faults
    assert (found_op, found_values) == (op, values)
    if name == "data parallel":  # the fault is in a replica's thread, in the module's own line
        assert "self.e(i)" in snippet.observed[0].finding.location.source
        return
    last = ast.parse(START + textwrap.dedent(text)).body[-1]
    assert last.end_lineno is not None
    assert last.lineno <= line <= last.end_lineno


@pytest.mark.parametrize("name", PLANTED)
def test_healthy_checks_decide_nothing(ran: dict[str, Snippet], name: str) -> None:
    decisions = ran[f"planted {name}"].decisions
    assert bool(decisions) == (name == "leaving")  # it compares losses on purpose


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_is_never_a_fault(ran: dict[str, Snippet], name: str) -> None:
    snippet = ran[f"unknown {name}"]
    assert (snippet.error, snippet.faults) == ("", [])
    assert snippet.unchecked


@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubts_are_named(ran: dict[str, Snippet], name: str) -> None:
    snippet = ran[f"doubtful {name}"]
    assert snippet.error == ""
    (observed,) = snippet.observed
    assert observed.unknown
    assert all(why.startswith(DOUBTFUL[name][0]) for why in observed.unknown)


@pytest.mark.parametrize("name", LOOPS)
def test_iterations_are_counted(ran: dict[str, Snippet], name: str) -> None:
    snippet = ran[f"loop {name}"]
    assert snippet.error == ""
    step = snippet.observed[0].finding.step
    assert step is not None
    assert (step.loop, step.iteration) == (LOOPS[name][0], 2)


def test_a_comprehension_is_no_loop(ran: dict[str, Snippet]) -> None:
    (observed,) = ran["no loop"].observed
    assert observed.finding.bad_values == (9,)
    assert observed.finding.step is None


def test_random_numbers_of_the_cpu_are_the_hosts(ran: dict[str, Snippet]) -> None:
    """The host computes its weights, the replay does not: what is drawn next is the same."""
    host = (
        "from nb_assertdoc import devices\n"
        "devices.install(devices.Devices(), devices.Hooks())\n"
        f"{START}{RANDOM}\nprint(json.dumps(said))"
    )
    done = subprocess.run([sys.executable, "-c", host], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ran["random"].said


def test_a_loop_that_a_made_up_value_keeps_going_is_stopped(tmp_path: Path) -> None:
    evidence = replays.run(
        f"""{START}
model = nn.Linear(4, 1).to(D)
while model(torch.ones(1, 4, device=D)).item() > 0.5:
    pass
""",
        tmp_path / "order",
    )
    assert evidence.outcome == "stopped"
    assert any("keeps a loop going, In [1], line" in text for text in evidence.differences)


BROKEN = """
import dataclasses
import torch
from torch.nn import functional as F
from nb_assertdoc.indexing import table
D = "cuda"
table.__dict__.setdefault("kept", dict(table._OPERATORS))
table._OPERATORS.update(table.kept)
def find(op, arguments):
    raise KeyError("a bug of our own")
    yield
for name in BREAKS.split():
    table._OPERATORS[name] = dataclasses.replace(table._OPERATORS[name], find=find)
table._known.clear()
rows = torch.zeros(9, 4, device=D)
index = torch.tensor([1, 3], device=D)
"""
UNREAD = {  # aten operators whose row has a bug, their public name, a call that runs
    "embedding": ("embedding", "F.embedding(index, rows)"),
    "gather": ("gather", "rows.gather(0, index[:, None])"),
    "index": ("index", "rows[index]"),
    "index_select": ("index_select", "rows.index_select(0, index)"),
    "scatter": ("scatter", "rows.scatter(0, index[:, None], 1.0)"),
    "nll_loss_forward": ("nll_loss", "F.cross_entropy(rows[:2], index)"),
    "index_put_ _index_put_impl_": ("index_put_", "rows[index] = 1.0"),
    "bernoulli": ("bernoulli", "torch.bernoulli(rows)"),
}
MALFORMED = """
for call in (lambda: rows.gather(7, index[:, None]), lambda: F.embedding(index.float(), rows)):
    try:
        call()
    except (IndexError, RuntimeError):
        said = globals().get("said", 0) + 1
"""
NOTE = "a call of `{}` was not checked, it could not be read (KeyError: 'a bug of our own')"


@pytest.mark.parametrize("real", [False, True])
def test_a_call_that_could_not_be_read_is_told(tmp_path: Path, real: bool) -> None:
    """Where a row of the table has a bug: nothing beside such a call is certain."""
    later = "\nF.embedding(torch.tensor([9], device=D), rows)"
    texts = {f"clean {n}": (n, call) for n, (_, call) in UNREAD.items()}
    texts["fault"] = ("gather", UNREAD["gather"][1] + later)
    texts["malformed"] = ("", MALFORMED)
    cells = {n: f"BREAKS = {b!r}\n{BROKEN}\n{text}" for n, (b, text) in texts.items()}
    engine = {"engine": "cpu" if real else "ghost", "real_floats": real}
    ran = replays.run_each(cells, tmp_path / "order", **engine)

    assert {n: s.error for n, s in ran.items() if s.error} == {}
    for name, (op, _) in UNREAD.items():
        snippet = ran[f"clean {name}"]
        assert (snippet.unchecked, snippet.faults) == ((op,), [])
        assert snippet.differences[0] == NOTE.format(op)
    ((op, values, _),) = ran["fault"].faults
    assert (op, values) == ("embedding", (9,))
    assert ran["fault"].observed[0].unknown == (NOTE.format("gather"),)
    assert (ran["malformed"].said, ran["malformed"].unchecked) == (2, ())
