"""Is this error or text the news of a dead CUDA context? Reads strings only, never tensors."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Any

from nb_assertdoc.catalogue import Surface, fold, parse, surface_of, surface_of_code
from nb_assertdoc.model import AssertLine

from .origin import cuda_started


@dataclass(frozen=True)
class Sighting:
    """The first news of a dead context.

    `exception` and `message` are empty when only the driver's lines tell of it (an error that user
    code swallowed). `certain` is False when only a `messenger` such as cuBLAS says so, which can
    have other reasons. `of_child`: another process's error, handed on as text. `error` is held
    strongly: keep the sighting only as long as it is needed.
    """

    error: BaseException | None
    exception: str
    message: str
    error_code: int | None = None
    messenger: str | None = None
    assert_lines: tuple[AssertLine, ...] = ()
    certain: bool = True
    rank: int | None = None
    of_child: bool = False


def recognise(error: BaseException | None, lines: str = "") -> Sighting | None:
    """The oldest CUDA error in the chain of `error`; None when nothing tells of a dead context.

    `lines` is what fd 2 got since the cell began: assert lines in it are news by themselves, even
    beside an error of another kind, and make a messenger's news certain.
    """
    printed = fold(parse(lines))
    chain = [] if error is None else _chain(error)
    news = [(one, surface) for one in chain if (surface := _surface(one)) is not None]
    if not news:
        return _from_lines(printed, lines)
    own = [one for one in news if not _of_child(one[0])]
    first, surface = (own or news)[0]
    text = _text(first)
    # A re-raise from another thread or process carries its traceback, with the error inside.
    inner = recognise_text(text) if "Traceback (most recent call last)" in text else None
    printed = printed or (inner.assert_lines if inner else ())
    return Sighting(
        error=first,
        exception=type(first).__name__,
        message=inner.message if inner and inner.message else text,
        error_code=_code(first),
        messenger=surface.messenger,
        assert_lines=printed,
        certain=bool(printed) or any(each.messenger is None for _, each in own or news),
        rank=_rank(text, len(text)),
        of_child=not own,
    )


def recognise_own(error: BaseException | None) -> Sighting | None:
    """As `recognise`; None also where the context that died cannot be one of this process."""
    found = recognise(error)
    return found if found is not None and not found.of_child and cuda_started() else None


def _chain(error: BaseException) -> list[BaseException]:
    """`error` and all that it was raised from, while handling or as a group, the oldest first.

    A context suppressed by `raise ... from None` counts: it still says what happened before.
    """
    seen: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and id(one) not in seen:
            seen[id(one)] = one
            members = getattr(one, "exceptions", ())
            members = members if isinstance(members, (tuple, list)) else ()
            waiting += [*members, one.__context__, one.__cause__]
    return list(reversed(seen.values()))


_ARGS: Any = BaseException.__dict__["args"]
_LONGEST = 200_000  # characters at each end of a text that are read


def _text(error: BaseException, printed: bool = True) -> str:
    """The strings of an exception. Not `str(error)`: it may format a CUDA tensor.

    `printed`: with what a failed subprocess has printed.
    """
    # Not `error.args`: a class of the user's may have a property by that name.
    parts: list[Any] = list(_ARGS.__get__(error))
    if printed:
        own = object.__getattribute__(error, "__dict__")
        parts += [own.get("stderr"), own.get("output")]
    parts = [part.decode(errors="replace") if isinstance(part, bytes) else part for part in parts]
    texts = [str.__str__(part) for part in parts if isinstance(part, str)]
    return "\n".join(t if len(t) <= 2 * _LONGEST else t[:_LONGEST] + t[-_LONGEST:] for t in texts)


# Classes whose text is the error of another process: of pools (the cause of what they raise),
# `torch.multiprocessing`, `torchrun`, and other kernels.
_CHILDRENS = set(
    "RemoteTraceback _RemoteTraceback ProcessRaisedException ChildFailedError CellExecutionError "
    "PapermillExecutionError".split()
)
_IN_CHILD = re.compile(r"\bin DataLoader worker process \d|^-- Process \d+ terminated", re.M)


def _of_child(error: BaseException) -> bool:
    """Another process met this error, and this one handed it on."""
    if isinstance(error, subprocess.SubprocessError):
        return True
    if {type(error).__name__, type(error.__cause__).__name__} & _CHILDRENS:
        return True
    raised = _text(error, printed=False)
    printed = surface_of(raised) is None and surface_of(_text(error)) is not None
    return printed or _IN_CHILD.search(raised) is not None


def _code(error: BaseException) -> int | None:
    """`error_code` of torch.AcceleratorError; other classes use the name for other things."""
    code = getattr(error, "error_code", None) if isinstance(error, RuntimeError) else None
    return code if type(code) is int else None


def _surface(error: BaseException) -> Surface | None:
    seen = surface_of(_text(error))
    if seen is not None:
        return seen[0]
    code = _code(error)
    surface = None if code is None else surface_of_code(code)
    known = surface is not None and (
        surface.messenger is None or type(error).__name__ == "AcceleratorError"
    )
    return surface if known else None


# ---- texts of other threads and processes, logs, saved notebooks

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NAMED = re.compile(r"(?:^|[\s\]:|])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)): ?")
_THROWN = re.compile(r"throwing an instance of '([^'\n]+)'")
_WHAT = re.compile(r"what\(\): +")
_MESSAGE_END = re.compile(r"\s*$|Traceback |During handling|The above exception|\s*frame #0")
_MESSAGE_LINES = 12
_RANK = re.compile(
    r"\[rank ?(\d+)\]|\[default(\d+)\]|\bRank (\d+)\]|-- Process (\d+) terminated"
    r"|^\s*rank\s*: (\d+)",
    re.MULTILINE,
)


def recognise_text(text: str) -> Sighting | None:
    """The first news of a dead context in any text: a child's output, a traceback, a log.

    A line with an exception's name wins over a mention of the error elsewhere in the text.
    """
    text = _ANSI.sub("", text)
    printed = fold(parse(text))
    if surface_of(text) is None:
        return _from_lines(printed, text)
    rows = text.splitlines()
    news = [(number, seen) for number, row in enumerate(rows) if (seen := surface_of(row))]
    if not news:  # the words are there, but their own line says that it is another error
        return _from_lines(printed, text)
    named = [one for one in news if _name(rows, one[0], one[1][1].start())]
    number, (surface, match) = (named or news)[0]
    end = min(len(rows), number + _MESSAGE_LINES)
    stop = next((at for at in range(number + 1, end) if _MESSAGE_END.match(rows[at])), end)
    row = rows[number]
    heads = [*_NAMED.finditer(row, 0, match.start()), *_WHAT.finditer(row, 0, match.start())]
    start = heads[-1].end() if heads else 0
    return Sighting(
        error=None,
        exception=_name(rows, number, match.start()) or "",
        message="\n".join([row[start:], *rows[number + 1 : stop]]).strip(),
        messenger=surface.messenger,
        assert_lines=printed,
        certain=bool(printed) or any(seen[0].messenger is None for _, seen in news),
        rank=_rank(text, sum(len(each) + 1 for each in rows[: number + 1])),
    )


def _name(rows: list[str], number: int, stop: int) -> str | None:
    """The exception's name before column `stop` of this row, or on the row before for C++ ones."""
    names = _NAMED.findall(rows[number][:stop])
    if names:
        return str(names[-1]).rpartition(".")[2]
    thrown = _THROWN.search("\n".join(rows[max(0, number - 1) : number + 1]))
    return thrown[1] if thrown else None


def _rank(text: str, stop: int) -> int | None:
    """The rank named last before `stop`, else the first one in the text."""
    ranks = list(_RANK.finditer(text))
    before = [match for match in ranks if match.start() < stop]
    chosen = (before[-1:] or ranks[:1])[:1]
    return int(next(group for group in chosen[0].groups() if group)) if chosen else None


def _from_lines(printed: tuple[AssertLine, ...], text: str) -> Sighting | None:
    if not printed:
        return None
    return Sighting(None, "", "", assert_lines=printed, rank=_rank(text, 0))
