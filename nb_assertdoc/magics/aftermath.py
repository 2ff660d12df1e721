"""`%assertdoc verify`, `restore` and `forget`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..display import Shown
from ..lazy import Lazy

if TYPE_CHECKING:
    from .. import session
    from ..model import Report
    from ..session import stored
else:
    session, stored = Lazy("session"), Lazy("session.stored")


class AftermathHost(Protocol):
    """What these commands need of the flow."""

    def last_room(self) -> str: ...
    def verify(self, source: str | None = None, progress: Any = ...) -> Report: ...
    def restore(self, names: Sequence[str], *, overwrite: bool, nearby: bool) -> str: ...


def verify(shell: Any, host: AftermathHost, body: str | None) -> None:
    """Run the failing batch again with the fix; show the report of it."""
    told: list[str] = []

    def progress(text: str) -> None:
        if not told:  # the first line says what is verified
            print(f"nb_assertdoc: {text} ...")
        told.append(text)

    found = host.verify(body, progress)
    Shown(shell, None).report(found, save=False)


def restore(host: AftermathHost, given: Any) -> None:
    """Give variables of the crashed kernel to this one."""
    print(host.restore(given.names, overwrite=given.overwrite, nearby=given.from_folder))


def forget(host: AftermathHost, everything: bool) -> None:
    """Delete what is stored for this notebook, or for all of this user's."""
    freed = session.forget(None if everything else host.last_room())
    whose = "all notebooks" if everything else "this notebook"
    print(f"Deleted what was stored for {whose}: {stored.amount(freed)}.")
