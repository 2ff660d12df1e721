"""The MIME bundle of a report: JSON, HTML and text of one display."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import msgspec

from nb_assertdoc import model
from nb_assertdoc.report.cards import Card, card_text
from nb_assertdoc.report.layout import encodable
from nb_assertdoc.report.markup import card_html, html, oneline_html
from nb_assertdoc.report.plain import oneline, text

MOST_BYTES = 1 << 20  # of the JSON in a notebook's output
LIMITS = ((20_000, model.SHOWN_VALUES), (2_000, 64), (200, 16))  # characters, items; tried in turn


def bundle(
    report: model.Report,
    how: str | None = None,
    *,
    brief: bool = False,
    past: bool = False,
    live: bool = True,
) -> dict[str, Any]:
    """The report for one display. `how`: the platform's way to restart.

    `brief`: a later failure of a context whose report was shown already; one line, the same JSON.
    `past`: the kernel has been restarted since. `live`: there is a kernel, which takes magics.
    """
    if brief:
        return {
            model.MIME: plain(report),
            "text/html": oneline_html(report),
            "text/plain": oneline(report),
        }
    return {
        model.MIME: plain(report),
        "text/html": html(report, how, past=past, live=live),
        "text/plain": text(report, how, past=past, live=live),
    }


def card_bundle(card: Card) -> dict[str, Any]:
    """The first card for one display."""
    return {"text/html": card_html(card), "text/plain": card_text(card)}


def json_bytes(report: model.Report) -> bytes:
    """The report as the content of a .json file, in UTF-8."""
    return json.dumps(plain(report), indent=1).encode()


def plain(report: model.Report) -> dict[str, Any]:
    """The report's JSON object as builtins that any JSON writer and UTF-8 can carry, about 1 MB."""
    whole = msgspec.to_builtins(report)
    for characters, items in LIMITS:
        small: dict[str, Any] = _bounded(whole, characters, items)
        if len(json.dumps(small)) <= MOST_BYTES:
            break
    return small


def _bounded(value: Any, characters: int, items: int) -> Any:
    if isinstance(value, dict):
        return {
            key: _bounded(_whole(key, v, characters), characters, items) for key, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_bounded(v, characters, items) for v in value[:items]]
    if isinstance(value, str):
        tail = "" if len(value) <= characters else f"... ({len(value) - characters} more)"
        return encodable(value[:characters]) + tail
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, -(2**63)), 2**64 - 1)
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(sys.float_info.max, value)
    return value


def _whole(key: str, value: Any, characters: int) -> Any:
    """Values whose short form would mislead."""
    if key == "edit" and value and max(len(value["old"]), len(value["new"])) > characters:
        return None  # a cut edit must not be applied
    if key == "value" and isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if key == "bad_values":
        return [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in value]
    return value
