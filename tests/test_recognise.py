"""An assert is recognised wherever it surfaces, reported once, and nothing else leaves a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernels import MIME, Kernel, Outcome

TABLE = """
import torch
from torch import nn
from nb_assertdoc.simulated_gpu import calls_after_death
places = nn.Embedding(4, 2).cuda()
asked = torch.tensor([5], device='cuda')
"""
CRASH = "places(asked).sum().item()"
SURFACES = {
    "repr of the last expression": "n = 1\nplaces(asked)",
    "await": f"import asyncio\nawait asyncio.sleep(0)\n{CRASH}",
    "%%time": f"%%time\n{CRASH}",
    "%%time of statements": f"%%time\nn = 2\n{CRASH}",
    "%%capture": f"%%capture\n{CRASH}",
    "%%capture of %%time": f"%%capture\n%%time\nn = 2\n{CRASH}",
    "%timeit": f"def f():\n    return {CRASH}\n%timeit -n1 -r1 f()",
    "%%timeit": f"%%timeit -n1 -r1\n{CRASH}",
    "%run": f"open('r.py', 'w').write({CRASH!r})\n%run -i r.py",
    "chained": f"""try:
    {CRASH}
except RuntimeError as error:
    raise ValueError('outer') from error""",
    "post_execute": f"""
def callback():
    get_ipython().events.unregister('post_execute', callback)
    {CRASH}
get_ipython().events.register('post_execute', callback)""",
}
# A dead context lasts as long as its process; for many surfaces in one kernel it is made anew.
ANEW = """
import sys
from nb_assertdoc import simulated_gpu
%unload_ext nb_assertdoc
simulated_gpu._context.__init__()
for name in ("last_value", "last_exc", "last_traceback", "last_type"):
    sys.__dict__.pop(name, None)
%load_ext nb_assertdoc
"""


def crash_record(kernel: Kernel) -> dict:
    """The record of the crash that the extension keeps."""
    return kernel.value(
        "(lambda c: dict(line=c.surface.line, source=c.surface.source, kind=c.exception))"
        "(get_ipython()._nb_assertdoc.flow.crash)"
    )


def kinds(outcome: Outcome) -> list[str]:
    """Types of the messages that a front end shows, without the streams."""
    quiet = {"status", "execute_input", "stream"}
    return [m["msg_type"] for m in outcome.messages if m["msg_type"] not in quiet]


@pytest.fixture(scope="module")
def cards() -> Iterator[Kernel]:
    """A simulated GPU with the extension, which shows its card and replays nothing."""
    with Kernel(simulated_gpu=True, extension=True, settings={"replay": False}) as kernel:
        kernel.run(TABLE)
        yield kernel


@pytest.fixture
def card_kernel(cards: Kernel) -> Kernel:
    cards.run(ANEW + TABLE, store_history=False)  # a doomed context changes its bad indices
    return cards


@pytest.mark.parametrize("kind", SURFACES)
def test_every_surface_is_recognised_once_and_stops_the_queue(card_kernel, kind):
    failed, after = card_kernel.run_all([SURFACES[kind], "print('ran')"])

    assert failed.status == "error"
    assert failed.error is not None
    (card,) = failed.displays
    assert card["text/plain"].startswith("CUDA device-side assert in In [")
    assert "Queued cells will not run" not in card["text/plain"], "nothing is replayed"
    assert after.status in ("aborted", "error")
    assert "ran" not in after.stdout
    surface = crash_record(card_kernel)
    assert surface["kind"] == "AcceleratorError"
    shown = surface["source"]
    assert CRASH in shown or shown in ("places(asked)", "    raise ValueError('outer') from error")
    if kind != "%run":  # there the line is one of the file
        assert SURFACES[kind].splitlines()[surface["line"] - 1] == shown


def test_a_thread_and_a_swallowed_error_leave_the_cell_and_the_queue_alone(card_kernel):
    thread = (
        f"import threading\nthread = threading.Thread(target=lambda: {CRASH})\n"
        "thread.start(); thread.join()"
    )
    failed, after = card_kernel.run_all([thread, "print('ran')"])

    assert (failed.status, failed.error, after.stdout) == ("ok", None, "ran\n")
    (card,) = failed.displays
    assert card["text/plain"].startswith("CUDA device-side assert in In [")


def test_a_display_that_fails_costs_nothing_else(card_kernel):
    card_kernel.run(
        "publisher = type(get_ipython().display_pub)\nplain = publisher.publish\n"
        "def publish(self, *args, **named): raise ValueError('broken publisher')\n"
        "publisher.publish = publish"
    )
    failed = card_kernel.run(CRASH)
    card_kernel.run("publisher.publish = plain")

    assert failed.status == "error"
    assert "device-side assert triggered" in failed.error["evalue"]
    assert failed.displays == [] and failed.stderr.count("ValueError: broken publisher") == 1
    assert crash_record(card_kernel)["source"] == CRASH
    assert "broken publisher" not in card_kernel.run("%assertdoc").text


def test_card_then_report_in_one_display_and_one_line_afterwards(gpu_kernel):
    gpu_kernel.run(TABLE)
    cell = f"%%capture\nn = 1\n{CRASH}"
    captured = gpu_kernel.run(cell)
    first = captured.report
    number = first["crash"]["execution_count"]

    assert captured.status == "error"
    assert len(captured.displays) == 1, "shown once, although %%capture took what it could"
    assert first["confidence"] == "certain"
    assert first["finding"]["bad_values"] == [5]
    assert first["finding"]["location"]["line"] == 3
    assert first["finding"]["location"]["source"] == CRASH
    assert first["crash"]["surface"]["line"] == 3
    assert first["crash"]["stale"] is False
    assert gpu_kernel.value("calls_after_death()") == 0

    # Later failures of the same dead context: an edited cell, an innocent one, a repr.
    for source in (cell.replace("5", "3") + "  # mended", "torch.zeros(3).cuda().sum()", "asked"):
        before = gpu_kernel.value("calls_after_death()")
        later = gpu_kernel.run(source)
        own = gpu_kernel.value("calls_after_death()") - before
        assert later.status == "error"
        (display,) = later.displays
        assert len(display["text/plain"].splitlines()) == 1
        report = display[MIME]
        assert report["finding"] == first["finding"]
        assert report["cause"] == first["cause"]
        crash = report["crash"]
        assert crash["stale"] is True
        assert crash["execution_count"] == later.reply["execution_count"]
        assert crash["first_failed"] == {"execution_count": number, "source": cell}
        assert own == 1, "the user's own call, and none of ours"
    assert f"dead since In [{number}]" in gpu_kernel.run("%assertdoc").stdout
    again = gpu_kernel.run("%assertdoc report")
    assert again.report["finding"] == first["finding"]


def test_the_report_takes_the_place_of_the_card(gpu_kernel):
    gpu_kernel.run(TABLE)
    swallowing = f"""
for batch in range(3):
    try:
        {CRASH}
    except Exception:
        print('skipped', batch)
before = calls_after_death()"""
    swallowed, after = gpu_kernel.run_all([swallowing, "print('ran')"])

    assert (swallowed.status, swallowed.error, after.stdout) == ("ok", None, "ran\n")
    assert swallowed.stdout.count("skipped") == 3
    assert gpu_kernel.value("calls_after_death() - before") == 0
    shown = [m for m in swallowed.messages if "display" in m["msg_type"]]
    assert kinds(swallowed) == ["display_data"] + ["update_display_data"] * (len(shown) - 1)
    assert len({m["content"]["transient"]["display_id"] for m in shown}) == 1
    assert all("Queued" not in m["content"]["data"]["text/plain"] for m in shown)
    assert MIME not in shown[0]["content"]["data"]
    assert MIME in shown[-1]["content"]["data"]
    report = swallowed.report
    assert report["finding"]["bad_values"] == [5]
    assert report["finding"]["step"]["iteration"] == 0
    assert report["crash"]["exception"] == ""
    assert report["crash"]["surface"]["source"].strip() == "except Exception:"
    assert "`except Exception:` in line 5" in report["crash"]["message"]


def test_work_that_an_earlier_cell_queued(gpu_kernel):
    gpu_kernel.run(TABLE)
    queued = gpu_kernel.run("looked_up = places(asked)")
    unrelated = gpu_kernel.run("note = 'nothing on the GPU'")
    innocent = gpu_kernel.run("print(looked_up.sum().item())")

    assert [queued.error, unrelated.error] == [None, None]
    assert innocent.status == "error"
    report = innocent.report
    assert report["finding"]["bad_values"] == [5]
    assert report["finding"]["location"]["execution_count"] == queued.reply["execution_count"]
    assert report["crash"]["execution_count"] == innocent.reply["execution_count"]
    assert report["crash"]["stale"] is True
    assert report["crash"]["first_failed"] == {
        "execution_count": queued.reply["execution_count"],
        "source": "looked_up = places(asked)",
    }


def test_loaded_after_the_crash(start_kernel):
    kernel = start_kernel(simulated_gpu=True)
    kernel.run(TABLE)
    failed = kernel.run(CRASH)
    number = failed.reply["execution_count"]
    before = kernel.value("calls_after_death()")
    load = kernel.run("%load_ext nb_assertdoc")

    assert not failed.displays
    assert f"In [{number}] died of a CUDA device-side assert" in load.stdout
    assert "%cpu_replay" in load.stdout
    assert kernel.run("%config AssertDoc.asked_seconds = 120").error is None
    asked = kernel.run("%cpu_replay")
    assert asked.error is None
    report = asked.report
    assert report["finding"]["bad_values"] == [5]
    assert report["crash"]["execution_count"] == number
    assert report["confidence"] == "likely"
    assert "the cell's start was not recorded" in str(report["replays"])
    assert kernel.value("calls_after_death()") == before

    kernel.run("%%cpu_replay\nn = torch.arange(3)")  # another report comes between
    later = kernel.run("torch.ones(2).cuda()")
    assert later.report["crash"]["stale"] is True
    assert later.report["crash"]["first_failed"] == {"execution_count": number, "source": CRASH}
    assert later.report["finding"] == report["finding"]


def test_loaded_after_two_cells_have_failed(start_kernel):
    """The last error is not the first one: an earlier cell may have killed the GPU."""
    kernel = start_kernel(simulated_gpu=True)
    kernel.run(TABLE)
    guilty = kernel.run(CRASH).reply["execution_count"]
    innocent = kernel.run("n = torch.ones(2).cuda().sum()").reply["execution_count"]
    before = kernel.value("calls_after_death()")
    said = kernel.run("%load_ext nb_assertdoc").stdout
    assert f"In [{innocent}] died of" in said
    assert "A cell before it may have killed the GPU: those are tried next." in said
    short = kernel.run("%cpu_replay --timeout 0.6").report  # for the last cell alone
    assert short["finding"] is None
    assert short["next_steps"][0].startswith(f"%cpu_replay {guilty}    ")
    kernel.run("%config AssertDoc.asked_seconds = 120")
    report = kernel.run("%cpu_replay").report
    assert report["finding"]["bad_values"] == [5]
    assert report["finding"]["location"]["execution_count"] == guilty
    assert report["crash"]["execution_count"] == innocent
    assert report["crash"]["first_failed"]["execution_count"] == guilty
    assert kernel.value("calls_after_death()") == before


LINE = (
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: "
    "block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed."
)
CHILDREN = f"""
import concurrent.futures, multiprocessing, os, subprocess, sys
LINE, TEXT = {LINE!r}, 'CUDA error: device-side assert triggered'
PRINTS = [sys.executable, '-Sc', f'import sys; print({{LINE!r}}, file=sys.stderr)']
DIES = [sys.executable, '-Sc', f'raise RuntimeError({{TEXT!r}})']
fork = multiprocessing.get_context('fork')
def fails():
    raise RuntimeError(TEXT)
def prints():
    os.write(2, LINE.encode() + b'\\n')
"""
OF_A_CHILD = {  # a child's assert, as it reaches the notebook: in a text, or on the same fd 2
    "it prints": "done = subprocess.run(PRINTS)",
    "it prints, and the cell fails": "subprocess.run(PRINTS)\n1 / 0",
    "it prints before a shell fails": (
        "subprocess.run([*PRINTS[:2], PRINTS[2] + '; sys.exit(3)'], check=True)"
    ),
    "os.system": "done = os.system(f'echo \"{LINE.replace(chr(96), chr(39))}\" >&2')",
    "a fork prints": "p = fork.Process(target=prints)\np.start(); p.join()",
    "it has ended, and nobody has waited": (
        "p = subprocess.Popen(PRINTS)\n_ = os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)"
    ),
    "its text": "subprocess.run(DIES, check=True, capture_output=True, text=True)",
    "its bytes": "subprocess.check_output(DIES, stderr=subprocess.STDOUT)",
    "the words of a command": "subprocess.run(f'echo {TEXT}; false', shell=True, check=True)",
    "a pool": "with fork.Pool(1) as pool:\n    pool.apply(fails)",
    "an executor": (
        "with concurrent.futures.ProcessPoolExecutor(1, fork) as pool:\n"
        "    pool.submit(fails).result()"
    ),
    "torch.multiprocessing": (
        "from torch.multiprocessing.spawn import ProcessRaisedException\n"
        "raise ProcessRaisedException(f'-- Process 0 terminated with the following error:"
        "\\n{TEXT}', 0, 7)"
    ),
    "chained": """try:
    subprocess.run(DIES, check=True, capture_output=True)
except Exception as error:
    raise ValueError('training failed') from error""",
}
ADVICE = "the program that this cell started died of a CUDA device-side assert"


def test_a_childs_assert_is_not_this_kernels(card_kernel):
    card_kernel.run(CHILDREN)
    told = {kind: card_kernel.run(cell) for kind, cell in OF_A_CHILD.items()}
    after = card_kernel.run("places(torch.tensor([3], device='cuda')).shape, asked.tolist()")

    assert {kind: o.stdout.count(ADVICE) for kind, o in told.items()} == dict.fromkeys(told, 1)
    assert {kind: o.displays for kind, o in told.items() if o.displays} == {}
    assert "cross_entropy" in told["it prints"].stdout, "its line is explained"
    assert f"{ADVICE} (rank 0)." in told["torch.multiprocessing"].stdout
    assert after.text == "(torch.Size([1, 2]), [5])"
    assert "No assert so far" in card_kernel.run("%assertdoc").stdout
    assert card_kernel.value("calls_after_death()") == 0


@pytest.mark.parametrize(
    "cell",
    {
        "beside a child": "subprocess.run(['true'])\n{swallowed}",
        "beside a child's assert": "subprocess.run(PRINTS)\n{swallowed}",
        "beside a fork": "p = fork.Process(target=int)\np.start()\n{swallowed}\np.join()",
        "before another error": "{swallowed}\n1 / 0",
        "while a child's is handled": (
            "try:\n    subprocess.run(DIES, check=True, capture_output=True)\n"
            "except Exception:\n    {crash}"
        ),
    }.values(),
)
def test_a_crash_of_this_kernel_is_not_lost_beside_children(card_kernel, cell):
    swallowed = f"try:\n    {CRASH}\nexcept Exception:\n    pass"
    card_kernel.run(CHILDREN)
    card_kernel.run("subprocess.run(PRINTS)")  # of the cell before: it excuses nothing here
    died = card_kernel.run(cell.format(swallowed=swallowed, crash=CRASH))

    (card,) = died.displays
    assert card["text/plain"].startswith("CUDA device-side assert in In [")
    assert ADVICE not in died.stdout
    assert "GPU state is dead" in card_kernel.run("%assertdoc").stdout


NO_CUDA = {  # texts of a GPU's messengers, where this process has no CUDA context
    "raise RuntimeError('worker 3 failed to synchronize its clock')": 0,
    "raise RuntimeError('misaligned address in the header')": 0,
    "raise RuntimeError('for_each: failed to synchronize: cudaErrorLaunchFailure')": 0,
    "raise RuntimeError('CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `x`')": 0,
    "raise RuntimeError('CUDA error: an illegal memory access was encountered')": 0,
    "subprocess.run(DIES, check=True, capture_output=True)": 1,
    "done = subprocess.run(PRINTS)": 1,
    "n = 1": 0,
    "raise RuntimeError(TEXT)": 1,
}


def test_without_a_context_none_can_be_dead(start_kernel):
    kernel = start_kernel(extension=True)
    kernel.run(CHILDREN)
    told = {cell: kernel.run(cell) for cell in NO_CUDA}

    assert {cell: outcome.stdout.count(ADVICE) for cell, outcome in told.items()} == NO_CUDA
    assert [outcome.displays for outcome in told.values() if outcome.displays] == []
    assert "No assert so far" in kernel.run("%assertdoc").stdout
    assert kernel.value("'torch' in __import__('sys').modules") is False
    kernel.run("%unload_ext nb_assertdoc")
    kernel.run("subprocess.run(DIES, check=True, capture_output=True)")
    assert kernel.run("%load_ext nb_assertdoc").text.strip() == "", "loaded after a child's"


NOT_OURS = (
    "print('fine')",
    "raise ValueError('bad')",
    "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total')",
    "torch.nn.functional.embedding(torch.tensor([9]), torch.ones(3, 2))",
    "x = = 1",
    "import sys; print('Assertion `x` failed.', file=sys.stderr)",
    "%%capture\n1 / 0",
    "1 + 1",
)


def test_what_is_not_ours_looks_as_it_does_without_the_extension(start_kernel):
    def said(kernel: Kernel, source: str) -> list[tuple]:
        outcome = kernel.run(source)
        error = str(outcome.error).replace(str(kernel.manager.provisioner.pid), "")
        plain = [d["text/plain"] for d in outcome.displays]
        return [
            outcome.status,
            kinds(outcome),
            outcome.streams,
            error,
            plain,
            sorted(outcome.reply),
        ]

    start = "import torch\ntorch.cuda.init()"
    with_it = start_kernel(simulated_gpu=True, extension=True)
    without = start_kernel(simulated_gpu=True)
    for source in (start, *NOT_OURS):
        assert said(with_it, source) == said(without, source)


STATE = """
def state():
    shell, loader = get_ipython(), sys.modules['torch.utils.data.dataloader']
    events = {k: list(v) for k, v in shell.events.callbacks.items()}
    magics = {k: set(v) for k, v in shell.magics_manager.magics.items()}
    return (
        shell.__dict__.get('_showtraceback'), events, magics,
        [c for c in shell.configurables if type(c).__module__.startswith('nb_assertdoc')],
        loader.DataLoader.__iter__, loader._BaseDataLoaderIter._next_index,
        type(sys.stderr.write), hasattr(shell, '_nb_assertdoc'),
    )
"""


def test_loading_twice_and_unloading(start_kernel):
    kernel = start_kernel()
    kernel.run(f"import sys, torch\nimport torch.utils.data\n{STATE}\nbefore = state()")
    kernel.run("%load_ext nb_assertdoc")
    kernel.run("once = state()")
    kernel.run("import nb_assertdoc; nb_assertdoc.load_ipython_extension(get_ipython())")
    kernel.run("twice = state()")
    kernel.run("%unload_ext nb_assertdoc")
    kernel.run("after = state()")

    assert kernel.value("[a == b for a, b in zip(before, once)]") == [False] * 8
    assert kernel.value("[a == b for a, b in zip(once, twice)]") == [True] * 8
    assert kernel.value("[a == b for a, b in zip(before, after)]") == [True] * 8
    assert kernel.run("%unload_ext nb_assertdoc").error is None
    assert kernel.run("%load_ext nb_assertdoc").text.strip() == ""
    assert "watches this kernel" in kernel.run("%assertdoc").stdout


def test_switched_off(start_kernel):
    kernel = start_kernel(simulated_gpu=True, extension=True, env={"NB_ASSERTDOC": "off"})
    kernel.run(TABLE)
    failed = kernel.run(CRASH)

    assert failed.status == "error"
    assert not failed.displays


def test_replay_seconds_set_in_the_notebook_end_a_replay(gpu_kernel):
    gpu_kernel.run("%config AssertDoc.replay_seconds = 1")
    gpu_kernel.run(TABLE + "import os")
    slow = "while os.environ.get('NB_ASSERTDOC') == 'off':  # in the replay\n    pass\n" + CRASH
    failed = gpu_kernel.run(slow)

    assert failed.status == "error"
    assert failed.report["confidence"] == "not_found"
    assert failed.report["replays"][0]["outcome"] == "stopped"


EVIL = """
class Raises:
    def __reduce_ex__(self, protocol): raise SystemError('no')
    def __repr__(self): raise SystemError('no')
class Endless:
    def __reduce_ex__(self, protocol):
        while True: pass
    def __repr__(self):
        while True: pass
first, second = Raises(), Endless()
def look(index, first, second, name='<img src=x onerror=alert(1)>\\x1b[2J'):
    return places(index).sum().item()
"""


def test_hostile_values_names_and_lines(gpu_kernel):
    gpu_kernel.run("%config AssertDoc.salvage_seconds = 2")
    gpu_kernel.run(TABLE + EVIL)
    hostile = "# <script>alert(2)</script> \x1b[31m \u202e"
    failed = gpu_kernel.run(f"look(asked, first, second)  {hostile}")

    report = failed.report
    assert report["finding"]["bad_values"] == [5]
    assert "second" in [lost["name"] for lost in report["lost"]]
    assert "<img" not in failed.html
    assert "<script>" not in failed.html
    plain = "\n".join(display["text/plain"] for display in failed.displays)
    for text in (plain, failed.html):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)


def test_without_torch(start_kernel):
    kernel = start_kernel(setup="import sys; sys.modules['torch'] = None", extension=True)

    assert kernel.run("print(1)").text.strip() == "1"
    assert kernel.run("1 / 0").displays == []
    assert "No assert so far" in kernel.run("%assertdoc").stdout
    assert "table" in kernel.run("%assertdoc explain srcIndex < srcSelectDimSize").stdout
    asked = kernel.run("%%cpu_replay\nn = 1")
    assert asked.error is None
    assert "needs torch" in asked.stdout
    kernel.run("import types; old = types.ModuleType('torch'); old.__version__ = '2.3.1+cu121'")
    kernel.run("sys.modules['torch'] = old")
    asked = kernel.run("%%cpu_replay\nn = 1")
    assert asked.error is None, asked.text
    assert "torch 2.4 or newer; this is torch 2.3.1+cu121" in asked.stdout
