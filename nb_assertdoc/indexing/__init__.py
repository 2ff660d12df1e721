"""The one table of operators whose index (or value) arguments a GPU checks: operator -> bound.

It serves the replay's checks, the guard, the data scan, the simulated GPU and the explanation of
an assert line. The rules are those of the CUDA kernels; where the CPU differs, tests say how.
"""

from __future__ import annotations

from .functions import wrap_functions
from .reading import Bad, bad, mended, repaired, tightest
from .table import Operator, operators, public_name, usages
from .usage import Usage, assert_site

__all__ = [
    "Bad",
    "Operator",
    "Usage",
    "assert_site",
    "bad",
    "mended",
    "operators",
    "public_name",
    "repaired",
    "tightest",
    "usages",
    "wrap_functions",
]
