"""What the report stands on: the driver's lines, the replays, the versions. As in `words`."""

from __future__ import annotations

import math
import re
from collections import Counter

from nb_assertdoc import model
from nb_assertdoc.report.figures import number, plural, size, valid_range
from nb_assertdoc.report.layout import short
from nb_assertdoc.report.words import capital, sentence

ASSERTION = re.compile(r"[Aa]ssertion [`'](.*)[`'] failed", re.DOTALL)


def driver(crash: model.Crash) -> list[str]:
    """The driver's lines: "Indexing.cu `srcIndex < srcSelectDimSize`, 128 lines"."""
    rows = []
    for line in crash.assert_lines[:20]:
        match = ASSERTION.search(line.text[:5000])
        claim = short(match.group(1) if match else line.text, 200)
        file = short(re.split(r"[/\\]", line.kernel_file)[-1], 80)
        rows.append(f"{file} `{claim}`, {plural(line.count, 'line')}")
    return rows


def trust(report: model.Report) -> list[str]:
    """Why the finding may be believed, and what speaks against it."""
    said = []
    differences = [
        capital(sentence(d)) for r in report.replays if r.outcome == "fault" for d in r.differences
    ]
    if report.finding is not None and report.confidence == "certain":
        said.append("Bad values read in the failing call; nothing it depends on was made up.")
    elif report.finding is not None and report.confidence == "likely":
        said.append(
            "Likely, not certain: something that the call depends on was made up or unknown."
        )
    if report.finding is not None:
        said += differences[:4]
    if report.crash is not None and (lines := driver(report.crash)):
        known = all(line.catalogue_id for line in report.crash.assert_lines)
        # A line that contradicts the finding would have lowered the confidence.
        agrees = report.confidence == "certain" and known
        said.append(f"Driver {'agrees' if agrees else 'printed'}: {'; '.join(lines[:3])}.")
    if report.real_error is not None and report.finding is not None:
        error = f"{short(report.real_error.type, 60)}: {short(report.real_error.message, 200)}"
        said.append(f"The CPU's own error: {sentence(error)}")
    return said


def checked(replay: model.Replay) -> str:
    """One line on what a replay did."""
    outcome = {
        "fault": "found the fault",
        "clean": "no fault",
        "other_error": "ended in another error",
        "stopped": "stopped early",
        "unavailable": "not possible here",
    }[replay.outcome]
    text = f"{short(replay.engine, 40)}: {outcome}"
    if replay.outcome != "unavailable":
        text += f" in {replay.seconds:.1f} s" if 0 <= replay.seconds < 1e6 else ""
        text += f", {plural(replay.checks.calls, 'call')} of"
        text += f" {plural(replay.checks.operators, 'operator')} checked"
    if replay.steps is not None:
        text += f", {plural(replay.steps, 'step')}"
    if replay.peak_rss_bytes is not None:
        text += f", {size(replay.peak_rss_bytes)} of memory"
    return text


def tightest(check: model.Tightest) -> str:
    module = f" in `{short(check.module, 80)}`" if check.module else ""
    return (
        f"{short(check.op, 60)} `{short(check.argument, 60)}`{module}: {number(check.value)}, valid"
        f" {valid_range(check.bound)}, margin {number(check.margin)}"
    )


def nearest(report: model.Report) -> list[model.Tightest]:
    """The tightest margins of all replays, the tightest first."""
    found = dict.fromkeys(t for replay in report.replays for t in replay.checks.tightest)
    return sorted(found, key=lambda t: math.inf if math.isnan(t.margin) else t.margin)


def ran(report: model.Report) -> list[str]:
    """What was run and checked: the whole answer where nothing was found."""
    said: list[str] = []
    if report.confidence == "clean":
        calls = max((r.checks.calls for r in report.replays if r.outcome == "clean"), default=0)
        margin = [f", tightest margin {number(t.margin)}" for t in nearest(report)[:1]]
        said.append(f"no fault: {plural(calls, 'call')} checked{''.join(margin)}")
    said += [checked(replay) for replay in report.replays[:8]]
    said += [f"nearest to its bound: {tightest(t)}" for t in nearest(report)[:3]]
    differences = list(dict.fromkeys(d for r in report.replays for d in r.differences))
    said += [f"differs from the GPU run: {sentence(d)}" for d in differences[:6]]
    return said or ["nothing was replayed"]


def versions(environment: model.Environment) -> str:
    """Python, torch, IPython, the system, the devices: "2 x NVIDIA A100"."""
    parts = [
        f"Python {short(environment.python, 60)}",
        f"torch {short(environment.torch or 'not loaded', 60)}",
        f"IPython {short(environment.ipython, 60)}",
        short(environment.platform, 80),
    ]
    for name, count in Counter(environment.devices[:64]).items():
        parts.append(f"{count} x {short(name, 60)}" if count > 1 else short(name, 60))
    return ", ".join(parts)
