"""Which loops of the user's code are under way at a call, and which of them asks for the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from .loops import Loop, LoopCounter, is_generator
from .sources import Window


@dataclass(frozen=True)
class Under:
    """One loop that is under way. `loop` and `frame` are None for a library's over its loader."""

    frame: FrameType | None
    loop: Loop | None
    source: str
    count: int  # 0-based; of the rounds that this process has run


def under_way(
    users: Sequence[FrameType], loops: LoopCounter, window: Window
) -> tuple[list[Under], int | None]:
    """The loops around the line that runs, outermost first; which of them goes over the loader.

    None where no loop goes over it, or where that cannot be told. `users`: outermost first.
    """
    found = [
        Under(frame, loop, loop.source, count)
        for frame in users
        for loop, count in loops.around(frame, frame.f_lineno)
    ]
    if not window.active:
        return found, None
    near = (window.given - 1, window.given - 2)  # who asks may hold one batch back
    for code, line in reversed(window.sites):
        for at, under in enumerate(found):
            if under.frame is None or under.frame.f_code is not code or under.loop is None:
                continue
            one_line = under.loop.one_line and line in under.loop.body and under.count in near
            if line in under.loop.header or one_line:
                return found, at
    if window.by_library and window.sites:
        for depth, frame in enumerate(users):
            if (frame.f_code, frame.f_lineno) == window.sites[-1]:  # it still waits there
                at = sum(u.frame in users[: depth + 1] for u in found)
                return [*found[:at], Under(None, None, library_loop(window), 0), *found[at:]], at
    if any(loops.heads(*site) and not is_generator(site[0]) for site in window.sites):
        return found, None  # that loop was left; a generator's may wait to go on
    outside = {id(u) for u in found if _asked_within(u, window)}
    counting = (i for i, u in enumerate(found) if id(u) not in outside and u.count in near)
    return found, next(counting, None)


def library_loop(window: Window) -> str:
    """What stands for the header of a loop that is not the user's."""
    return f"loop over a {type(window.loader).__name__}"


def _asked_within(under: Under, window: Window) -> bool:
    """The iterator was made within the loop's body: each round has its own."""
    return any(
        under.frame is not None
        and under.loop is not None
        and under.frame.f_code is code
        and line in under.loop.body
        for code, line in window.sites
    )
