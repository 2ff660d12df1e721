"""The controls: a second display beside the report, of core ipywidgets only, imported lazily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from nb_assertdoc import model
from nb_assertdoc.report import words
from nb_assertdoc.report.layout import encodable, printable

LABELS = {
    "verify": ("Verify the fix on the CPU", "Run the fixed cell on the batch that failed"),
    "scan": ("Scan the data set", "Look for other values that are out of range"),
    "replay": ("Replay on the CPU", "Run the failed cell again in a fresh process"),
    "restart": ("Restart the kernel", "Asks once more: a restart loses what was not saved"),
    "restore": ("Restore variables", "Give the saved variables back to this kernel"),
    "report": ("Show the report", "Draw the report again from disk"),
    "save": ("Save as JSON", "Write the report to a file"),
}
CONFIRM = "restart"  # the one action that cannot be undone
FALLBACK = "run `%assertdoc report`"


def controls(report: model.Report, actions: Mapping[str, Callable[[], str]]) -> Any | None:
    """Buttons for the actions given, and under them what the last one answered.

    An action's answer is plain text; what it prints or displays stays in this widget as well.
    None where ipywidgets is absent.
    """
    try:
        import ipywidgets
    except ImportError:
        return None
    answer = ipywidgets.HTML()
    output = ipywidgets.Output()

    def show(text: str) -> None:
        style = "white-space:pre-wrap;font-family:monospace"
        answer.value = f'<div style="{style}">{escape(encodable(printable(text)))}</div>'

    def button(name: str, action: Callable[[], str]) -> Any:
        label, tip = LABELS.get(name, (f"%assertdoc {name}", ""))
        made = ipywidgets.Button(
            description=label, tooltip=tip, layout=ipywidgets.Layout(width="auto")
        )

        def click(_: object) -> None:
            if name == CONFIRM and made.description == label:
                show(" ".join(words.losses(report)) or "All variables of this kernel will be lost.")
                made.description = "Yes, restart now"
                return
            made.description, made.disabled = label, True
            output.clear_output()
            show("working ...")
            with output:  # it would swallow an exception, so none may leave it
                try:
                    text = action()
                except Exception as error:
                    text = f"{name} failed: {type(error).__name__}: {error}"
            made.disabled = False
            show(text)

        made.on_click(click)
        return made

    row = ipywidgets.Layout(flex_flow="row wrap")
    buttons = ipywidgets.Box([button(name, action) for name, action in actions.items()], layout=row)
    return ipywidgets.VBox([buttons, answer, output])


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
