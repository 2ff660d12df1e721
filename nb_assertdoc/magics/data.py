"""`%assertdoc scan` and `%assertdoc ranges`: what the data holds, beside what is valid."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import msgspec

from ..display import Shown
from ..errors import UsageError, WorkerError
from ..lazy import Lazy

if TYPE_CHECKING:
    from .. import report
    from . import Host
else:
    report = Lazy("report")


def scan(shell: Any, host: Host, expression: str, given: argparse.Namespace) -> None:
    """Scan, with the progress and then the result in one display."""
    bound = given.range
    if given.ignore is not None:
        finding = host.report.finding if host.report is not None else None
        bound = bound or (finding.bound if finding is not None else None)
        if bound is None:
            raise UsageError("--ignore needs a range: --range LOW:HIGH")
        bound = msgspec.structs.replace(bound, ignore=given.ignore)
    shown = Shown(shell, None)
    with _Progress(shell, shown, expression or "the data") as progress:
        _, bundle = host.scan(expression, bound=bound, most=given.rows, progress=progress)
    shown.show(bundle)


def ranges(shell: Any, host: Host, given: argparse.Namespace, body: str | None = None) -> None:
    """Replay the first batches of a cell in a worker, and show what operators were given.

    `body`: the cell below `%%assertdoc ranges`.
    """
    if body is not None and given.execution is not None:
        raise UsageError("%%assertdoc ranges takes the cell below it, not a number")
    shown = Shown(shell, None)
    try:
        shown.show(host.ranges(given.batches, given.execution, body))
    except KeyboardInterrupt:
        raise WorkerError("the replay was interrupted") from None


class _Progress:
    """Rows so far: in the display, or as a bar where a terminal cannot take a line back."""

    def __init__(self, shell: Any, shown: Shown, name: str) -> None:
        self._shown, self._name = shown, name
        self._kernel = getattr(shell, "kernel", None) is not None
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int | None) -> None:
        if self._kernel:
            self._shown.show(report.progress_bundle(self._name, done, total))
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=" rows", desc=self._name, leave=False)
        self._bar.update(done - self._bar.n)
