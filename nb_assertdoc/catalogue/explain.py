"""Plain words for an error text, an assert line, a catalogue id or a topic."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from .entries import Entry, candidates, entries, entry
from .parse import Parsed, parse
from .surfaces import NOT_OURS, SURFACES, surface_of

_WIDTH = 100
_NEXT = (
    "Next: in the same kernel, before its restart, %cpu_replay runs the failing cell on the CPU and"
    " shows the call and the values. Then restart the kernel."
)
_GIVE = (
    "Give the text of a CUDA error, a line that the GPU driver printed, a catalogue id such as"
    " nll_target, or one of these topics: {topics}."
)
_ON_CPU = (
    "This is the CPU's own error for it: here nothing is dead, mend it and run the cell again. On a"
    " GPU the same call ends in a device-side assert."
)
_ALIVE = (
    "This is not an assert: the error is what it says (GPU memory, a device number, a launch that"
    " the GPU cannot do), and the GPU goes on working in this process. No restart is needed for it."
)


@lru_cache(1)
def topics() -> dict[str, str]:
    """The topics that `explain` knows, with their answers."""
    text = Path(__file__).with_name("topics.md").read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {name.strip(): answer.strip("\n") for name, _, answer in parts}


# What the CPU says for the same mistakes, and hints that are taken for the error.
_CPU = {
    r"Target -?\d+ is out of bounds": "nll_target",
    r"index out of range in self": "index_select_small",
    r"Index -?\d+ of input takes value": "embedding_bag_index",
    r"index -?\d+ is out of bounds for dimension": "index_kernel",
    r"Class values must be (?:smaller|non-negative)": "scatter_fill",
    r"all elements of input should be between 0 and 1": "bce_input",
    r"all elements of target should be between 0 and 1": "bce_target",
    r"probability tensor contains either": "multinomial_async",
    r"invalid multinomial distribution": "multinomial_async_sum",
    r"Expected p_in >= 0 && p_in <= 1": "bernoulli_p1",
}
CPU_ERROR = re.compile("|".join(_CPU))
_HINTS = {"TORCH_USE_CUDA_DSA": "dsa", "CUDA_LAUNCH_BLOCKING": "launch-blocking"}


_CUT_LINE = re.compile(r"(?:Device-side )?[Aa]ssertion `(.+)['`] failed\.?")


def explain(text: str) -> str:
    """What `text` means and what to do, in lines of at most 100 columns.

    `text` may be a topic, a catalogue id, an assert line of the driver, an assertion's bare text,
    the name of a kernel file, or the text of an error, of the GPU or of the CPU. For anything else
    the answer says so and lists the topics.
    """
    asked = " ".join(text.split())
    if not asked:
        return _wrapped([_GIVE.format(topics=", ".join(topics()))])
    if cut := _CUT_LINE.fullmatch(asked):  # the end of a driver's line, its file left out
        asked = cut[1]
    key = asked.lower().replace(" ", "-").replace("_", "-")
    if key in topics():
        return topics()[key]
    if lines := parse(text):
        return _lines(lines)
    if known := _named(asked):
        return _entries(known)
    if seen := surface_of(text, asked=True):
        surface, match = seen
        return _wrapped([f"“{match[0]}”", surface.meaning, _NEXT, "More: why-late, try-except."])
    for surface in SURFACES:
        if surface.messenger is not None and surface.messenger.lower() == asked.lower():
            return _wrapped([surface.meaning, _NEXT])
    if re.search(NOT_OURS, text):
        return _wrapped([_ALIVE])
    for pattern, id in _CPU.items():
        if re.search(pattern, text):
            return _entries([entry(id)], last=_ON_CPU)
    for hint, topic in _HINTS.items():
        if hint in text:
            return topics()[topic]
    near = get_close_matches(key.replace("-", "_"), [one.id for one in entries()], 1)
    near = get_close_matches(key, list(topics()), 1) or near
    return _wrapped(
        [
            f"Nothing is known about {_short(asked)!r}."
            + (f" Did you mean {near[0]}?" if near else ""),
            _GIVE.format(topics=", ".join(topics())),
        ]
    )


def _named(asked: str) -> list[Entry]:
    """Entries by id, bare assertion, text of a compiled kernel, or file; [] if it is none."""
    known = [one for one in entries() if asked and asked in (one.id, one.assertion, *one.older)]
    known = known or [one for one in candidates("unknown", asked) if one.family == "compiled"]
    return known or [one for one in entries() if one.file == asked and one.user_reachable]


def _lines(lines: tuple[Parsed, ...]) -> str:
    first = lines[0]
    also = {(line.file, line.assertion) for line in lines} - {(first.file, first.assertion)}
    more = f"{len(lines)} lines; {len(also)} other asserts follow the first." if also else ""
    if first.candidates:
        return _entries(first.candidates, first) + ("\n" + more if more else "")
    family = [one for one in entries() if one.file == first.file and one.user_reachable]
    operators = sorted({operator for one in family for operator in one.operators})
    guess = (
        f"Other asserts of {first.file} belong to {', '.join(operators)}."
        if family
        else "It may come from another library's kernel, or from a torch that is not known here."
    )
    return _wrapped(
        [
            f"{first.file}:{first.line}: “{first.assertion}” is not in the catalogue.",
            "A check inside a GPU kernel failed; the GPU is fine, its state here is dead.",
            guess,
            _NEXT,
        ]
    )


def _entries(known: Sequence[Entry], line: Parsed | None = None, last: str = _NEXT) -> str:
    """The first entry in full, the meanings of other families in one line each."""
    asked = line.assertion if line else known[0].assertion
    own = [one for one in known if one.assertion == asked] or list(known)
    first = own[0]
    alike = [one for one in known if one.family == first.family]
    others: dict[str, list[Entry]] = {}
    for one in known:
        if one.family != first.family:
            others.setdefault(one.explanation, []).append(one)
    out = [f"{line.file if line else first.file}: `{asked}`" + ("" if asked else " (no text)")]
    out.append(first.explanation + _operators(alike))
    out.append(
        f"Must hold{f' for `{first.argument}`' if first.argument else ''}: {first.rule}."
        + (f" {first.note}" if first.note else "")
    )
    out += ["Usual causes:", *(f"  - {cause}" for cause in first.causes)]
    if others:
        out.append("The same text can also mean:")
        out += [f"  - {words}{_operators(members)}" for words, members in others.items()]
    return _wrapped([*out, last])


def _operators(known: Iterable[Entry]) -> str:
    names = list(dict.fromkeys(name for one in known for name in one.operators))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f" Operators: {shown}." if names else ""


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _wrapped(paragraphs: Iterable[str]) -> str:
    lines: list[str] = []
    for paragraph in paragraphs:
        indent = " " * (len(paragraph) - len(paragraph.lstrip()) + 2)
        lines += textwrap.wrap(
            paragraph,
            _WIDTH,
            subsequent_indent=indent if paragraph.startswith(" ") else "",
            break_on_hyphens=False,
        )
    return "\n".join(lines)
