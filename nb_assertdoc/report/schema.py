"""The published JSON schema of the report: `python -m nb_assertdoc.report.schema` writes it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from nb_assertdoc import model

FILE = Path(__file__).with_name("report.schema.json")


def schema() -> str:
    """The schema generated from `model.Report`, as the text of the file."""
    generated = msgspec.json.schema(model.Report)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": model.SCHEMA}
    return json.dumps({**head, **generated}, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema(), encoding="utf-8")
