"""The capsule: what a failing cell needs, saved beside a dead CUDA context and read in the worker.

A capsule is a private folder: `variables.pickle` (one pickle stream, so that identity between
variables is kept), `buffers.bin` (arrays and CPU tensors, mapped when read) and `capsule.json`.
Nothing here touches CUDA: of a CUDA tensor only metadata is read.
"""

from __future__ import annotations

from nb_assertdoc.salvage.gpu import on_gpu
from nb_assertdoc.salvage.limits import Unsaveable, refusing_cuda
from nb_assertdoc.salvage.names import hidden, reached
from nb_assertdoc.salvage.placeholders import Freed, Missing, StandIn, began_anew, metadata, touched
from nb_assertdoc.salvage.reader import load, names_in, read
from nb_assertdoc.salvage.weights import with_copies
from nb_assertdoc.salvage.writer import Salvaged, write

__all__ = [
    "Freed",
    "Missing",
    "Salvaged",
    "StandIn",
    "Unsaveable",
    "began_anew",
    "hidden",
    "load",
    "metadata",
    "names_in",
    "on_gpu",
    "reached",
    "read",
    "refusing_cuda",
    "touched",
    "with_copies",
    "write",
]
