"""Writing a capsule beside a genuinely dead CUDA context makes no CUDA call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAKECUDA = Path(__file__).resolve().parent.parent / "fakecuda"

SOURCE = """
import sys
from pathlib import Path
import fakecuda
import torch
from torch import nn
from nb_assertdoc import salvage

class Keeps:
    def __init__(self, x): self.x = x
    def __getstate__(self): return {"x": self.x.cpu()}

model = nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5)).cuda()
model[1].weight_hh_l0 = nn.Parameter(torch.zeros(16, 4, device="cuda"))  # flat weights are stale
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
ids = torch.arange(4, device="cuda")
scaler.scale(model[2](model[0](ids)).sum()).backward()
scaler.step(optimizer)
integer_copies = {id(ids): ids.cpu()}
logits = model[0](ids)
keeps = Keeps(ids)
stream, event = torch.cuda.Stream(), torch.cuda.Event()
generator = torch.Generator(device="cuda")
pinned = torch.arange(8).pin_memory()
moved = pinned.to("cuda", non_blocking=True)
sparse = torch.eye(3, device="cuda")
storage = ids.untyped_storage()
packed = {"state": model.state_dict(), "shape": ids.shape}
everything = {k: v for k, v in globals().items() if not k.startswith("__")}
fakecuda.kill()
before = fakecuda.calls_after_death()
saved = salvage.write(
    Path(sys.argv[1]), globals(), list(everything), integer_copies=integer_copies,
    seconds=30, max_bytes=10**8,
)
after = fakecuda.calls_after_death()
print(sorted(lost.what for lost in saved.lost), after - before)
read = {}
salvage.read(Path(sys.argv[1]), read)
assert read["ids"].tolist() == [0, 1, 2, 3] and read["pinned"].tolist() == list(range(8))
assert read["optimizer"].param_groups[0]["params"][0] is read["model"][0].weight
print("read")
sys.stdout.flush()
import os
os._exit(0)  # a normal exit frees the pinned tensor, which aborts
"""


@pytest.mark.skipif(not os.environ.get("FAKECUDA_BUILD"), reason="a real GPU can't be asked")
def test_no_cuda_call(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(FAKECUDA), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, str(tmp_path / "capsule")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "['keeps (Keeps)', 'storage (UntypedStorage)'] 0",
        "read",
    ]
