"""`%assertdoc restore`: the variables of the crashed kernel, in the next one."""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels import PATIENT, Kernel

from nb_assertdoc import doctor, session
from nb_assertdoc.errors import UsageError
from nb_assertdoc.model import Source
from nb_assertdoc.session import stored
from nb_assertdoc.settings import settings

FRONT_END = "__vsc_ipynb_file__ = '/home/me/study.ipynb'"  # a headless run keeps nothing
IMPORTS = """\
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset"""
DATA = """\
frame = pd.DataFrame({'label': [1, 2, 3, 1]})
labels = torch.tensor(frame.label.values)
data = TensorDataset(torch.zeros(4, 2), labels)
losses = [0.5]
counts = torch.tensor([7, 8]).cuda()
scale = 2
rows = (row for row in losses)
def twice(x):
    return scale * x
class Names:
    known = ['a', 'b']
names = Names()"""
MODEL = """\
class Settings:
    width = 2
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Settings()
        self.layer = nn.Linear(self.config.width, 3)
    def forward(self, x):
        return self.layer(x)
net = Net().cuda()
steps = torch.optim.SGD(net.parameters(), lr=0.1)"""
LOOP = """\
for x, y in DataLoader(data, 2):
    last = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
print(last.item())"""
GIVEN = ["frame", "labels", "data", "losses", "counts", "scale", "twice", "Names", "names"]
CALLS = "__import__('nb_assertdoc').simulated_gpu.calls_after_death()"
SHELL = "get_ipython()"


def test_from_the_crash_to_the_working_gpu() -> None:
    with Kernel(extension=True, simulated_gpu=True, setup=FRONT_END) as kernel:
        for cell in (IMPORTS, DATA, MODEL):
            assert kernel.run(cell).error is None
        told = kernel.run(LOOP)
        crash = told.report
        assert told.reports[0]["kept"] == []  # said a moment later, with what is lost
        the_report_says_what_is_lost_and_kept(crash)
        kernel.run("from nb_assertdoc import session")
        room = Path(kernel.value(f"str(session.room(session.key({SHELL})))"))
        only_the_user_can_read(room)
        assert "13 variables from In [4] of study.ipynb" in kernel.run("%assertdoc").stdout
        assert "restart it first" in kernel.run("%assertdoc restore").stdout
        loaded_again_in_the_dead_kernel(kernel)
        assert kernel.value(CALLS) == 0

        kernel.restart()
        kernel.run(FRONT_END, store_history=False)
        kernel.run("%load_ext nb_assertdoc.simulated_gpu", store_history=False)
        said = kernel.run("%load_ext nb_assertdoc").stdout.strip()
        assert said == (
            "nb_assertdoc: 13 variables wait from In [4] of study.ipynb, a moment ago: "
            "%assertdoc restore"
        )
        named_ones(kernel)
        all_of_them(kernel)
        the_fix_holds(kernel)

        assert "Deleted what was stored for this notebook" in kernel.run("%assertdoc forget").stdout
        assert not room.exists()
        assert "nothing is stored" in kernel.run("%assertdoc restore").stdout
        assert kernel.value("labels.tolist()") == [1, 2, 3, 1]  # it no longer needs the files
        assert kernel.value(CALLS) == 0


def loaded_again_in_the_dead_kernel(kernel: Kernel) -> None:
    kernel.run("1 / 0")  # the last error is not the crash's any more
    assert "is still dead: restart it" in kernel.run("%reload_ext nb_assertdoc").stdout
    assert "restart it first" in kernel.run("%assertdoc restore").stdout
    assert "GPU state is dead already" in kernel.run("%assertdoc").stdout
    again = kernel.run("%assertdoc report")
    assert "before the restart" not in again.stdout
    assert again.report["finding"]["bad_values"] == [3]


def the_report_says_what_is_lost_and_kept(report: dict[str, Any]) -> None:
    assert [k["name"] for k in report["kept"]] == [*GIVEN, "Settings", "Net", "x", "y"]
    lost = {x["name"]: x["why"] for x in report["lost"]}
    assert set(lost) == {"rows", "net", "steps", "last"}
    assert lost["net"] == "its weights were on the GPU"
    assert "generator" in lost["rows"]
    steps = "\n".join(report["next_steps"])
    assert "lost: rows, net, steps, last. After it %assertdoc restore gives back frame," in steps
    assert "%assertdoc forget    deletes what is stored" in steps
    assert "for your user alone, for 7 days" in steps


def only_the_user_can_read(room: Path) -> None:
    paths = [room, *room.rglob("*")]
    assert {"order.json", "capsule", "stored.json", "report.json"} <= {p.name for p in paths}
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir()} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_file()} == {0o600}


def named_ones(kernel: Kernel) -> None:
    refused = kernel.run("%assertdoc restore losses rest").stdout
    assert "not stored: rest; stored are frame, labels" in refused
    assert kernel.value("'losses' in globals()") is False

    said = kernel.run("%assertdoc restore losses").stdout
    assert "given back    losses" in said
    assert "frame" not in said
    assert kernel.value("(losses, 'labels' in globals(), pd.__name__)") == ([0.5], False, "pandas")


def all_of_them(kernel: Kernel) -> None:
    kernel.run("losses = 'of this kernel'; scale = 2\nclass Names: pass")
    said = kernel.run("%assertdoc restore").stdout
    assert "not touched   losses, Names: another value is here" in said
    assert "on the CPU    counts" in said
    assert "net (Net): its weights were on the GPU; In [3] made it" in said
    assert "its configuration is given back as `net_config`" in said
    assert re.search(r"steps \(SGD\): `steps.param_groups\[0\]\['params'\]\[\d\]` was on", said)
    assert kernel.value("[n for n in ('net', 'steps', 'last', 'rows') if n in globals()]") == []
    assert kernel.value("losses") == "of this kernel"
    assert kernel.value("(net_config.width, counts.tolist(), names.known)") == (
        *(2, [7, 8]),
        ["a", "b"],
    )
    assert kernel.value("data.tensors[1] is labels and frame.label.tolist()") == [1, 2, 3, 1]
    assert kernel.value("(twice(4), twice.__globals__ is globals())") == (8, True)

    kernel.run("%assertdoc restore losses --overwrite")
    assert kernel.value("losses") == [0.5]


def the_fix_holds(kernel: Kernel) -> None:
    fixed = LOOP.replace("y.cuda())", "y.cuda() - 1)")
    passed = kernel.run(f"%%assertdoc verify\n{fixed}").report
    assert passed["headline"].startswith("The fix holds: the failing batch passes on the CPU, ")
    kernel.run(MODEL)
    unfixed = kernel.run("x = torch.zeros(1).cuda().item()")
    assert "holds" not in unfixed.stdout
    outcome = kernel.run(fixed)
    count = outcome.reply["execution_count"]
    assert f'In [{count}] finished on the GPU: the fix of "Labels start at 1" holds.' in (
        outcome.stdout
    )
    assert "holds" not in kernel.run(fixed).stdout  # once


def test_without_a_replay_and_where_nothing_is_to_be_kept() -> None:
    choice = {**PATIENT, "replay": False}
    cell = "import torch\nlabels = [1]\ntorch.ones(3).cuda()[torch.tensor([5]).cuda()].cpu()"
    with Kernel(extension=True, simulated_gpu=True, setup=FRONT_END, settings=choice) as kernel:
        assert kernel.run(cell).error is not None
        assert kernel.value(CALLS) == 0
        kernel.restart()
        kernel.run(FRONT_END, store_history=False)
        kernel.run("%load_ext nb_assertdoc.simulated_gpu")
        assert "1 variable waits from In [1]" in kernel.run("%load_ext nb_assertdoc").stdout
        assert "given back    labels" in kernel.run("%assertdoc restore").stdout

        kernel.run("%assertdoc forget")
        kernel.run("%config AssertDoc.keep = False")
        assert kernel.run(cell).error is not None
        assert "Stored" not in kernel.run("%assertdoc").stdout
        assert "no failing replay is stored" in kernel.run("%assertdoc verify").stdout


# ---- within one process


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def keep(namespace: dict[str, Any], earlier: tuple[Source, ...] = ()) -> stored.Stored | None:
    return doctor.keep_variables(
        namespace,
        "kernel-1",
        own=list(namespace),
        earlier=earlier,
        integers={},
        execution_count=3,
        shell=None,
    )


def test_the_size_is_limited_and_what_is_left_out_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings(), "keep_bytes", 1_000_000)
    left = keep({"large": np.zeros(1_000_000), "small": torch.arange(3), "n": 1})
    assert left is not None
    assert [k.name for k in left.kept] == ["small", "n"]
    assert [(x.name, x.why) for x in left.lost] == [
        ("large", "8 MB are more than the capsule may still take")
    ]
    here: dict[str, Any] = {}
    said = doctor.restore("kernel-1", here)
    assert set(here) == {"small", "n"}
    assert "lost          large (ndarray): 8 MB are more than" in said
    with pytest.raises(UsageError, match="not stored: large_; stored are small, n"):
        doctor.restore("kernel-1", here, ["large_"])


def test_a_part_that_is_lost_is_named_and_says_so_when_it_is_used(home: Path) -> None:
    keep({"held": {"lines": (x for x in "ab"), "n": 1}})
    here: dict[str, Any] = {}
    said = doctor.restore("kernel-1", here)
    assert "without       held['lines'] (generator)" in said
    assert here["held"]["n"] == 1
    with pytest.raises(Exception, match="could not be saved"):
        next(here["held"]["lines"])


@pytest.mark.parametrize("name", ["buffers.bin", "variables.pickle", "capsule.json"])
@pytest.mark.parametrize("rest", [None, 0, 60])
def test_what_is_damaged_is_told_and_never_made_up(home: Path, name: str, rest: int | None) -> None:
    given = {"values": torch.arange(1000), "array": np.arange(1000.0), "n": [1]}
    keep(given)
    file = session.folder() / "kernel-1" / "variables" / name
    left = b"" if rest is None else file.read_bytes()[:rest]
    file.unlink() if rest is None else file.write_bytes(left)
    here: dict[str, Any] = {}
    if name == "variables.pickle" and rest is not None:  # what lies before the cut is good
        assert "not loaded    " in doctor.restore("kernel-1", here)
    else:
        with pytest.raises(UsageError, match="what was stored is damaged"):
            doctor.restore("kernel-1", here)
    assert here == {}


def test_another_python_is_told(home: Path) -> None:
    """Its functions are bytecode, which would end this process when they are called."""
    keep({"f": lambda: 1})
    file = session.folder() / "kernel-1" / "variables" / "stored.json"
    file.write_text(file.read_text().replace(stored.PYTHON, "cpython-399"))
    with pytest.raises(UsageError, match=f"stored by cpython-399, .* {stored.PYTHON}"):
        doctor.restore("kernel-1", {})


class Odd:
    """Raises when it is looked at."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("not now")

    def __reduce__(self) -> Any:
        raise RuntimeError("not now")


def test_one_odd_variable_does_not_cost_the_others(home: Path) -> None:
    left = keep({"odd": Odd(), "n": 1})
    assert left is not None
    assert ([k.name for k in left.kept], [x.name for x in left.lost]) == (["n"], ["odd"])


def test_what_only_serves_a_replay_is_not_given_back(home: Path) -> None:
    """A log that is written nowhere, a random generator that starts anew."""
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with (home / "log.txt").open("w") as log:
        keep({"log": log, "loader": loader, "batches": iter(loader), "held": {"log": log}})
    here: dict[str, Any] = {}
    said = doctor.restore("kernel-1", here)
    assert set(here) == {"loader", "held"}
    assert "not loaded    log: it was open for writing" in said
    assert "not loaded    batches: where it stood is lost" in said
    with pytest.raises(Exception, match="it was open for writing"):
        here["held"]["log"].write("lost")


def test_a_new_crash_does_not_harm_what_was_given_back(home: Path) -> None:
    keep({"values": torch.arange(100_000)})
    here: dict[str, Any] = {}
    doctor.restore("kernel-1", here)
    keep({"values": torch.zeros(3)})
    session.forget("kernel-1")
    assert int(here["values"].sum()) == 4_999_950_000


class Interrupts:
    """The user presses stop while this is saved."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        return str, ()


def test_an_interrupt_ends_the_saving_and_leaves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert threading.current_thread() is threading.main_thread()
    assert keep({"n": 1, "slow": Interrupts()}) is None
    assert "interrupted" in capsys.readouterr().out
    assert list(session.room("kernel-1").iterdir()) == []


def test_where_the_folder_is_not_the_users_nothing_is_kept(home: Path) -> None:
    (home / f"nb_assertdoc-{os.getuid()}").symlink_to(home)
    assert keep({"n": 1}) is None
    assert not (home / "kernel-1").exists()


def test_the_time_is_limited(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "keep_seconds", 0.1)
    left = keep({"slow": [Slow() for _ in range(50)], "n": 1})
    assert left is not None
    assert {x.name: x.why for x in left.lost}["slow"] == "the time for saving variables was used up"


class Slow:
    """Takes its time to be saved."""

    def __reduce__(self) -> Any:
        time.sleep(0.01)
        return str, ()
