"""The lines that a GPU driver prints for a failed assert: reading, folding and making them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nb_assertdoc.model import AssertLine

from .entries import Entry, candidates, entry, repaired

# What no other output has: the thread's coordinates (CUDA, then Intel XPU) or ROCm's words. Text
# of other writers may stand before it on the line (a progress bar, a rank, half of another line).
_XYZ = r"\[(\d{1,10}), ?(\d{1,10}), ?(\d{1,10})\]"
_ANCHOR = re.compile(
    rf"(?:block: ?{_XYZ}, ?thread: ?{_XYZ}|global id: ?{_XYZ}, ?local id: ?{_XYZ})"
    r"[:,]? *Assertion ?(?P<verbose>failed: )?"
    r"|Device-side assertion "
)
# Only the base name of the path: what precedes it may be glued to other output.
_SITE = re.compile(
    r"([^\s/\\:`\[\]<>]{1,120}\.[A-Za-z]\w{0,5}|<[^<>\n]{1,120}>|unknown):(\d{1,7})(?:: |$)"
)
_HEAD = 4000  # longest part before the anchor that is looked at: pre-1.9 signatures are long
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Parsed:
    """One printed line. `file` is the base name; coordinates are None where not printed."""

    file: str
    line: int
    function: str | None
    assertion: str
    candidates: tuple[Entry, ...]
    block: tuple[int, ...] | None = None
    thread: tuple[int, ...] | None = None


def parse(text: str) -> tuple[Parsed, ...]:
    """Every assert line in `text`, in order, whatever stands around it. Never raises."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    anchors = list(_ANCHOR.finditer(text))
    found = []
    start = 0
    limits = [*(anchor.start() for anchor in anchors[1:]), len(text)]
    for anchor, limit in zip(anchors, limits, strict=False):
        newline = text.rfind("\n", start, anchor.start()) + 1
        begin = max(start, newline, anchor.start() - _HEAD)
        head = text[begin : anchor.start()].removesuffix(": ")
        stop = text.find("\n", anchor.end())
        stop = limit if stop < 0 else min(stop, limit)
        start = anchor.end()
        sites = list(_SITE.finditer(head))
        if not sites:
            continue
        site = sites[-1]
        file, function = site[1], head[site.end() :] or None
        assertion = _assertion(text[anchor.end() : stop], file, function, bool(anchor["verbose"]))
        if assertion is None:
            continue
        numbers = tuple(int(number) for number in anchor.groups()[:12] if number is not None)
        block, thread = (numbers[:3], numbers[3:]) if numbers else (None, None)
        known = candidates(file, assertion)
        found.append(Parsed(file, int(site[2]), function, assertion, known, block, thread))
    return tuple(found)


def _assertion(tail: str, file: str, function: str | None, verbose: bool) -> str | None:
    """The text between the outermost quotes; None where the line was cut before it."""
    quoted = tail.startswith("`")
    if verbose:
        return tail[1:].partition("`: ")[0] if quoted else None
    # The text itself may hold backticks and "failed", so the last end counts. Copies through
    # Markdown have lost their backticks; ROCm closes with an apostrophe.
    for end in ("` failed", "' failed") if quoted else (" failed",):
        stop = tail.rfind(end)
        if stop >= 0:
            return tail[quoted:stop]
    cut = tail[quoted:].rstrip()
    return repaired(file, function, cut) if cut and quoted else None


def fold(parsed: Iterable[Parsed]) -> tuple[AssertLine, ...]:
    """One `AssertLine` for each distinct (file, line, assertion), in order of first appearance.

    `catalogue_id` is None where the text is unknown or means several things equally.
    """
    counts = Counter((one.file, one.line, one.assertion) for one in parsed)
    return tuple(
        AssertLine(
            text=text, catalogue_id=_sure_id(file, text), kernel_file=file, line=line, count=count
        )
        for (file, line, text), count in counts.items()
    )


def _sure_id(file: str, text: str) -> str | None:
    known = candidates(file, text)
    own = [one for one in known if one.assertion == text] or list(known)
    return own[0].id if len(own) == 1 else None


def operators_of(lines: Sequence[AssertLine]) -> frozenset[str] | None:
    """Public names of the operators whose kernels print these lines; None: nothing to tell from.

    A line that several entries may have printed allows the operators of all of them. Operators
    share kernels: an `embedding` may print the line of `index_select` or of `gather`.
    """
    allowed: set[str] = set()
    for line in lines:
        known = candidates(line.kernel_file, line.text)
        if all(_tells(one, line.text) for one in known):
            allowed.update(operator for one in known for operator in one.operators)
    return frozenset(allowed) or None


def _tells(known: Entry, text: str) -> bool:
    """False for internal asserts and for free messages: any operator may have printed them."""
    free = known.family != "compiled" and text not in (known.assertion, *known.older)
    return bool(known.operators) and not free


def driver_line(entry_id: str, thread: int = 0) -> str:
    """A line for this assert as the driver prints it, without a line end.

    `thread` numbers the failing threads from 0. Placeholders are filled with an example. Raises
    `UsageError` for an unknown id.
    """
    known = entry(entry_id)
    file = known.file if known.file != "*.py" else "cabc.py"
    folder = f"/__w/pytorch/pytorch/{known.folder}" if known.folder else "/tmp/torchinductor/ab"
    example = {"low": "0", "tmpN": "tmp4", "size": "24", "expr": "tmp4"}
    text = re.sub(
        r"\{(.*?)\}", lambda hole: example.get(hole[1], "a check failed"), known.assertion
    )
    # vectorized_gather uses one block an index; _assert_async_cuda_kernel has one thread in all.
    block, lane = (thread, 0) if entry_id == "vectorized_gather" else divmod(thread, 128)
    if file == "TensorCompare.cu":
        block, lane = 0, 0
    return (
        f"{folder}/{file}:{known.lines[0] if known.lines else 1}: {known.functions[0]}: "
        f"block: [{block},0,0], thread: [{lane},0,0] Assertion `{text}` failed."
    )
