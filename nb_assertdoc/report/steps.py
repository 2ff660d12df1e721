"""The steps that a report names: each is written here, and known again here.

`Report.next_steps` holds strings, by contract: a command and what it is for, or a sentence alone.
Views must know what a step is (a restart is none once it is done; a terminal has no magics). They
know it by its command, or by a phrase of this module: reword a step here, and it is still known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["verify", "scan", "replay", "restart", "restore", "forget", "save", "blocking", ""]
_BEGINS: dict[Kind, str] = {  # how the steps of a kind begin
    "verify": "%%?assertdoc verify",
    "scan": "%assertdoc scan",
    "replay": "%%?cpu_replay",
    "restart": r"%assertdoc restart|restart \(",
    "restore": "%assertdoc restore",
    "forget": "%assertdoc forget",
    "save": "%assertdoc save",
    "blocking": "restart, set CUDA_LAUNCH_BLOCKING",
}
FURTHER_ENGINES = {  # and what they do beyond the first
    "cpu": "compute the float values, too",
    "history": "run the earlier cells again on the CPU",
}
_SHOWN = 8  # names in one line
_LOST, _GIVES_BACK = "lost: ", "gives back "


def _step(command: str, words: str) -> str:
    return f"{command}    {words}"


# ---- written

_RESTORE = "%assertdoc restore"
SCAN = _step("%assertdoc scan", "the whole data set for other such values")
CHECK_AGAIN = _step("%%cpu_replay", "above the mended cell: checks it again")
VERIFY_ANOTHER = _step("%%assertdoc verify", "above an edited cell tries it on the same batch")
RESTORE = _step(_RESTORE, "after it gives back the variables")
SAVE = _step("%assertdoc save report.json", "this report as a file")
RUN_AGAIN = _step("apply the fix, then run the notebook again", "a new run starts a new kernel")
BLOCKING = "restart, set CUDA_LAUNCH_BLOCKING=1 before CUDA starts, and run once more"


def verify(fixed: bool) -> str:
    """Run the failing batch again. `fixed`: a fix is suggested."""
    what = "the suggested fix" if fixed else "the cell as you have changed it,"
    return _step("%assertdoc verify", f"{what} on the batch that failed, on the CPU")


def restart(how: str, by_magic: bool, words: str = "this kernel's GPU state is dead") -> str:
    """Restart the kernel. `how`: the platform's own way, where no magic can do it."""
    return _step("%assertdoc restart" if by_magic else f"restart ({how})", words)


def foretold(lost: Sequence[str], kept: Sequence[str]) -> str:
    """The words of a restart: names of the variables that are lost, and of those that are kept."""
    said = f"{_LOST}{_names(lost)}. " if lost else ""
    return said + (
        f"After it {_RESTORE} {_GIVES_BACK}{_names(kept)}" if kept else "nothing is kept"
    )


def replay(engine: str, magic: str = "%cpu_replay") -> str:
    """Replay with one of the further engines."""
    return _step(f"{magic} --engine {engine}", FURTHER_ENGINES[engine])


def replay_of(execution_count: int | None) -> str:
    """Replay an earlier cell."""
    return _step(f"%cpu_replay {execution_count}", "that cell may have killed the GPU before")


def forget(size: str, where: str, days: float) -> str:
    """Delete what is stored. `where`: its folder; `days`: how long it lies there by itself."""
    return _step(
        "%assertdoc forget",
        f"deletes what is stored for that: {size} in {where}, for your user alone, for {days:g} "
        f"day{'' if days == 1 else 's'}",
    )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


# ---- known again


@dataclass(frozen=True)
class NextStep:
    """A step as it was read. A sentence alone has no command."""

    kind: Kind
    command: str
    words: str

    @property
    def engine(self) -> str:
        """What a replay is asked to use."""
        found = re.match(r"%%?cpu_replay --engine (\w+)", self.command)
        return found[1] if found else ""

    @property
    def given_back(self) -> str:
        """Of a restart: the names of the variables that come back after it."""
        return (
            self.words.partition(f"{_RESTORE} {_GIVES_BACK}")[2] if self.kind == "restart" else ""
        )

    @property
    def foretells(self) -> bool:
        """True for a restart that says what is lost by it, or what comes back."""
        return bool(self.given_back) or (self.kind == "restart" and _LOST in self.words)


def read(step: str) -> NextStep:
    """What a step is. Two spaces or more part its command from its words."""
    found = re.fullmatch(r"(\S.*?) {2,}(.*)", step, re.DOTALL)
    command, words = (found[1], found[2]) if found else ("", step)
    kinds: list[Kind] = [kind for kind, begins in _BEGINS.items() if re.match(begins, step)]
    return NextStep(kinds[0] if kinds else "", command, words)


def once_restarted(step: str) -> str:
    """What is left of a step in the kernel after the crash: "" where it is done."""
    known = read(step)
    if known.given_back:
        return _step(_RESTORE, f"{_GIVES_BACK}{known.given_back}")
    return "" if known.kind in ("restart", "blocking") else step


def in_terminal(step: str) -> str:
    """A step as a command of the terminal: "" where there is none."""
    known = read(step)
    if known.engine:
        return _step(f"nb-assertdoc run --engine {known.engine}", known.words)
    if known.kind == "blocking":
        return _step("nb-assertdoc run --launch-blocking", "the traceback names the true line")
    return "" if step.startswith("%") else step
