"""What is shown of a diagnosis: text, HTML, the MIME bundle, the first card, the controls."""

from __future__ import annotations

from nb_assertdoc.report.bundles import bundle, card_bundle, json_bytes
from nb_assertdoc.report.cards import Card, card_text
from nb_assertdoc.report.markup import card_html, html
from nb_assertdoc.report.plain import oneline, text
from nb_assertdoc.report.widget import controls, controls_bundle

__all__ = [
    "Card",
    "bundle",
    "card_bundle",
    "card_html",
    "card_text",
    "controls",
    "controls_bundle",
    "html",
    "json_bytes",
    "oneline",
    "text",
]
