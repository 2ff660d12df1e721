"""What outlives a notebook's kernel: what is kept after the crash, and what the next kernel finds.

`Flow` is what happens in the kernel that crashed; this is the rest of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .display import Shown
from .errors import UsageError
from .lazy import Lazy
from .recorder import Execution, Recorder
from .settings import settings

if TYPE_CHECKING:
    from . import doctor, frames, restart, salvage, session
    from .model import Crash, Report
    from .session import stored
else:
    doctor, frames, restart = Lazy("doctor"), Lazy("frames"), Lazy("restart")
    salvage, session, stored = Lazy("salvage"), Lazy("session"), Lazy("session.stored")


class Aftermath:
    """The part of a kernel's diagnosis that is stored for the kernel after it."""

    def __init__(self, shell: Any, recorder: Recorder) -> None:
        self.shell = shell
        self.recorder = recorder
        self.report: Report | None = None  # the last one
        self.first: Execution | None = None  # the execution that killed the context
        self.found: Report | None = None  # the report about it; `report` may be about another cell
        self.room = ""  # of the notebook's last kernel, where that left something
        self.met = 0  # number of the execution that met the error
        self.crash: Crash | None = None  # what was seen of it
        self._kept = False  # its variables
        self._fix_awaited = False  # in the kernel after it

    def keeps(self) -> bool:
        """After a headless run there is nobody to give anything back to."""
        return settings().keep and not restart.adapter(self.shell).headless

    def keep(self, shown: Shown) -> None:
        """Once the crash's report is shown: keep the variables, and say so in the report."""
        if self._kept or self.first is None or not self.keeps():
            return
        names = self.shell.user_ns
        hidden = {n for n in names if n.startswith("_") or salvage.hidden(n, names[n])}
        self.room = session.key(self.shell)
        left = doctor.keep_variables(
            names,
            self.room,
            own=[n for n in names if n not in hidden and n not in self.shell.user_ns_hidden],
            earlier=self.recorder.sources(),
            integers=self.recorder.integers_now(),
            execution_count=self.first.execution_count,
            shell=self.shell,
        )
        self._kept = left is not None
        if left is not None and self.found is not None and self.report is self.found:
            self.report = self.found = doctor.with_stored(self.found, left, self.room)
            shown.update(self.found, doctor.describe(self.room))

    def last_room(self) -> str:
        """The session's room of the crash: of this kernel, or of the notebook's last one."""
        self.room = self.room or session.last_key(self.shell)
        return self.room

    def announce(self) -> None:
        """At the load, in the kernel after the crash: what waits. One look at the disk."""
        if self.recorder.context_dead:
            return
        room = self.last_room()
        if session.waiting(room):
            print(stored.announcement(room))
        elif (nearby := session.nearby_key(self.shell)) and session.waiting(nearby):
            print(stored.announcement(nearby, nearby=True))
        self._fix_awaited = session.fix_awaited(room)

    def loaded_again(self) -> None:
        """Where the extension was unloaded in the kernel that crashed: what it knew of that."""
        room = self.last_room()
        if not session.of_this_process(room):
            return
        self.recorder.context_dead = True
        kept = session.load(room)
        if kept is not None:
            self.report = self.found = kept[0]
            self.crash = self.found.crash
        how = restart.adapter(self.shell).how
        print(f"nb_assertdoc: the GPU state of this kernel is still dead: restart it ({how}).")

    def restore(self, names: Sequence[str], *, overwrite: bool, nearby: bool) -> str:
        """Give the crashed kernel's variables to this one; what was done, in words.

        `nearby`: those of another kernel in this folder. Raises `UsageError`.
        """
        room = session.nearby_key(self.shell) if nearby else self.last_room()
        if self.recorder.context_dead or session.of_this_process(room or ""):
            raise UsageError(
                "this kernel still has its variables, and its GPU state is dead: restart it first"
            )
        if room is None:
            raise UsageError("no other kernel that has ended left variables in this folder")
        said = doctor.restore(room, self.shell.user_ns, names, overwrite)
        self.recorder.restored = stored.sources(room)  # the code that came back has its lines
        frames.Cells(self.recorder.restored).teach_linecache()
        return said

    def verify(
        self, source: str | None = None, progress: Callable[[str], None] = lambda text: None
    ) -> Report:
        """Run the failing batch on the CPU with the code as it is now; `clean`: it passes.

        `source`: the edited cell; without it, what was changed since the crash, else the suggested
        fix. `progress` is first told what is verified. Raises an `AssertdocError` where nothing is
        kept, or there is nothing to verify.
        """
        room, first = self.last_room(), self.first
        kept = session.load(room) if self.found is None else None
        report = self.found if self.found is not None else kept[0] if kept else None
        since = max(self.met, first.number) if first is not None else 0
        later = [e for e in self.recorder.executions if e.number > since and not ours(e.source)]
        return doctor.verify(
            room,
            report,
            source=source,
            later=[e.as_source() for e in later if e.succeeded is not False],
            reruns=[e.as_source() for e in later],
            stopped=[e.as_source() for e in later if e.met_dead],
            same_kernel=self.recorder.context_dead,
            progress=progress,
        )

    def finished(self, execution: Execution) -> None:
        """A cell ended well: one line if it is the fixed one, in the kernel after the crash."""
        torch = sys.modules.get("torch")
        if not self._fix_awaited or self.recorder.context_dead or torch is None:
            return
        if not torch.cuda.is_initialized():
            return
        line = doctor.confirmation(self.last_room(), execution.as_source(), torch.cuda.synchronize)
        if line is not None:
            self._fix_awaited = False
            print(line)


def ours(source: str) -> bool:
    """The cell did nothing for the notebook: it only asked us."""
    if source.lstrip().startswith(("%%cpu_replay", "%%assertdoc")):
        return True
    lines = [line for line in source.splitlines() if line.strip()]
    return bool(lines) and all(
        line.lstrip().startswith(("%assertdoc", "%cpu_replay", "%load_ext nb_assertdoc"))
        for line in lines
    )
