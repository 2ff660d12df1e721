"""What is shown of a diagnosis: text, HTML, the MIME bundle, the first card, the controls."""

from __future__ import annotations

from nb_assertdoc.report.bundles import bundle, card_bundle, json_bytes
from nb_assertdoc.report.cards import Card, card_text
from nb_assertdoc.report.markup import card_html, html
from nb_assertdoc.report.plain import oneline, text
from nb_assertdoc.report.scans import progress_bundle, ranges_bundle, scan_bundle
from nb_assertdoc.report.widget import Action, Html, controls, controls_bundle
from nb_assertdoc.report.words import RESTARTING, SIMULATED, before_restart

__all__ = [
    "RESTARTING",
    "SIMULATED",
    "Action",
    "Card",
    "Html",
    "before_restart",
    "bundle",
    "card_bundle",
    "card_html",
    "card_text",
    "controls",
    "controls_bundle",
    "html",
    "json_bytes",
    "oneline",
    "progress_bundle",
    "ranges_bundle",
    "scan_bundle",
    "text",
]
