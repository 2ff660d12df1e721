"""The capsule, written in one process and read in another, as between host and worker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nb_assertdoc.errors import LostValueError
from nb_assertdoc.salvage import Missing, reached, read, touched, write

DRIVER = """
import json, sys
from pathlib import Path
from nb_assertdoc import salvage

def run(file, namespace):
    exec(compile(Path(file).read_text(), file, "exec"), namespace)

folder, what = Path(sys.argv[1]), sys.argv[2]
namespace = vars(sys.modules["__main__"])
answer = {}
if what == "write":
    run(str(folder / "cell_1.py"), namespace)
    limits = json.loads(sys.argv[3])
    copies = namespace.get("integer_copies", {})
    names = salvage.reached((folder / "cell_2.py").read_text(), namespace)
    saved = salvage.write(
        folder / "capsule", namespace, names, integer_copies=copies, **limits
    )
    run(str(folder / "afterwards.py"), namespace)
    answer["names"] = names
    answer["kept"] = {k.name: [k.type, k.bytes] for k in saved.kept}
    answer["lost"] = [[x.name, x.what, x.why] for x in saved.lost]
else:
    fresh = {"__name__": "__main__"}
    run(str(folder / "before_read.py"), fresh)
    answer["lost"] = [
        [x.name, x.what, x.why]
        for x in salvage.read(folder / "capsule", fresh, *fresh.get("make", ()))
    ]
    run(str(folder / "cell_2.py"), fresh)
print("ANSWER" + json.dumps(answer))
"""


class Pair:
    """A writing and a reading process. The reader runs `cell_2`, whose asserts are the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, cell_1: str, cell_2: str, afterwards: str = "", before_read: str = "", **limits: float
    ) -> dict[str, Any]:
        sources = {
            "cell_1": cell_1,
            "cell_2": cell_2,
            "afterwards": afterwards,
            "before_read": before_read,
        }
        for name, source in sources.items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        written = self._run("write", json.dumps({"seconds": 60.0, "max_bytes": 1 << 28, **limits}))
        written["read"] = self._run("read")["lost"]
        return written

    def _run(self, *args: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, str(self.folder), *args],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        answer: dict[str, Any] = json.loads(done.stdout.rpartition("ANSWER")[2])
        return answer


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_code_of_the_notebook(pair: Pair) -> None:
    (pair.folder / "helper.py").write_text("STATE = []\ndef note(x):\n    STATE.append(x)\n")
    result = pair(
        """
        import collections, dataclasses, enum, functools, helper, typing, weakref
        SCALE = 3
        unused = object()
        gone = 1
        del gone
        def double(x): return 2 * x
        def scaled(x): return double(x) * SCALE          # through globals
        def even(n): return n == 0 or odd(n - 1)         # recursion through two functions
        def odd(n): return n != 0 and even(n - 1)
        def counter():
            count = 0
            def add():
                nonlocal count
                count += 1
                return count
            return add, lambda: count
        add, shown = counter()
        add()
        class Base:
            registry = []
            def __init__(self): self.tags = ["base"]
            def hello(self): return "hello " + scaled.__name__
            @classmethod
            def make(cls): return cls()
            @staticmethod
            def three(): return SCALE
            @property
            def first(self): return self.tags[0]
        class Child(Base):
            def __init__(self):
                super().__init__()
                self.tags.append("child")
            def hello(self): return super().hello() + "!"
        child = Child()
        also_child = child
        Base.registry.append(child)
        class Shade(enum.Enum):
            DARK = 1
            def label(self): return self.name.lower()
        shade = Shade.DARK
        @dataclasses.dataclass
        class Point:
            x: int
            tags: list = dataclasses.field(default_factory=list)
            nothing: typing.Optional[int] = None
        point = Point(4)
        Pair = collections.namedtuple("Pair", "left right")
        memory = collections.deque([Pair(point, 2)], maxlen=7)
        half = functools.partial(scaled, 5)
        @functools.lru_cache(maxsize=5)
        def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        pipeline = {"steps": [lambda x: x + SCALE, child.hello]}
        @functools.wraps(double)
        def wrapped(x): return double(x)
        class Node:
            pass
        root, leaf = Node(), Node()
        root.child, leaf.parent = leaf, weakref.ref(root)
        """,
        """
        import sys, dataclasses
        assert scaled(2) == 12
        SCALE = 10                                       # functions see this namespace
        assert scaled(2) == 40 and scaled.__globals__ is globals()
        assert even(10) and not even(7)
        assert add() == 2 and shown() == 2               # closures share their variable
        assert child is also_child and Base.registry == [child]
        assert child.hello() == "hello scaled!" and child.first == "base"
        assert type(Child.make()) is Child and Child.three() == 10 and isinstance(child, Base)
        assert Child.hello.__globals__ is globals()
        assert shade is Shade.DARK and Shade(1) is shade and shade.label() == "dark"
        assert Point(1) == Point(1, []) and point.nothing is None
        assert dataclasses.fields(Point)[0].default is dataclasses.MISSING
        assert memory[0].left is point and memory.maxlen == 7 and type(memory[0]) is Pair
        assert half() == 100 and fibonacci(30) == 832040
        assert fibonacci.cache_parameters()["maxsize"] == 5
        assert pipeline["steps"][0](1) == 11 and pipeline["steps"][1].__self__ is child
        assert wrapped(4) == 8 and wrapped.__wrapped__ is double
        assert leaf.parent() is root and root.child is leaf
        assert scaled.__code__.co_filename.endswith("cell_1.py")
        assert scaled.__code__.co_firstlineno == 8
        helper.note(5)
        assert sys.modules["helper"].STATE == [5]        # a file's functions are imported
        """,
    )
    assert result["lost"] == result["read"] == []
    assert "unused" not in result["names"] and "gone" not in result["names"]
    assert {"helper", "double", "SCALE", "odd"} <= set(result["names"])
    assert result["kept"]["child"][0] == "Child"


def test_what_cannot_be_saved(pair: Pair) -> None:
    (pair.folder / "log.txt").write_text("old\nlines\n")
    result = pair(
        """
        import logging, signal, socket, sqlite3, subprocess, sys, threading
        def waves():
            while True:
                yield 1
        class Env:
            def __init__(self):
                self.wind, self.size = waves(), 5
                self.lock = threading.RLock()
                self.ready = threading.Condition()
        env = Env()
        same_env = [env]
        stream = waves()
        log = open("log.txt", "a")
        source = open("log.txt")
        source.readline()
        plug = socket.socket()
        database = sqlite3.connect(":memory:")
        child = subprocess.Popen([sys.executable, "-c", ""])
        class Raises:
            def __reduce__(self): raise ValueError("not me")
        class Leaves:
            def __getstate__(self): raise SystemExit(3)
        class Hangs:
            def __reduce__(self):
                while True:
                    try:
                        while True: pass
                    except Exception: pass
        class Lies:
            def __reduce__(self): return 5
        class Nowhere:
            def __reduce__(self): return "nowhere"
        odd = {"kept": 1, "parts": [Raises(), Leaves(), Hangs(), Lies(), Nowhere()]}
        deep = []
        inner = deep
        for _ in range(100_000):
            inner.append([])
            inner = inner[0]
        shared = [1]
        before = {"shared": shared}
        spoiled = {"shared": shared, "new": env, "deep": deep}   # fails as a whole
        after = {"shared": shared, "env": env}
        printer = sys.stdout
        logger = logging.getLogger("mine")
        mine = signal.signal(signal.SIGALRM, lambda *_: None)
        """,
        """
        import sys, threading
        from nb_assertdoc.errors import LostValueError
        from nb_assertdoc.salvage import Missing, touched
        env, same_env, odd, log, source, plug, database, child, stream, printer, logger
        before, spoiled, after
        assert not touched()
        assert env.size == 5 and same_env[0] is env is after["env"]
        with env.lock, env.ready:
            env.ready.notify_all()
        for use in (next, bool, len, iter, lambda x: x + 1, lambda x: x.send(1), lambda x: x[0]):
            try:
                use(env.wind)
            except LostValueError as error:
                assert "env.wind (generator)" in str(error)
            else:
                raise AssertionError(use)
        assert touched() == ("env.wind (generator)",)
        assert repr(env.wind) == "<lost: env.wind (generator)>"
        assert all(isinstance(x, Missing) for x in (plug, database, child, stream, spoiled))
        log.write("new")
        assert open("log.txt").read() == "old\\nlines\\n"
        assert source.readline() == "lines\\n"
        assert odd["kept"] == 1 and [type(x) for x in odd["parts"]] == [Missing] * 5
        assert before["shared"] is after["shared"]       # across the variable that failed
        assert printer is sys.stdout and logger.name == "mine"
        """,
        """
        assert signal.getsignal(signal.SIGALRM).__name__ == "<lambda>"
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        """,
    )
    lost = {what: why for _, what, why in result["lost"]}
    assert lost["env.wind (generator)"] == "a generator cannot be saved"
    assert lost["odd['parts'][0] (Raises)"] == "ValueError: not me"
    assert lost["odd['parts'][1] (Leaves)"] == "SystemExit: 3"
    assert lost["odd['parts'][2] (Hangs)"] == "pickling it took longer than 1 s"
    assert lost["odd['parts'][3] (Lies)"] == "its __reduce__ gave int"
    assert "recursion" in lost["spoiled (dict)"]
    assert lost["child (Popen)"] == "a process"
    assert set(result["kept"]) >= {"env", "odd", "before", "after", "log"}
    assert not set(result["kept"]) & {"spoiled", "plug", "child", "stream"}
    assert result["read"] == result["lost"]


def test_objects_of_libraries_that_pickle_badly(pair: Pair) -> None:
    """Instances that share their class's dictionary; what forbids pickling; as in accelerate."""
    written = pair(
        """
        import pickle, weakref
        with open("states.py", "w") as file:
            file.write(
                "class State:\\n"
                "    shared = {}\\n"
                "    def __init__(self): self.__dict__ = State.shared\\n"
            )
        from states import State
        class Loader:
            def __init__(self):
                self.state = State()
                self.state.running = [weakref.ref(self)]
        class Forward:
            def __init__(self, function): self.function = function
            def __call__(self, x): return self.function(x)
            def __getstate__(self): raise pickle.PicklingError("unwrap me first")
        loader, state, forward = Loader(), State(), Forward(lambda x: x + 1)
        """,
        """
        assert state.running[0]() is loader
        assert loader.state.running is state.running
        state.steps = 3
        assert loader.state.steps == State().steps == State.shared["steps"] == 3
        assert forward(1) == 2
        """,
    )
    assert (written["lost"], written["read"]) == ([], [])


def test_limits_and_what_does_not_load(pair: Pair) -> None:
    (pair.folder / "only_here.py").write_text("class Thing:\n    pass\n")
    result = pair(
        """
        import numpy as np, only_here
        big = np.zeros(300_000_000, dtype=np.uint8)
        mixed = {"big": big, "small": np.arange(5)}
        text = "x" * 30_000_000
        records = [{"ids": [i, i + 1], "label": i % 7} for i in range(200_000)]
        np.arange(10, dtype=np.int64).tofile("tokens.bin")
        mapped = np.memmap("tokens.bin", dtype=np.int64, mode="r+")
        things = [only_here.Thing(), 5]
        class Picky:
            def __setstate__(self, state): raise ValueError("not here")
            def __getstate__(self): return 1
        picky = {"one": Picky(), "two": things}
        last = things
        """,
        """
        from nb_assertdoc.salvage import Missing
        import pathlib
        assert isinstance(big, Missing) and isinstance(text, Missing)
        assert mixed["big"] is big and mixed["small"].tolist() == [0, 1, 2, 3, 4]
        mixed["small"][0] = 9                            # arrays can be written to
        mapped[0] = 77
        assert pathlib.Path("tokens.bin").read_bytes()[:8] == bytes(8)
        assert len(records) == 200_000 and records[-1] == {"ids": [199_999, 200_000], "label": 2}
        assert isinstance(things[0], Missing) and things[1] == 5
        assert picky["two"] is things is last
        """,
        afterwards="import pathlib; pathlib.Path('only_here.py').unlink()",
        max_bytes=20_000_000,
    )
    lost = {what: why for _, what, why in result["lost"]}
    assert lost["big (ndarray)"] == "300 MB are more than the capsule may still take"
    assert lost["text (str)"] == "more than the capsule may still take"
    new = {name: why for name, _, why in result["read"] if name not in ("big", "text")}
    assert "only_here" in new["things"] and "not here" in new["picky"]
    capsule = pair.folder / "capsule"
    assert capsule.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in capsule.iterdir()} == {0o600}
    assert sum(file.stat().st_size for file in capsule.iterdir()) < 20_100_000


def test_torch(pair: Pair) -> None:
    result = pair(
        """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(5, 4)
                self.head = nn.Linear(4, 5)
                self.head.weight = self.table.weight       # tied
                self.norm = nn.BatchNorm1d(4)
                self.recurrent = nn.LSTM(4, 4)
            def forward(self, x): return self.head(self.norm(self.table(x)))
        model = Net()
        calls = []
        handle = model.head.register_forward_hook(lambda m, i, o: calls.append(o.shape))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        model(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
        train_ds = TensorDataset(torch.arange(10), torch.arange(10) % 5)
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            train_ds, 2, shuffle=True, generator=generator,
            collate_fn=lambda rows: torch.stack([row[0] for row in rows]),
        )
        live = iter(loader)
        state_before = generator.get_state()
        whole = torch.arange(6, dtype=torch.bfloat16)
        part = whole[2:4]
        turned = torch.arange(6).reshape(2, 3).T
        empty = torch.zeros(0, 3)
        labelled = nn.Parameter(torch.ones(2))
        labelled.is_special = True
        sparse = torch.eye(3).to_sparse()
        scaler = torch.amp.GradScaler("cpu")
        loss = model(torch.tensor([0, 1])).sum()
        kind = (torch.strided, torch.float16, torch.device("cuda:1"), torch.channels_last)
        plain = torch.ones(2, device="meta")
        """,
        """
        import torch
        assert model.head.weight is model.table.weight
        assert optimizer.param_groups[0]["params"][0] is model.table.weight
        assert optimizer.state[model.table.weight]["step"] == 1
        assert model.table.weight.grad is not None and model.table.weight.requires_grad
        assert scheduler.optimizer is optimizer and scheduler.get_last_lr() == [0.05]
        calls.clear()
        model(torch.tensor([1, 2]))
        assert len(calls) == 1
        handle.remove()
        model(torch.tensor([1, 2]))
        assert len(calls) == 1
        assert model.recurrent(torch.ones(1, 1, 4))[0].shape == (1, 1, 4)
        assert loader.dataset is train_ds and loader.generator is generator
        assert torch.equal(generator.get_state(), state_before)
        batches = [batch.tolist() for batch in live]
        assert sorted(sum(batches, [])) == list(range(10)) and len(live) == 5
        assert part.dtype == torch.bfloat16 and part.tolist() == [2, 3]
        part[0] = 50
        assert whole[2] == 50                            # views still share
        assert turned.tolist() == [[0, 3], [1, 4], [2, 5]] and turned.stride() == (1, 3)
        assert empty.shape == (0, 3) and labelled.is_special and labelled.requires_grad
        assert sparse.to_dense().equal(torch.eye(3))
        assert loss.requires_grad and scaler.is_enabled() and plain.is_meta
        assert kind == (torch.strided, torch.float16, torch.device("cuda:1"), torch.channels_last)
        optimizer.zero_grad(); optimizer
        """,
    )
    assert result["lost"] == result["read"] == []
    assert result["kept"]["model"][0] == "Net"


def test_tensors_on_a_dead_gpu(pair: Pair) -> None:
    """On the pretended GPU: nothing reads a value, moves a tensor or calls the driver."""
    result = pair(
        """
        import torch
        from torch import nn
        from nb_assertdoc import devices
        class Dead(devices.Hooks):
            calls = []
            dead = False
            def note(self, what):
                if self.dead:
                    self.calls.append(what)
                    raise RuntimeError("CUDA error: device-side assert triggered")
            def leave(self, tensor): self.note("leave")
            def api(self, name): self.note(name)
            def read(self, tensor): self.note("read")
            def make(self, name, device): self.note(name)
        hooks = Dead()
        devices.install(devices.Devices(count=2), hooks)
        model = nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 4)).to("cuda")
        model[1].register_buffer("twin", model[0].weight.detach())
        optimizer = torch.optim.AdamW(model.parameters())
        model[0](torch.tensor([1], device="cuda")).sum().backward()
        optimizer.step()
        labels = torch.tensor([[1, 2], [3, 4]], device="cuda:1").T
        copied = torch.tensor([5, 6], device="cuda")
        integer_copies = {id(copied): copied.cpu()}
        logits = model[0](copied[:1] * 0)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(torch.ones(1, device="cuda"))
        class Keeps:
            def __init__(self, x): self.x = x
            def __getstate__(self): return {"x": self.x.cpu()}
        keeps = Keeps(labels)
        cpu = torch.arange(3)
        gpu_generator = torch.Generator(device="cuda")
        hooks.dead = True
        """,
        """
        import torch
        from nb_assertdoc.salvage import Missing
        optimizer, labels, logits, scaler, keeps, gpu_generator
        fields = {s.owner: s for s in seen}
        weight = fields["model.0.weight"]
        assert weight.shape == (5, 4) and weight.dtype == torch.float32 and weight.parameter
        assert weight.requires_grad and weight.device == "cuda:0" and weight.integers is None
        assert fields["labels"].stride == (1, 2) and fields["labels"].device == "cuda:1"
        assert not fields["labels"].parameter
        assert fields["copied"].integers.tolist() == copied.tolist() == [5, 6]
        assert fields["model.1.twin"].shape == (5, 4)
        assert model[0].weight is optimizer.param_groups[0]["params"][0]
        assert isinstance(model[0].weight, torch.nn.Parameter) and model[0].weight.grad is None
        assert len([s for s in seen if s.owner == "model.0.weight"]) == 1
        assert optimizer.state[model[0].weight]["exp_avg"].shape == (5, 4)
        assert fields["logits"].requires_grad and logits.grad_fn is None
        assert cpu.tolist() == [0, 1, 2]
        assert isinstance(keeps, Missing) and "on the GPU" in keeps.why
        assert scaler._scale is None and scaler.is_enabled()
        assert gpu_generator.device.type == "cuda"
        """,
        afterwards="assert hooks.calls == [], hooks.calls",
        before_read="""
        from nb_assertdoc import devices
        from nb_assertdoc.salvage import placeholders
        devices.install(devices.Devices(count=2), devices.Hooks())
        seen = []
        def build(stand_in):
            seen.append(stand_in)
            return placeholders.zeros(stand_in)
        make = (build,)
        """,
    )
    assert [name for name, _, _ in result["lost"]] == ["keeps"]


@pytest.mark.skipif(not (find_spec("pandas") and find_spec("sklearn")), reason="needs both")
def test_frames_and_estimators(pair: Pair) -> None:
    result = pair(
        """
        import numpy as np, pandas as pd
        from sklearn.preprocessing import LabelEncoder
        frame = pd.DataFrame({"label": ["a", "b", "c"], "x": [1.0, 2.0, 3.0]})
        frame["kind"] = frame["label"].astype("category")
        encoder = LabelEncoder().fit(frame["label"])
        grouped = frame.groupby("label")["x"].mean()
        rng = np.random.default_rng(3)
        """,
        """
        assert frame["x"].sum() == 6 and list(frame["kind"].cat.categories) == ["a", "b", "c"]
        assert encoder.transform(["c"]).tolist() == [2] and grouped["b"] == 2
        assert 0 <= rng.random() < 1
        """,
    )
    assert result["lost"] == result["read"] == []


# ---- in this process


def test_names_of_a_cell() -> None:
    namespace: dict[str, Any] = {"x": 1, "data": 2, "y": 3, "In": [], "get_ipython": print}
    exec("def f():\n    class K:\n        z = y\n    return K", namespace)
    assert reached("x = o.data\nf()", namespace) == ("y", "f")
    assert reached("get_ipython().run_line_magic('time', 'f(x)')", namespace) == ("x", "y", "f")
    assert reached("print(In, data); await x", namespace) == ("x", "data")
    assert reached("this is not Python but x is", namespace) == ("x",)
    assert reached(compile("data", "cell", "eval"), namespace) == ("data",)


def save(folder: Path, namespace: dict[str, Any], **limits: Any) -> Any:
    return write(
        folder, namespace, list(namespace), **{"seconds": 5.0, "max_bytes": 10**8, **limits}
    )


@pytest.mark.timeout(method="thread")  # the other method uses the timer itself
def test_time_is_shared_out(tmp_path: Path) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(60)

    saved = save(
        tmp_path, {"slow": [Slow()] * 2, "a": 1, "b": [Slow() for _ in range(9)]}, seconds=1
    )
    assert [kept.name for kept in saved.kept] == ["slow", "a"]
    assert saved.lost[0].why == "pickling it took longer than 0.25 s"
    assert saved.lost[-1].name == "b" and "time" in saved.lost[-1].why


@pytest.mark.timeout(method="thread")
def test_no_timer_of_the_user_is_lost(tmp_path: Path) -> None:
    rang: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        save(tmp_path, {"x": list(range(10))})
        while not rang:
            signal.pause()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert rang == [1]


def test_a_snapshot_of_the_namespace_will_do(tmp_path: Path) -> None:
    live: dict[str, Any] = {"__name__": "__main__"}
    exec("K = 2\ndef f(): return K\nclass C:\n    def m(self): return f()\nc = C()", live)
    save_only_c = write(tmp_path, dict(live), ["c"], seconds=5, max_bytes=10**8)
    assert {kept.name for kept in save_only_c.kept} == {"c", "f", "K"}  # found while pickling
    namespace: dict[str, Any] = {}
    assert read(tmp_path, namespace) == ()
    namespace["K"] = 5
    assert namespace["c"].m() == 5


@pytest.mark.parametrize(
    "use", [list, str.upper, float, bytes, hash, lambda x: x == x, lambda x: x.y, lambda x: x()]
)
def test_using_a_lost_value(use: Callable[[Any], Any]) -> None:
    lost = Missing("stream (generator)", "a generator cannot be saved")
    if use is hash:
        assert isinstance(hash(lost), int)  # dictionaries hold such values
        return
    with pytest.raises((LostValueError, TypeError)):
        use(lost)
    if use not in (str.upper, bytes):
        assert "stream (generator)" in touched()
