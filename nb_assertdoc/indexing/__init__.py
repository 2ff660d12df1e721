"""The one table of operators whose index (or value) arguments a GPU checks: operator -> bound.

It serves the replay's checks and the simulated GPU, and tells which assert an operator ends in. The
rules are those of the CUDA kernels; where the CPU differs, tests say how.
"""

from __future__ import annotations

from .functions import is_meta, wrap_functions
from .reading import Bad, bad, mended, repaired, tightest
from .table import Operator, Unread, operators, public_name, usages
from .usage import Usage, assert_site

__all__ = [
    "Bad",
    "Operator",
    "Unread",
    "Usage",
    "assert_site",
    "bad",
    "is_meta",
    "mended",
    "operators",
    "public_name",
    "repaired",
    "tightest",
    "usages",
    "wrap_functions",
]
