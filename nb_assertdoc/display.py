"""The one permanent display of a crash: first the card, then the report in its place."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .lazy import Lazy

if TYPE_CHECKING:
    from . import report as views
    from . import session
    from .model import Report
else:
    views, session = Lazy("report"), Lazy("session")

log = logging.getLogger("nb_assertdoc")


@contextlib.contextmanager
def _harmlessly() -> Iterator[None]:
    """Whatever a front end's publisher or a view raises is logged: the user's cell goes on."""
    try:
        yield
    except Exception:
        log.exception("nb_assertdoc: could not show what it has to say")


class Shown:
    """A display that is updated in place. Nothing here raises into the user's cell."""

    def __init__(self, shell: Any, card: views.Card | None) -> None:
        self._shell = shell
        self._card = card
        self._how = card.how_to_restart if card is not None else None
        self._id: str | None = None
        self._bundle: dict[str, Any] = {}
        self._captured = False
        if card is not None:
            with _harmlessly():
                self._publish(views.card_bundle(card))

    @_harmlessly()
    def progress(self, text: str) -> None:
        """Say in the card what is being done."""
        terminal = getattr(self._shell, "kernel", None) is None
        if self._card is None or terminal:  # a terminal cannot take a line back
            return
        self._publish(views.card_bundle(replace(self._card, progress=text)))

    def report(
        self,
        report: Report,
        *,
        line_only: bool = False,
        headless: bool = False,
        save: bool = True,
        past: bool = False,
    ) -> None:
        """Put the report in the card's place. `save`: as the notebook's last one.

        `past`: it is about the kernel before this one.
        """
        with _harmlessly():
            bundle = views.bundle(report, self._how, brief=line_only, past=past)
            self._publish(bundle)
            if headless and os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch":
                print(bundle["text/plain"], file=sys.__stderr__)  # a batch run shows its log alone
        if save and not line_only:
            with _harmlessly():
                session.save(report, session.key(self._shell))

    @_harmlessly()
    def update(self, report: Report, line: str) -> None:
        """Put a newer form of the report in its place; a terminal gets the line instead."""
        if getattr(self._shell, "kernel", None) is not None:
            self.report(report)
            return
        session.save(report, session.key(self._shell))
        print(line)

    def controls(self, actions: Mapping[str, views.Action]) -> None:
        """The buttons, as a second display: in one bundle they would hide the report's HTML."""
        if getattr(self._shell, "kernel", None) is None or not actions:
            return
        with contextlib.suppress(Exception):
            widget = views.controls(actions)
            if widget is not None:
                self._send(views.controls_bundle(widget), None, False)

    @_harmlessly()
    def show(self, bundle: dict[str, Any]) -> None:
        """Show a bundle, or put it in the place of the one before."""
        self._publish(bundle)

    @_harmlessly()
    def again(self) -> None:
        """Show it again if `%%capture` has swallowed it."""
        if self._captured and self._bundle:
            self._send(self._bundle, None, False)

    def _publish(self, bundle: dict[str, Any]) -> None:
        update = self._id is not None
        self._id = self._id or f"nb-assertdoc-{os.urandom(16).hex()}"
        self._bundle = bundle
        self._captured |= type(self._shell.display_pub).__name__ == "CapturingDisplayPublisher"
        try:
            self._send(bundle, self._id, update)
        except Exception:  # after an interrupt it may be there
            self._id = self._id if update else None
            raise

    def _send(self, bundle: dict[str, Any], display_id: str | None, update: bool) -> None:
        transient = {"display_id": display_id} if display_id else {}
        self._shell.display_pub.publish(
            data=bundle, metadata={}, transient=transient, update=update
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
