"""The phrases that the text view and the HTML view share. All are printable and bounded."""

from __future__ import annotations

import difflib
import re

from nb_assertdoc import model
from nb_assertdoc.report.figures import (
    bound,
    listed,
    number,
    position,
    values,
)
from nb_assertdoc.report.layout import printable, short
from nb_assertdoc.report.steps import in_terminal, once_restarted, read

CONFIDENCE = {
    "certain": "CERTAIN",
    "likely": "LIKELY",
    "not_found": "NOT FOUND",
    "clean": "NO FAULT",
}
# Causes for which "your GPU is fine, the data is out of range" would be wrong.
NOT_THE_DATA = {
    "torch_version_bug",
    "compile_false_assert",
    "dataparallel_split_breaks_index",
    "multi_gpu_device_bug",
    "driver_or_hardware",
    "illegal_access",
    "misattributed_oom",
}
RESTARTING = (
    "Restarting. In the new kernel `%load_ext nb_assertdoc` tells what is kept, and "
    "`%assertdoc report` shows this report again."
)
SAVE, SAVE_OPTIONS = "JSON: %assertdoc save r.json", "JSON: --report R.json, HTML: --html R.html"
SIMULATED = "Simulated GPU"  # the name that the simulated GPU answers with


def sentence(text: str) -> str:
    """The text on one line, ending in a full stop."""
    line = short(text, 1500)
    return line if not line or line[-1] in ".!?:" else line + "."


def capital(text: str) -> str:
    """The text with a capital at its start, unless that is a name in the user's code."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,]", text) else text


def tag(report: model.Report) -> str:
    """The confidence in one word."""
    return "ERROR" if own_error(report) else CONFIDENCE[report.confidence]


def own_error(report: model.Report) -> bool:
    """The cell that was asked about ended in an error that has nothing to do with the GPU."""
    return report.crash is None and report.finding is None and report.real_error is not None


def simulated(report: model.Report) -> bool:
    """True for a run on nb_assertdoc's own simulated GPU."""
    return SIMULATED in report.environment.devices


def execution(count: int | None) -> str:
    return "this cell" if count is None else f"In [{number(count)}]"


def where(place: model.Place, then: str = ", ") -> str:
    """ "In [4], line 14": the cell as the user sees it, else the file."""
    if place.execution_count is not None:
        name = execution(place.execution_count)
    elif place.file:
        name = short(place.file)
        name = name if len(name) <= 50 else "..." + name[-47:]
    elif place.cell is not None:
        name = f"cell {number(place.cell)} (from 0)"
    else:
        name = "this cell"
    return f"{name}{then}line {number(place.line)}" if place.line > 0 else name


def function(place: model.Place) -> str:
    """The function with its arguments; of a cell's own level only the loop variables."""
    name = short(place.function or "", 120)
    return re.sub(r"^<(module|cell line:? ?\d*)>\(?(.*?)\)?$", r"\2", name)


def marked(place: model.Place) -> list[tuple[int, str, int, int]]:
    """The source's lines as (number, line, start, end); start:end is the sub-expression there.

    start == end where nothing of that line is marked. A long source is shown around the mark.
    """
    source = printable(place.source[:20_000]).rstrip("\n")
    wanted = printable(place.expression or "").strip()
    at = source.find(wanted) if wanted else -1
    stop = at + len(wanted) if at >= 0 else -1
    rows, offset = [], 0
    for index, line in enumerate(source.split("\n")):
        start = min(max(at - offset, 0), len(line))
        end = min(max(stop - offset, start), len(line))
        start += len(line[start:end]) - len(line[start:end].lstrip())
        rows.append((place.line + index, line, min(start, end), end))
        offset += len(line) + 1
    first = next((i for i, (_, _, start, end) in enumerate(rows) if end > start), 0)
    return rows[max(first - 3, 0) : first + 5]


def dedented(rows: list[tuple[int, str, int, int]]) -> list[tuple[int, str, int, int]]:
    """The lines of `marked` without the indentation that all of them have."""
    indents = [len(line) - len(line.lstrip()) for _, line, _, _ in rows if line.strip()]
    cut = min(indents, default=0)
    return [(n, line[cut:], max(start - cut, 0), max(end - cut, 0)) for n, line, start, end in rows]


def surface(report: model.Report) -> str:
    """Where the error was raised, if that is another line than the faulty one."""
    crash = report.crash
    if crash is None or report.finding is None or crash.stale or crash.surface.line < 1:
        return ""  # a saved notebook does not tell the line
    place, true = crash.surface, report.finding.location
    if (place.execution_count, place.file, place.line) == (
        true.execution_count,
        true.file,
        true.line,
    ):
        return ""
    code = short(place.expression or place.source, 40)
    return f"{where(place, ' ')}, `{code}`, only noticed it"


def noticed(crash: model.Crash) -> str:
    """Where the error was raised, if that is all that is known."""
    place = crash.surface
    if place.line < 1:
        return "The faulty line is not known."
    name = ", ".join(filter(None, [where(place), function(place)]))
    return f"{name} only noticed it; the faulty line is not known"


def operator(finding: model.Finding) -> str:
    """ "embedding, argument `input`, in `encoder.pos` (Embedding), num_embeddings=512"."""
    text = f"{short(finding.op, 60)}, argument `{short(finding.argument, 60)}`"
    kind = short(finding.module_type or "", 60)
    if finding.module:
        text += f", in `{short(finding.module, 80)}`" + (f" ({kind})" if kind else "")
    elif kind:
        text += f", in {kind}"
    return f"{text}, {short(finding.table, 80)}" if finding.table else text


def amount(finding: model.Finding) -> str:
    text = f"{number(finding.bad_count)} of {number(finding.total)} bad"
    if finding.positions and finding.positions[0]:
        text += f", first at {position(finding.positions[0])}"
    return text


def origin(report: model.Report) -> str:
    """The steps, the data's first; the rows of the batch and the rows of the data set."""
    if report.finding is None or report.finding.step is None:
        return ""
    step = report.finding.step
    inner = model.Round(loop=step.loop, iteration=step.iteration)
    rounds = [_round(each) for each in (*step.around, inner)]
    if step.left_out:
        rounds[0] += f" ({model.batches(step.left_out)} not re-run)"
    text = ", in it ".join(rounds) + ("" if step.left_out else ", counted from 0")
    if step.batch_rows:
        text += f"; row{'s' if len(step.batch_rows) > 1 else ''} {listed(step.batch_rows)}"
    if step.dataset_indices:
        text += " =" if step.batch_rows else ";"
        text += f" dataset[{listed(step.dataset_indices)}]"
    of = " of" if step.batch_rows or step.dataset_indices else ";"
    return text + (f"{of} split `{short(step.split, 40)}`" if step.split else "")


def _round(step: model.Round) -> str:
    loop = short(step.loop, 120).rstrip(":")
    if re.match(r"(async )?(for|while)\b", loop):
        loop = f"`{loop}`"
    elif loop.startswith("loop over"):
        loop = f"the {loop}"  # a library's
    return f"step {number(step.iteration)}" + (f" of {loop}" if loop else "")


def meanings(finding: model.Finding) -> list[str]:
    """What the bad values stand for: "5 is word2id['zebra']"; each value once."""
    known = {e.value: e.meaning for e in finding.examples if e.meaning}
    return [f"{number(value)} is {short(said, 100)}" for value, said in known.items()][:6]


def brief(finding: model.Finding) -> str:
    """One line on a further finding."""
    return (
        f"{operator(finding)}: found {values(finding.bad_values, finding.distinct_bad)}, valid"
        f" {bound(finding)}, {amount(finding)}; {where(finding.location)}"
    )


def event(crash: model.Crash) -> str:
    """What happened, without claiming an assert that nobody saw."""
    known = crash.error_code == 710 or "device-side assert" in crash.message
    return "CUDA device-side assert" if known or crash.assert_lines else "CUDA error"


def headline(report: model.Report) -> str:
    """The first line, without the confidence."""
    seconds = sum(replay.seconds for replay in report.replays)
    took = f" in {seconds:.1f} s" if 0 < seconds < 1e6 else ""
    if report.confidence == "clean":
        return f"No fault found on the CPU{took}."
    if own_error(report):
        return f"The cell ended in an error of its own, on the CPU{took}."
    result = "found on the CPU" if report.finding else "not reproduced on the CPU"
    if report.crash is None:
        return f"Fault {result}{took}."
    rank = "" if report.crash.rank is None else f" (process of rank {number(report.crash.rank)})"
    if report.finding is None and not report.replays:
        return f"{event(report.crash)} in {execution(report.crash.execution_count)}{rank}."
    return f"{event(report.crash)} in {culprit(report.crash)}{rank}: {result}{took}."


def culprit(crash: model.Crash) -> str:
    """The execution that really failed."""
    if not crash.stale:
        return execution(crash.execution_count)
    first = crash.first_failed.execution_count if crash.first_failed else None
    return "an earlier cell" if first is None else execution(first)


def innocent(crash: model.Crash, count: int | None) -> str:
    """ "In [9] is innocent: this kernel's GPU has been dead since In [3]."; `count`: the 9."""
    since = culprit(crash).replace("this cell", "an earlier cell")
    return f"{execution(count)} is innocent: this kernel's GPU has been dead since {since}."


def situation(
    report: model.Report, how: str | None, past: bool = False, live: bool = True
) -> list[str]:
    """What a person must know at once: the GPU is fine, what is dead, what cannot help.

    `past`: the kernel has been restarted since. `live`: there is a kernel.
    """
    crash = report.crash
    if crash is None and not live:
        return []
    if crash is None:
        return [
            "The replay ran in a process of its own: this kernel and its variables are unharmed."
        ]
    said = []
    if past:
        said.append("This happened before the restart: this kernel and its GPU state are fresh.")
    elif crash.stale:
        said.append(innocent(crash, crash.execution_count))
    if crash.messenger:
        name = short(crash.messenger, 60)
        said.append(f"{name} is only the messenger: it met a GPU that was already dead.")
    if not crash.exception:
        said.append("The error itself was caught (try/except); the GPU is dead all the same.")
    key = report.cause.key if report.cause else ""
    if report.finding is not None and key not in NOT_THE_DATA:
        fine = "The GPU is simulated" if simulated(report) else "Your GPU is fine"
        said.append(f"{fine}; the data is out of range.")
    elif report.finding is None and event(crash) == "CUDA device-side assert":
        said.append(
            "A check of values failed on the GPU: nearly always an index out of range, "
            "not a broken GPU."
        )
    if report.finding is None:
        said.append("Is it my hardware? `nb-assertdoc check` in a terminal reads what can tell.")
    if past or not live:
        return said
    way = f" ({short(how)})" if how else ""
    said.append(
        f"This kernel's GPU state is dead: restart it{way}. Until then every GPU cell fails; "
        "re-running or try/except cannot help."
    )
    return said


def because(report: model.Report) -> list[str]:
    """The cause as sentences, the title first, without saying a thing twice."""
    if report.cause is None:
        return []
    cause = report.cause
    said: list[str] = []
    for text in (cause.title, cause.explanation, *cause.because[:12]):
        line = capital(sentence(text))
        if line and not any(line.rstrip(".") in other for other in said):
            said.append(line)
    if len(said) > 1 and said[1].startswith(said[0].rstrip(".")):
        del said[0]
    return said


def fixes(report: model.Report) -> list[tuple[model.Fix, str | None]]:
    """The fixes, each with the code to paste unless one before it has the same."""
    told: set[str | None] = set()
    said = []
    for fix in report.fixes[:6]:
        said.append((fix, None if fix.code in told else fix.code))
        told.add(fix.code)
    return said


def changed(edit: model.Edit) -> list[str]:
    """The edit as diff lines, "- " and "+ " and unchanged context "  "; at most 40."""
    old, new = (printable(part[:20_000]).rstrip("\n").split("\n") for part in (edit.old, edit.new))
    diff = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    rows = ["   ..." if line.startswith("@@") else f"{line[0]}  {line[1:]}" for line in diff]
    rows = rows[1:] if rows and rows[0] == "   ..." else rows
    return rows if len(rows) <= 40 else [*rows[:40], "   ..."]


def edited(report: model.Report, edit: model.Edit) -> str:
    """The cell that an edit is for, as the user sees it."""
    if edit.cell_id is None:
        return ""
    finding, crash = report.finding, report.crash
    places = [*(finding.user_frames if finding else ()), *([finding.location] if finding else [])]
    places += [crash.surface] if crash else []
    for place in places:
        if place.cell_id == edit.cell_id and place.execution_count is not None:
            return execution(place.execution_count)
    return f"cell {short(edit.cell_id, 40)}"


def steps(report: model.Report, past: bool = False, live: bool = True) -> list[str]:
    """What to do next; after the restart not what leads to it, in a terminal no magics."""
    told = []
    for step in report.next_steps[:9]:
        step = once_restarted(step) if past else step
        step = step if live else in_terminal(step)
        told += [step[:1000]] if step else []
    return told


def losses(report: model.Report, past: bool = False, live: bool = True) -> list[str]:
    """What a restart loses, or has lost: nothing is said where none is needed."""
    said: list[str] = []
    stored = any(read(step).given_back for step in report.next_steps)
    if report.crash is None or not live or (stored and not past):  # that step says it
        return said
    if report.lost:
        names = [lost(variable) for variable in report.lost[:8]]
        more = f" and {len(report.lost) - 8} more" if len(report.lost) > 8 else ""
        loses = "The restart has lost" if past else "A restart loses"
        said.append(f"{loses} {', '.join(names)}{more}.")
    if report.kept and not past:
        names = [short(v.name, 60) for v in report.kept[:12]]
        more = f" and {len(report.kept) - 12} more" if len(report.kept) > 12 else ""
        said.append(f"Still good, save what you need before it: {', '.join(names)}{more}.")
    return said


def lost(variable: model.Lost) -> str:
    """ "`model` (Net)", "`model.head` (Linear)", "`x` (variable)"."""
    name, what = short(variable.name, 60), short(variable.what, 80)
    path = re.fullmatch(r"(.+) \((.+)\)", what)
    if path and path[1].startswith(name):
        return f"`{path[1]}` ({path[2]})"
    return f"`{name}`" if what == name else f"`{name}` ({what})"


def before_restart(report: model.Report | None, forewarn: str) -> str:
    """What a restart loses and keeps, and what the front end will say of it."""
    steps = map(read, report.next_steps if report is not None else ())
    said = [step.words for step in steps if step.foretells]
    said = said or ["all variables of this kernel are lost"]
    return "\n".join(sentence(line[:1].upper() + line[1:]) for line in [*said, forewarn] if line)
