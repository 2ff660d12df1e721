"""`%assertdoc verify`, `restore` and `forget`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..display import Shown
from ..errors import UsageError
from ..lazy import Lazy

if TYPE_CHECKING:
    from .. import doctor, session
    from ..model import Report
    from ..recorder import Recorder
    from ..session import stored
else:
    doctor, session, stored = Lazy("doctor"), Lazy("session"), Lazy("session.stored")


class Host(Protocol):
    """What these commands need of the flow."""

    recorder: Recorder

    def last_room(self) -> str: ...
    def verify(self, source: str | None = None, progress: Any = ...) -> Report: ...


def verify(shell: Any, host: Host, body: str | None) -> None:
    """Run the failing batch again with the fix; show the report of it."""
    told: list[str] = []

    def progress(text: str) -> None:
        if not told:  # the first line says what is verified
            print(f"nb_assertdoc: {text} ...")
        told.append(text)

    found = host.verify(body, progress)
    Shown(shell, None).report(found, save=False)


def restore(shell: Any, host: Host, given: Any) -> None:
    """Give variables of the crashed kernel to this one."""
    if host.recorder.context_dead:
        raise UsageError(
            "this kernel still has its variables, and its GPU state is dead: restart it first"
        )
    print(doctor.restore(host.last_room(), shell.user_ns, given.names, given.overwrite))


def forget(host: Host, everything: bool) -> None:
    """Delete what is stored for this notebook, or for all of this user's."""
    freed = session.forget(None if everything else host.last_room())
    whose = "all notebooks" if everything else "this notebook"
    print(f"Deleted what was stored for {whose}: {stored.amount(freed)}.")
