"""Many replays in one go: each is a fork of one real worker kernel that has imported torch.

A kernel of its own for each loop of a long list would cost a test minutes. `HOST` is code for a
notebook: from then on the diagnoses in it run in forks. All else is as it is: salvage, order,
redirect, checks, evidence.
"""

from __future__ import annotations

HOST = '''
def _replays_in_forks():
    import tempfile, time
    from pathlib import Path
    from nb_assertdoc import replay
    from nb_assertdoc.errors import WorkerError
    from nb_assertdoc.model import Evidence, from_json, to_json

    kernel = replay._Kernel(Path(tempfile.mkdtemp())).__enter__()
    limit = replay._Limit(kernel.pid, None)
    kernel.request(ZYGOTE)
    assert kernel.wait(time.monotonic() + 100, limit), kernel.how_it_ended()

    def run(order, folder, *, memory_bytes=None, progress=None):
        (folder / "order.json").write_bytes(to_json(order))
        (folder / "evidence.json").unlink(missing_ok=True)
        kernel.request(f"forked({str(folder)!r})")
        if not kernel.wait(time.monotonic() + 100, limit):
            raise WorkerError(kernel.how_it_ended())
        failed = folder / "failed"
        if failed.exists():
            raise WorkerError(failed.read_text())
        return from_json((folder / "evidence.json").read_bytes(), Evidence)

    replay.run = run

ZYGOTE = """
import builtins, os, signal, traceback
from pathlib import Path
import torch
import nb_assertdoc.worker as worker
from nb_assertdoc import devices, indexing
from nb_assertdoc.model import Order, from_json
from nb_assertdoc.worker import (
    chance, checks, counters, entry, ghosts, hooks, loaders, loops, measure, observer, output,
    rewind, sandbox, standins,
)
loaders.QUEUE, loaders._FREE_SECONDS = 60, 0.0  # of the simulated GPU; steps cost too much

builtins.keep = lambda *args: None  # of tests whose notebook writes down what it was given

def forked(folder):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        signal.alarm(60)
        worker.prepare(folder)
        order = from_json(Path(folder, "order.json").read_bytes(), Order)
        for source in order.history:
            get_ipython().run_cell(source.source, store_history=True)
        if order.history:
            worker.begin_cell()
        get_ipython().run_cell(order.cell.source, store_history=True)
        worker.finish()
    except BaseException:
        Path(folder, "failed").write_text(traceback.format_exc())
    os._exit(1)
"""
_replays_in_forks()
'''
