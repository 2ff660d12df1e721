"""The controls: a second display beside the report, of core ipywidgets only, imported lazily.

Callbacks run while no cell runs, and must not raise into the user's kernel. Answers go to an HTML
widget: `ipywidgets.Output` loses them on the older stacks once the cell has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from nb_assertdoc.report.layout import encodable, printable

LABELS = {
    "verify": ("Verify on the CPU", "Run the cell above on the batch that failed"),
    "scan": ("Scan the data", "Look for other values that are out of range"),
    "restart": ("Restart the kernel", "Asks once more: a restart loses what was not kept"),
}
ABOVE = "The cell, with the suggested change where there is one. Edit it, then verify."
FALLBACK = "run `%assertdoc report`"
# Live widgets are not sanitised as saved outputs are. A wide line of an answer scrolls by itself.
STYLE = """<style>
.nb-assertdoc textarea {font-family: monospace; white-space: pre}
.nb-assertdoc .widget-html-content {min-width: 0; width: 100%}
</style>"""
MOST_LINES = 24


class Html(str):
    """An answer that is HTML already."""


@dataclass(frozen=True)
class Action:
    """What a button does; it answers with text, or with `Html`.

    `source`: a text that the user may edit first; `run` is then called with it.
    `asks`: what must be confirmed before, since it cannot be undone.
    """

    run: Callable[..., str]
    source: str | None = None
    asks: str = ""


def controls(actions: Mapping[str, Action]) -> Any | None:
    """A button for each action, and under them what the last one answered.

    None where ipywidgets is absent.
    """
    try:
        import ipywidgets
    except ImportError:
        return None
    return _Controls(ipywidgets, actions).box


class _Controls:
    """The widgets, and what their clicks do."""

    def __init__(self, ipywidgets: Any, actions: Mapping[str, Action]) -> None:
        self._widgets = ipywidgets
        self._answer = ipywidgets.HTML()
        self._buttons: list[Any] = []
        editors: list[Any] = []
        for name, action in actions.items():
            editor = None if action.source is None else self._editor(action.source)
            editors += [] if editor is None else [ipywidgets.HTML(_plain(ABOVE)), editor]
            self._buttons.append(self._button_of(name, action, editor))
        self._row = ipywidgets.Box(self._buttons, layout=ipywidgets.Layout(flex_flow="row wrap"))
        self.box = ipywidgets.VBox([ipywidgets.HTML(STYLE), *editors, self._row, self._answer])
        self.box.add_class("nb-assertdoc")

    def _editor(self, source: str) -> Any:
        return self._widgets.Textarea(
            value=source,
            description="Cell",  # what a screen reader calls it
            rows=min(source.count("\n") + 2, MOST_LINES),
            layout=self._widgets.Layout(width="98%"),
        )

    def _button_of(self, name: str, action: Action, editor: Any) -> Any:
        label, tip = LABELS.get(name, (f"%assertdoc {name}", ""))
        if action.asks:
            return self._button(label, tip, lambda: self._ask(name, action))
        return self._button(label, tip, lambda: self._run(name, action, editor))

    def _button(self, label: str, tip: str, click: Callable[[], None], style: str = "") -> Any:
        wide = self._widgets.Layout(width="auto")
        made = self._widgets.Button(description=label, tooltip=tip, layout=wide, button_style=style)
        made.on_click(lambda _: click())
        return made

    def _show(self, text: str) -> None:
        self._answer.value = text if isinstance(text, Html) else _plain(text)

    def _enable(self, allowed: bool) -> None:
        for each in self._buttons:
            each.disabled = not allowed

    def _run(self, name: str, action: Action, editor: Any) -> None:
        self._enable(False)
        self._show("running ...")
        given = [] if editor is None else [editor.value]
        _, said = _answer_of(name, lambda: action.run(*given))
        self._show(said)
        self._enable(True)

    def _ask(self, name: str, action: Action) -> None:
        def yes() -> None:
            self._row.children = self._buttons
            done, said = _answer_of(name, action.run)
            self._show(said)
            self._enable(not done)  # the kernel ends now: what stays drawn must not look alive

        def no() -> None:
            self._row.children = self._buttons
            self._show("")

        self._show(action.asks)
        self._row.children = [
            self._button("Yes, restart now", "This cannot be undone", yes, "danger"),
            self._button("Cancel", "Change nothing", no),
        ]


def _plain(text: str) -> str:
    style = "white-space:pre-wrap;line-height:1.5"
    said = escape(encodable(printable(text)))
    return f'<div role="status" style="{style}">{said}</div>'


def _answer_of(name: str, action: Callable[[], str]) -> tuple[bool, str]:
    """Whether an action came to its end, and its answer.

    What it prints or displays on the way would land in no cell.
    """
    from IPython.utils.capture import capture_output

    try:
        with capture_output():
            return True, action()
    except KeyboardInterrupt:
        return False, f"{name}: interrupted"
    except Exception as error:
        return False, f"{name}: {error}" if str(error) else f"{name}: {type(error).__name__}"


def controls_bundle(widget: Any) -> dict[str, Any]:
    """The display of the controls, with what is left of it in a saved or restarted notebook."""
    return {
        "application/vnd.jupyter.widget-view+json": {
            "version_major": 2,
            "version_minor": 0,
            "model_id": widget.model_id,
        },
        "text/html": "run <code>%assertdoc report</code>",
        "text/plain": FALLBACK,
    }
