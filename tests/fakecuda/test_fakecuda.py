"""Shows that fakecuda does what README.md says. Run: python -m pytest test_fakecuda.py

A dead context never comes back, so each test body runs in a process of its own,
forked before CUDA starts. The parent only imports.
"""
import copy
import faulthandler
import functools
import os
import subprocess
import sys
import tempfile
import traceback

import fakecuda
import pytest
import torch
import torch._dynamo  # the optimizers import it; once here is quicker than in every child
import torch.nn.functional as F
from torch import nn

MESSAGE = (
    "CUDA error: device-side assert triggered\n"
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


def in_child(body, *args):
    """Runs body in a fork; returns its wait status and what it wrote to fd 2."""
    with tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            os.dup2(err.fileno(), 2)
            sys.stderr = open(2, "w", closefd=False)
            faulthandler.disable()  # pytest's would report the aborts that we want
            try:
                body(*args)
                os._exit(0)
            except SystemExit:
                raise
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        err.seek(0)
        return status, err.read().decode()


def forked(body):
    @functools.wraps(body)
    def test(*args, **kwargs):
        status, err = in_child(lambda: body(*args, **kwargs))
        assert status == 0, err
    return test


# ---- 1: a device ----

@forked
def test_device():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name(0) == "fakecuda (no GPU)"
    x = torch.empty(3, device="cuda")
    assert x.device == torch.device("cuda", 0) and x.is_cuda
    y = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(y.to("cuda").cpu(), y)
    assert torch.equal(y.to("cuda").T.cpu(), y.T)
    assert torch.equal(y.cuda().to(torch.int64).cpu(), y.long())


@forked
def test_allocator():
    before = torch.cuda.memory_allocated()
    x = torch.empty(1024, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4096
    del x
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() > 0
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda")
    torch.empty(3, device="cuda")  # not sticky


@forked
def test_pinned_memory_streams_and_events():
    p = torch.ones(4).pin_memory()
    assert p.is_pinned() and not torch.ones(4).is_pinned()
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        x = p.to("cuda", non_blocking=True)
    x.record_stream(torch.cuda.current_stream())
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    b.record()
    torch.cuda.synchronize()
    assert a.query() and a.elapsed_time(b) >= 0
    assert torch.equal(x.cpu(), torch.ones(4))
    del x, p
    torch.randn(3, device="cuda")


# ---- 2: the death ----

@forked
def test_kill_gives_the_genuine_error_everywhere():
    x = torch.ones(3, device="cuda")
    fakecuda.kill()
    for action in [x.cpu, x.tolist, lambda: repr(x), lambda: x + 1, torch.cuda.synchronize, lambda: torch.manual_seed(0)]:
        with pytest.raises(torch.AcceleratorError) as e:
            action()
        assert str(e.value) == MESSAGE and e.value.error_code == 710


@forked
def test_other_sticky_errors():
    x = torch.ones(3, device="cuda")
    fakecuda.kill(700)
    with pytest.raises(torch.AcceleratorError, match="an illegal memory access was encountered") as e:
        x.cpu()
    assert e.value.error_code == 700


@forked
def test_calls_after_death_are_counted_and_logged():
    x = torch.ones(3, device="cuda")
    y = torch.ones(3, device="cuda")
    with tempfile.NamedTemporaryFile() as f:
        fakecuda.log(f.name)
        fakecuda.kill()
        _ = x.shape, x.dtype, x.device, x.data_ptr(), torch.cuda.memory_allocated(0)
        del y
        assert fakecuda.calls_after_death() == 0
        fakecuda.mark("sync")
        with pytest.raises(torch.AcceleratorError):
            torch.cuda.synchronize()
        lines = f.read().decode().split()
    assert lines[:2] == ["#", "sync"] and "cudaDeviceSynchronize" in lines
    assert fakecuda.calls_after_death() == len(lines) - 2


def free_stream_user():
    x = torch.ones(3, device="cuda")
    x.record_stream(torch.cuda.Stream())
    fakecuda.kill()
    del x


def free_pinned_source():
    p = torch.ones(3).pin_memory()
    p.to("cuda", non_blocking=True)
    fakecuda.kill()
    del p


@pytest.mark.parametrize("body", [free_stream_user, free_pinned_source])
def test_frees_that_abort_the_process(body):
    status, err = in_child(body)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 6
    assert "terminate called after throwing an instance of 'c10::AcceleratorError'" in err


# ---- 3: computing ----

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.rnn, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.out(F.relu(self.rnn(self.norm(self.emb(x)))[0].mean(1)))


def image_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("make, inputs", [(Net, lambda: torch.randint(0, 20, (32, 6))), (image_net, lambda: torch.randn(32, 3, 8, 8))])
@forked
def test_training_equals_the_cpu(make, inputs, optimizer):
    torch.manual_seed(0)
    cpu, x, y = make(), inputs(), torch.randint(0, 5, (32,))
    results = []
    for device in "cpu", "cuda":
        model = copy.deepcopy(cpu).to(device)
        opt = optimizer(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            opt.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            opt.step()
            losses.append(loss.item())
        results.append([torch.tensor(losses)] + [p.detach().cpu() for p in model.parameters()])
    assert results[0][0][-1] < results[0][0][0]
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    assert fakecuda.state() == fakecuda.ALIVE


@forked
def test_host_checks_are_torchs_own_and_harmless():
    x = torch.ones(3, 4, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        nn.Linear(4, 2).cuda()(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 3"):
        x[7]
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        x.index_copy_(0, torch.tensor([1], device="cuda"), x[:1])
    with pytest.raises(RuntimeError, match="Size does not match"):
        x.gather(0, torch.zeros(2, 9, dtype=torch.long, device="cuda"))
    assert fakecuda.state() == fakecuda.ALIVE


@forked
def test_random_streams_of_cpu_and_cuda_are_apart():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    a, b = torch.rand(2, device="cuda"), torch.rand(2, device="cuda")
    assert torch.equal(torch.rand(2), expected) and not torch.equal(a, b)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(2, device="cuda"), a)


@forked
def test_a_kernel_that_nobody_computes_is_an_error():
    x = torch.ones(1, 8, 8, 8, device="cuda", dtype=torch.half)
    with pytest.raises(torch.AcceleratorError, match="operation not supported"):
        torch.ops.aten._conv_depthwise2d(x, torch.ones(8, 1, 3, 3, device="cuda", dtype=torch.half), [3, 3], None, [1, 1], [0, 0], [1, 1])


# ---- 4: the asynchronous death ----

def L(*v):
    return torch.tensor(v, device="cuda")


CASES = {
    "embedding, few": (lambda x: F.embedding(L(1, 10), x), (2, 4), "srcIndex < srcSelectDimSize"),
    "embedding, many": (lambda x: F.embedding(L(*[10] * 20), x), (20, 4), "vectorized gather kernel index out of bounds"),
    "embedding, negative": (lambda x: F.embedding(L(-1), x), (1, 4), "srcIndex < srcSelectDimSize"),
    "cross_entropy": (lambda x: F.cross_entropy(x, L(*[4] * 10)), (), "t >= 0 && t < n_classes"),
    "nll_loss": (lambda x: F.nll_loss(x, L(*[-1] * 10)), (), "t >= 0 && t < n_classes"),
    "cross_entropy 2d": (lambda x: F.cross_entropy(x.reshape(1, 4, 5, 2), torch.full((1, 5, 2), 4, device="cuda")), (), "t >= 0 && t < n_classes"),
    "x[i]": (lambda x: x[L(3, 10)], (2, 4), "index out of bounds"),
    "x[:, i]": (lambda x: x[:, L(-5)], (10, 1), "index out of bounds"),
    "x[i] = v": (lambda x: x.index_put_((L(10),), torch.zeros(4, device="cuda")), (10, 4), "index out of bounds"),
    "x[i] += v": (lambda x: x.index_put_((L(10),), torch.zeros(4, device="cuda"), accumulate=True), (10, 4), "_assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] Assertion `` failed."),
    "cross_entropy, no reduction": (lambda x: F.cross_entropy(x, L(*[4] * 10), reduction="none"), (10,), "cur_target >= 0 && cur_target < n_classes"),
    "gather": (lambda x: x.gather(1, L(4).reshape(1, 1)), (1, 1), "scatter gather kernel index out of bounds"),
    "scatter_": (lambda x: x.scatter_(1, L(4).reshape(1, 1), x.clone()), (10, 4), "scatter gather kernel index out of bounds"),
    "scatter_add_": (lambda x: x.scatter_add_(1, L(4).reshape(1, 1), x.clone()), (10, 4), "index out of bounds"),
    "one_hot": (lambda x: F.one_hot(L(0, 3), 3), (2, 3), "idx_dim >= 0 && idx_dim < index_size && \"index out of bounds\""),
    "index_select": (lambda x: x.index_select(0, L(10)), (1, 4), "srcIndex < srcSelectDimSize"),
    "index_add_": (lambda x: x.index_add_(0, L(10), x[:1].clone()), (10, 4), "dstIndex < dstAddDimSize"),
    "index_copy_": (lambda x: x.index_copy_(0, L(10), x[:1].clone()), (10, 4), "index_copy_(): index out of bounds"),
    "index_fill_": (lambda x: x.index_fill_(0, L(10), 0.0), (10, 4), "index out of bounds"),
    "take": (lambda x: x.take(L(40)), (1,), "cuda_take_put_kernel() index out of bounds"),
    "put_": (lambda x: x.put_(L(40), x[0, :1].clone()), (10, 4), "cuda_take_put_kernel() index out of bounds"),
    "embedding_bag": (lambda x: F.embedding_bag(L(1, 10).reshape(1, 2), x), (1, 4), "Invalid input index in EmbeddingBag"),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x + 1.5, x * 0), (), "input_val >= zero && input_val <= one"),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, L(*[4] * 10)), (), "target index is out of bounds"),
    "multinomial": (lambda x: torch.multinomial(x * float("nan"), 1), (10, 1), "probability tensor contains either `inf`, `nan` or element < 0"),
    "bernoulli": (lambda x: torch.bernoulli(x + 2), (10, 4), "0 <= p4 && p4 <= 1"),
    "_assert_async": (lambda x: torch._assert_async(L(0), "labels must be positive"), None, "labels must be positive"),
}


@pytest.mark.parametrize("name", CASES)
def test_assert_is_asynchronous_and_the_error_is_torchs_own(name):
    action, shape, text = CASES[name]

    def body():
        x = torch.rand(10, 4, device="cuda")
        out = action(x)
        assert shape is None or (tuple(out.shape) == shape and out.is_cuda)
        y = x * 2 + 1  # goes on
        assert fakecuda.state() == fakecuda.PENDING
        with pytest.raises(torch.AcceleratorError) as e:
            y.cpu()
        assert str(e.value) == MESSAGE and e.value.error_code == 710
        assert fakecuda.state() == fakecuda.DEAD
        assert not any("fakecuda" in f.name and "test_" not in f.name for f in traceback.extract_tb(e.value.__traceback__))

    status, err = in_child(body)
    assert status == 0, err
    lines = [l for l in err.splitlines() if ": block: [0,0,0], thread: [" in l]
    assert len(lines) == 3 and text in lines[0] and all(l.endswith("` failed.") for l in lines), err


@forked
def test_death_goes_through_a_training_step():
    model, y = Net().cuda(), torch.randint(0, 5, (2,), device="cuda")
    opt = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.zeros(2, 6, dtype=torch.long, device="cuda")), y).backward()
    opt.step()
    opt.zero_grad()
    loss = F.cross_entropy(model(torch.full((2, 6), 20, device="cuda")), y)
    loss.backward()  # on autograd's thread
    opt.step()
    assert fakecuda.state() == fakecuda.PENDING
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        loss.item()


@forked
def test_first_cublas_call_after_an_assert():
    x = torch.rand(4, 4, device="cuda")
    x[torch.tensor([4], device="cuda")]
    with pytest.raises(RuntimeError, match=r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate\(handle\)`"):
        x @ x


SCRIPT = """
import fakecuda, torch
x = torch.ones(3, device="cuda")
bad = x[torch.tensor([5], device="cuda")]
zeros = torch.zeros(3, device="cuda")
print("reached")
x.cpu()
"""


@pytest.mark.parametrize("env, line, reached, message", [
    ({}, "x.cpu()", True, MESSAGE),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "bad = x[", False, "\n".join(MESSAGE.split("\n")[:2]) + "\n"),
    ({"FAKECUDA_DISCOVER_MS": "0"}, "zeros = torch.zeros", False, MESSAGE),
    ({"FAKECUDA_DRIVER_LOG": "1"}, "x.cpu()", True, "The CUDA driver logged these messages, which may provide useful details:\nReturning 710 (CUDA_ERROR_ASSERT) from cu"),
])
def test_environment(env, line, reached, message, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    r = subprocess.run([sys.executable, script], env={**os.environ, **env}, capture_output=True, text=True)
    assert r.returncode == 1 and ("reached" in r.stdout) == reached
    assert "    " + line in r.stderr.split("torch.AcceleratorError")[0]
    assert message in r.stderr


def test_jupyter_kernel():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    sources = [
        "import fakecuda, torch\nx = torch.ones(3, device='cuda')",
        "bad = x[torch.tensor([5], device='cuda')]\nprint('goes on')",
        "y = x + 1\nprint(y.sum().item())",
        "n = fakecuda.calls_after_death()",
        "import gc; gc.collect(); print(n > 0, fakecuda.calls_after_death() - n)",
    ]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    client = nbclient.NotebookClient(nb, allow_errors=True, timeout=120)
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    # under pytest ipykernel would leave fd 2 alone
    client.execute(env={k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"})

    def text(name, *cells):
        return "".join(o.text for i in cells for o in nb.cells[i].outputs if o.output_type == "stream" and o.name == name)

    assert text("stdout", 1) == "goes on\n" and not text("stderr", 0, 1)
    assert text("stderr", 2, 3, 4).count('Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.') == 3
    (error,) = [o for o in nb.cells[2].outputs if o.output_type == "error"]
    assert (error.ename, error.evalue) == ("AcceleratorError", MESSAGE)
    assert text("stdout", 4) == "True 0\n"
