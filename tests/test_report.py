from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import os
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import msgspec
import msgspec.inspect as mi
import nbformat
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from nbclient import NotebookClient

from nb_assertdoc import doctor, model, report, scan
from nb_assertdoc.doctor.assembly import assemble
from nb_assertdoc.doctor.ladder import own_error
from nb_assertdoc.doctor.steps import next_steps
from nb_assertdoc.report import figures, layout, steps
from nb_assertdoc.report.code import wrap_code
from nb_assertdoc.report.schema import FILE, schema

CALL = model.Place(
    line=14,
    source="        x = self.tok(ids) + self.pos(pos)",
    execution_count=4,
    cell=3,
    cell_id="c4",
    expression="self.pos(pos)",
    function="Encoder.forward",
)
CALLER = model.Place(
    line=8,
    source="    loss = model(batch).mean()",
    execution_count=6,
    cell_id="c6",
    function="<module>(step=40)",
)
SURFACE = replace(CALLER, line=9, source="    batch = batch.to(device)", expression=".to(device)")
DRIVER = model.AssertLine(
    text="/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: "
    "[1,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    catalogue_id="index_select",
    kernel_file="Indexing.cu",
    line=1289,
    count=128,
)
CRASH = model.Crash(
    exception="AcceleratorError",
    message="CUDA error: device-side assert triggered\n",
    surface=SURFACE,
    execution_count=6,
    error_code=710,
    assert_lines=(DRIVER,),
)
FINDING = model.Finding(
    op="embedding",
    aten_op="aten.embedding.default",
    argument="input",
    bad_values=tuple(range(512, 640)),
    distinct_bad=128,
    bad_count=128,
    total=640,
    positions=tuple((index,) for index in range(512, 640)),
    bound=model.Bound(low=0, high=512),
    margin=128.0,
    module="encoder.pos",
    module_type="Embedding",
    table="num_embeddings=512",
    location=CALL,
    user_frames=(CALLER, CALL),
    step=model.Step(
        loop="for step, batch in enumerate(dl):",
        iteration=40,
        batch_rows=(3,),
        dataset_indices=(643,),
        left_out=(model.Span(first=0, last=39),),
    ),
)
TIGHT = model.Tightest(
    op="embedding",
    argument="input",
    module="encoder.tok",
    value=29998,
    bound=model.Bound(low=0, high=30000),
    margin=1.0,
)
REPLAY = model.Replay(
    engine="ghost",
    outcome="fault",
    seconds=3.1,
    steps=1,
    checks=model.Checks(calls=118, operators=14, tightest=(TIGHT,)),
)
ENVIRONMENT = model.Environment(python="3.11.7", ipython="9.18.1", platform="jupyter")
REPORT = model.Report(
    confidence="certain",
    headline="Position 512 does not exist: the position table has rows 0..511, "
    "this batch needs 0..639.",
    environment=ENVIRONMENT,
    crash=CRASH,
    finding=FINDING,
    cause=model.Cause(
        key="position_ge_max",
        title="The text is longer than the model's 512 positions",
        explanation="The tokenizer only warned (In [2]).",
        because=("dataset[643] has 640 tokens, the next longest 87.",),
    ),
    fixes=(
        model.Fix(
            title="Cut the texts",
            explanation="",
            edit=model.Edit(
                cell_id="c6",
                old="ids = [tok(t) for t in texts]",
                new="ids = [tok(t)[:512] for t in texts]",
            ),
        ),
        model.Fix(
            title="Keep it checked",
            explanation="",
            code='assert ids.size(1) <= 512, f"{ids.size(1)} tokens > 512 positions"',
        ),
    ),
    real_error=model.RealError(type="IndexError", message="index out of range in self"),
    replays=(REPLAY,),
    lost=(model.Lost(name="model", what="weights", why="on the dead GPU"),),
    kept=(
        model.Kept(name="texts", type="list", bytes=2000),
        model.Kept(name="tok", type="Tokenizer", bytes=500_000),
    ),
    next_steps=(
        "%assertdoc verify    the fixed cell on the same batch, on the CPU",
        "%assertdoc scan      other texts that are too long",
        "%assertdoc restart   restart this kernel",
    ),
)
IDEAL = """\
CUDA device-side assert in In [6]: found on the CPU in 3.1 s.                         CERTAIN
  Position 512 does not exist: the position table has rows 0..511, this batch needs 0..639.
  Your GPU is fine; the data is out of range. This kernel's GPU state is dead: restart it (Kernel >
  Restart). Until then every GPU cell fails; re-running or try/except cannot help.

WHERE   In [4], line 14, Encoder.forward     (In [6] line 9, `.to(device)`, only noticed it)
          In [6], line 8, step=40: loss = model(batch).mean()
        -> 14          x = self.tok(ids) + self.pos(pos)
                                           ^^^^^^^^^^^^^
WHAT    embedding, argument `input`, in `encoder.pos` (Embedding), num_embeddings=512
          valid 0 <= index < 512     found 512..639     128 of 640 bad, first at [512]
FROM    step 40 of `for step, batch in enumerate(dl)` (batches 0..39 not re-run); row 3 =
        dataset[643]
WHY     The text is longer than the model's 512 positions. The tokenizer only warned (In [2]).
        dataset[643] has 640 tokens, the next longest 87.
FIX     Cut the texts.
          In [6]  -  ids = [tok(t) for t in texts]
                  +  ids = [tok(t)[:512] for t in texts]
        Keep it checked.
          assert ids.size(1) <= 512, f"{ids.size(1)} tokens > 512 positions"
NEXT    1 %assertdoc verify    the fixed cell on the same batch, on the CPU
        2 %assertdoc scan      other texts that are too long
        3 %assertdoc restart   restart this kernel
        A restart loses `model` (weights).
        Still good, save what you need before it: texts, tok.
TRUST   Bad values read in the failing call; nothing it depends on was made up. Driver agrees:
        Indexing.cu `srcIndex < srcSelectDimSize`, 128 lines. The CPU's own error: IndexError: index
        out of range in self.     JSON: %assertdoc save r.json"""

NASTY = (
    "",
    "\x1b[31mred\x1b]0;title\x07",
    "a\rb\x00c\x9b2Jd\n\n e",
    "\u202etxt.exe\u2066\u200b\ufeff",
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "\" onmouseover=\"alert(3)' style='x",
    "\ud800\udfff \udc80",
    "{{ 7 * 7 }}{% raw %}",
    "w" * 700,
    "\u6f22\u5b57" * 80,
    "e\u0301\U0001f469\u200d\U0001f4bb",
    "line one\nline two\n\tline three",
    "%s %d {0} `x` Assertion `i < n` failed.",
)


def plain_text(value: model.Report) -> str:
    """The text view with its line breaks undone, so that a sentence can be looked for."""
    return " ".join(report.text(value).split())


# ---- the text view


def test_text_is_the_ideal() -> None:
    assert report.text(REPORT, "Kernel > Restart") == IDEAL


def test_likely_names_what_was_made_up() -> None:
    replay = replace(REPLAY, differences=("the sampled ids come from made-up logits",))
    text = plain_text(replace(REPORT, confidence="likely", replays=(replay,)))
    assert "LIKELY" in text and "CERTAIN" not in text
    assert "unknown. The sampled ids come from made-up logits." in text
    assert "Driver printed: Indexing.cu" in text and "agrees" not in text


def test_not_found_says_what_ran_and_what_differs() -> None:
    ghost = replace(REPLAY, outcome="clean", differences=("dropout masks are made up",))
    stopped = model.Replay(engine="cpu", outcome="stopped", seconds=15.0)
    text = plain_text(
        replace(
            REPORT,
            confidence="not_found",
            finding=None,
            cause=None,
            fixes=(),
            replays=(ghost, stopped),
        )
    )
    assert "In [6]: not reproduced on the CPU in 18.1 s." in text and "NOT FOUND" in text
    assert "In [6], line 9, step=40 only noticed it; the faulty line is not known" in text
    assert "ghost: no fault in 3.1 s, 118 calls of 14 operators checked, 1 step" in text
    assert "cpu: stopped early in 15.0 s, 0 calls of 0 operators checked" in text
    assert "29998, valid 0 <= index < 30000, margin 1" in text
    assert "differs from the GPU run: dropout masks are made up." in text
    assert "1 %assertdoc verify" in text
    assert "the data is out of range" not in text


def test_clean_says_how_much_was_checked_and_nothing_of_a_crash() -> None:
    clean = model.Report(
        confidence="clean",
        headline="No fault",
        environment=ENVIRONMENT,
        replays=(replace(REPLAY, outcome="clean"),),
    )
    text = plain_text(clean)
    assert "NO FAULT" in text
    assert "no fault: 118 calls checked, tightest margin 1" in text
    assert "this kernel and its variables are unharmed" in text
    assert "dead" not in text and "restart" not in text.lower()
    assert "TRUST" not in text and "TRUST" not in Page(report.html(clean)).said


def test_a_cell_with_an_error_of_its_own_is_not_called_a_missed_fault() -> None:
    error = model.RealError(type="NameError", message="name 'x' is not defined", traceback=("T",))
    headline = "Your cell raised NameError: name 'x' is not defined on the CPU, before any index."
    own = replace(
        REPORT,
        confidence="not_found",
        headline=headline,
        crash=None,
        finding=None,
        cause=None,
        fixes=(),
        real_error=error,
        replays=(replace(REPLAY, outcome="other_error"),),
        next_steps=("mend that error first",),
    )
    text = plain_text(own)
    assert text.startswith("The cell ended in an error of its own, on the CPU in 3.1 s. ERROR")
    assert text.count("NameError") == 1 and "not reproduced" not in text and "TRUST" not in text
    assert "ERROR" in Page(report.html(own)).said


def test_a_report_for_a_terminal_names_nothing_that_cannot_be_typed_there() -> None:
    steps = (
        "apply the fix, then run the notebook again    a new run starts a new kernel",
        "%cpu_replay --engine history    run the earlier cells again on the CPU",
        "restart, set CUDA_LAUNCH_BLOCKING=1 before CUDA starts, and run once more",
        "%assertdoc save report.json    this report as a file",
    )
    value = replace(REPORT, next_steps=steps)
    for shown in (report.text(value, live=False), Page(report.html(value, live=False)).said):
        said = " ".join(shown.split())
        assert "%" not in said.replace("100%", "") and "save what you need" not in said
        assert "state is dead" not in said and "A restart loses" not in said
        assert "nb-assertdoc run --engine history" in said
        assert "nb-assertdoc run --launch-blocking" in said and "restart" not in said
    text = " ".join(report.text(value, live=False).split())
    assert "NEXT 1 apply the fix, then run the notebook again a new run starts" in text
    assert text.endswith("JSON: --report R.json, HTML: --html R.html")
    page = Page(report.html(value)).said
    assert "run the notebook again \u2013 a new run starts a new kernel" in " ".join(page.split())


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("model", "model (Clf)", "`model` (Clf)"),
        ("net", "net.head.bias (Parameter)", "`net.head.bias` (Parameter)"),
        ("x", "variable", "`x` (variable)"),
        ("file", "file", "`file`"),
    ],
)
def test_a_lost_variable_is_named_once(name: str, what: str, said: str) -> None:
    value = replace(REPORT, lost=(model.Lost(name=name, what=what, why="gone"),))
    assert f"A restart loses {said}." in plain_text(value)
    assert f"{said.replace('`', '')}: gone" in " ".join(Page(report.html(value)).said.split())


EARLIER = model.Source(filename="<1>", source="y = 1")
CELL = model.Source(filename="<2>", source="print(y)", execution_count=6)


@pytest.mark.parametrize(
    ("tried", "named"),
    [
        (["ghost"], ["%cpu_replay --engine cpu", "%cpu_replay --engine history"]),
        (["ghost", "history"], ["%cpu_replay --engine cpu"]),
        (["ghost", "cpu", "history"], []),
    ],
)
def test_only_engines_that_were_not_tried_are_named(tried: list[str], named: list[str]) -> None:
    case = doctor.Case(cell=CELL, earlier=(EARLIER,), namespace={}, crash=CRASH)
    steps = next_steps(case, None, conclusive=False, tried=tried)
    assert [step.split("    ")[0] for step in steps if "--engine" in step] == named
    tries = [model.Evidence(engine=engine, outcome="clean", seconds=1.0) for engine in tried]
    text = plain_text(assemble(case, tries))
    assert text.count("--engine") == len(named)
    assert "The replay on the CPU found nothing. What the replay checked" in text


def test_whose_error_ended_the_replay() -> None:
    case = doctor.Case(cell=CELL, earlier=(EARLIER,), namespace={})
    lost = model.RealError(type="NameError", message="name 'y' is not defined")
    typo = model.RealError(type="NameError", message="name 'z' is not defined")
    ended = model.Evidence(engine="ghost", outcome="other_error", seconds=1.0, error=typo)
    assert own_error(case, ended) is typo
    assert own_error(dataclasses.replace(case, crash=CRASH), ended) is None
    assert own_error(case, replace(ended, error=lost)) is None  # an earlier cell makes it
    assert own_error(case, replace(ended, error=lost, engine="history")) is lost
    assert own_error(case, replace(ended, decisions=("In [6], line 1",))) is None
    assert own_error(case, replace(ended, missing=("model",))) is None
    meta = model.RealError(type="NotImplementedError", message="no data in a meta tensor")
    assert own_error(case, replace(ended, error=meta)) is None


def test_a_difference_of_two_replays_is_said_once() -> None:
    replays = (replace(REPLAY, outcome="clean", differences=("dropout masks are made up",)),) * 3
    lost = replace(REPORT, confidence="not_found", finding=None, cause=None, replays=replays)
    assert plain_text(lost).count("dropout masks are made up") == 1


def test_a_scan_has_code_in_place_of_backticks() -> None:
    found = scan.Scan(
        "loader", model.Bound(low=0, high=4), (), 0, None, 0.0, notes=("`x` is no tensor",)
    )
    page = report.scan_bundle(found)["text/html"]
    assert "<code>x</code> is no tensor" in page and "`" not in page


def test_a_fault_without_a_crash_asks_for_no_restart() -> None:
    text = plain_text(replace(REPORT, crash=None, lost=(), kept=(), next_steps=()))
    assert text.startswith("Fault found on the CPU in 3.1 s.")
    assert "dead" not in text and "restart" not in text.lower() and "noticed" not in text


def test_stale_crash_names_the_execution_that_failed() -> None:
    first = model.FirstFailed(execution_count=3, source="for x in loader:\n    step(x)")
    crash = replace(CRASH, stale=True, execution_count=9, first_failed=first)
    stale = replace(REPORT, crash=crash)
    said = "In [9] is innocent: this kernel's GPU has been dead since In [3]."
    assert said in plain_text(stale)
    assert report.oneline(stale) == f"{said} Restart it; see %assertdoc report"
    lost = replace(stale, finding=None, confidence="not_found")
    assert "the cell that failed, In [3], as it was then: for x in loader: step(x)" in plain_text(
        lost
    )
    unknown = replace(stale, crash=replace(crash, first_failed=None))
    assert "dead since an earlier cell." in report.oneline(unknown)


def test_oneline_of_a_later_failure() -> None:
    assert report.oneline(REPORT, 9).startswith(
        "In [9] is innocent: this kernel's GPU has been dead since In [6]."
    )


def test_messenger_is_not_blamed_and_no_assert_is_claimed() -> None:
    message = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"
    crash = replace(
        CRASH, messenger="cuBLAS", message=message, error_code=None, assert_lines=(), rank=1
    )
    text = plain_text(replace(REPORT, crash=crash))
    assert text.startswith("CUDA error in In [6] (process of rank 1): found on the CPU")
    assert "cuBLAS is only the messenger" in text
    assert "Driver" not in text


def test_after_the_restart_nothing_is_dead_and_no_restart_is_asked_for() -> None:
    past = report.bundle(REPORT, "Kernel > Restart", past=True)
    for shown in (past["text/plain"], Page(past["text/html"]).said):
        said = " ".join(shown.split())
        assert "happened before the restart: this kernel and its GPU state are fresh." in said
        assert (
            "state is dead" not in said
            and "%assertdoc restart" not in said
            and "restart it" not in said
        )
        assert "Position 512 does not exist" in said and "%assertdoc verify" in said
        assert "The restart has lost" in said and "save what you need before it" not in said


def test_sentences_begin_with_a_capital_and_names_stay_as_they_are() -> None:
    because = ("the values run from 1 to 7", "dataset[3] has 9 tokens", "n_classes is 7")
    cause = model.Cause(key="k", title="t", explanation="`y` is wrong", because=because)
    text = plain_text(replace(REPORT, cause=cause))
    assert "WHY t. `y` is wrong. The values run from 1 to 7. dataset[3] has 9 tokens. n_cl" in text


def test_a_saved_notebook_has_no_line_that_noticed_it() -> None:
    crash = replace(CRASH, surface=model.Place(line=0, source=""))
    assert "noticed" not in plain_text(replace(REPORT, crash=crash))
    lost = replace(REPORT, crash=crash, finding=None, confidence="not_found")
    assert "WHERE The faulty line is not known. WHY" in plain_text(lost)
    assert "line 0" not in Page(report.html(lost)).said


def test_a_simulated_gpu_is_called_one() -> None:
    simulated = replace(ENVIRONMENT, devices=("Simulated GPU",) * 2)
    value = replace(REPORT, environment=simulated)
    assert "The GPU is simulated; the data is out of range." in plain_text(value)
    assert "2 x Simulated GPU" in Page(report.html(value)).said


def test_swallowed_crash() -> None:
    text = plain_text(replace(REPORT, crash=replace(CRASH, exception="")))
    assert "The error itself was caught (try/except); the GPU is dead all the same." in text


def test_data_is_not_blamed_for_a_bug_of_torch() -> None:
    cause = model.Cause(key="torch_version_bug", title="A bug of torch 2.0", explanation="")
    text = plain_text(replace(REPORT, cause=cause))
    assert "the data is out of range" not in text and "restart it" in text


def test_a_line_of_another_kernel_family_is_not_called_agreement() -> None:
    unknown = replace(CRASH, assert_lines=(replace(DRIVER, catalogue_id=None),))
    assert "Driver printed: Indexing.cu" in plain_text(replace(REPORT, crash=unknown))


def test_other_findings_closed_bounds_nan_and_ignore_index() -> None:
    probability = replace(
        FINDING,
        op="binary_cross_entropy",
        bad_values=(-0.25, 1.5, "nan"),
        distinct_bad=3,
        bad_count=9,
        bound=model.Bound(low=0.0, high=1.0, high_inclusive=True),
        positions=((3, 0),),
    )
    label = replace(
        FINDING,
        op="cross_entropy",
        argument="target",
        bad_values=(-1, 10, 11, 12),
        distinct_bad=4,
        bad_count=5,
        total=64,
        bound=model.Bound(low=0, high=10, ignore=-100),
    )
    text = plain_text(replace(REPORT, finding=probability, other_findings=(label,)))
    assert "valid 0 <= value <= 1 found -0.25, 1.5, nan 9 of 640 bad, first at [3, 0]" in text
    assert "found -1, 10..12, valid 0 <= index < 10, or -100 (ignored), 5 of 64 bad" in text
    distribution = replace(probability, op="multinomial", bound=None)
    assert "valid finite, >= 0" in plain_text(replace(REPORT, finding=distribution))


@pytest.mark.parametrize(
    ("shown", "distinct", "text"),
    [
        (tuple(range(512, 582)), 70, "512..581"),
        ((-1, 512, 513, 600), 4, "-1, 512..513, 600"),
        (tuple(range(256)), 1000, "0..255 and 744 more"),
        ((1, 3, 5, 7, 9, 11, 13, 15), 8, "1, 3, 5, 7, 9, 11 and 2 more"),
        ((1.5, "nan", "inf"), 3, "1.5, nan, inf"),
        ((2**63, 10**30), 2, "9223372036854775808, about 10^30"),
        ((), 0, "nothing"),
    ],
)
def test_values_are_folded(shown: tuple[model.Number, ...], distinct: int, text: str) -> None:
    assert figures.values(shown, distinct) == text


def test_a_long_line_is_shown_around_the_sub_expression() -> None:
    source = "    out = " + " + ".join(f"part_{n}(value)" for n in range(40)) + " + table[ids]"
    finding = replace(FINDING, location=replace(CALL, source=source, expression="table[ids]"))
    rows = report.text(replace(REPORT, finding=finding)).split("\n")
    at = next(i for i, row in enumerate(rows) if set(row.strip()) == {"^"})
    start = rows[at].index("^")
    assert rows[at - 1][start : len(rows[at])] == "table[ids]"


def test_carets_stand_under_wide_characters_and_multi_line_expressions() -> None:
    source = 'x = f("\u6f22\u5b57") + g(\n    ids)'
    finding = replace(FINDING, location=replace(CALL, source=source, expression="g(\n    ids)"))
    rows = report.text(replace(REPORT, finding=finding)).split("\n")
    first = next(i for i, row in enumerate(rows) if "-> 14" in row)
    assert rows[first + 1].index("^") == layout.width(rows[first][: rows[first].index("g(")])
    assert rows[first + 2].strip() == "15      ids)"
    assert rows[first + 3].strip() == "^^^^"


def test_control_characters_reach_no_terminal() -> None:
    place = replace(CALL, file="\x1b[2J\u202efile.py", execution_count=None, function="f\r()")
    finding = replace(FINDING, location=place, op="\x07bell", module="a\x9bb")
    text = report.text(replace(REPORT, finding=finding, next_steps=("\x1b]0;x\x07 step",)))
    assert r"\x1b[2J\u202efile.py" in text
    assert r"\x07bell" in text and r"a\x9bb" in text and r"1 \x1b]0;x\x07 step" in text
    assert not set("\x1b\x07\x9b\r\u202e") & set(text)


# ---- every valid report


def strategy(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Reports of all shapes, from the types themselves."""
    if isinstance(kind, mi.StructType):
        fields = {f.encode_name: strategy(f.type) for f in kind.fields}
        return st.fixed_dictionaries(fields).map(lambda values: kind.cls(**values))
    if isinstance(kind, mi.UnionType):
        return st.one_of([strategy(part) for part in kind.types])
    if isinstance(kind, mi.VarTupleType):
        return st.lists(strategy(kind.item_type), max_size=2).map(tuple)
    if isinstance(kind, mi.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, mi.NoneType):
        return st.none()
    if isinstance(kind, mi.BoolType):
        return st.booleans()
    if isinstance(kind, mi.FloatType):
        return st.floats()
    if isinstance(kind, mi.IntType):
        return st.one_of(st.integers(), st.sampled_from((0, -1, 2**64, -(10**400), 10**400)))
    assert isinstance(kind, mi.StrType), kind
    return st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=12))


REPORTS = strategy(mi.type_info(model.Report))
ALWAYS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # to shrink a whole report takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Page(HTMLParser):
    """Collects what a page is made of; fails on tags that are not closed in order."""

    VOID = frozenset({"br", "img", "hr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.styles: set[str] = set()
        self.marked = ""
        self.said = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        for name, value in attrs:
            if name == "style":
                self.styles |= {part.split(":")[0].strip() for part in (value or "").split(";")}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data
        if "mark" in self.open:
            self.marked += data


# What JupyterLab's sanitizer keeps of an untrusted notebook's output, as far as it is used here.
TAGS = set(
    re.findall(
        r"\w+", "div span b code mark h3 h4 table thead tbody tr th td details summary ul ol li"
    )
)
ATTRIBUTES = {"style", "title", "scope", "class", "role", "aria-label"}
STYLES = set(
    re.findall(
        r"[\w-]+",
        "background-color border border-collapse border-left border-radius box-sizing color "
        "cursor display font-family font-size font-weight height letter-spacing line-height "
        "margin max-width overflow overflow-wrap overflow-x padding padding-left table-layout "
        "text-align text-overflow vertical-align white-space width",
    )
)


def check_page(page: str) -> Page:
    made = Page(page)
    assert made.tags <= TAGS and made.attributes <= ATTRIBUTES
    assert made.styles <= STYLES
    check_characters(page)
    return made


def check_characters(shown: str) -> None:
    shown.encode("utf-8")
    bad = {c for c in shown if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}
    assert bad <= {"\n", "\u200c", "\u200d"}


@ALWAYS
@given(REPORTS, st.sampled_from((None, *NASTY)), st.booleans())
def test_every_report_can_be_shown(value: model.Report, how: str | None, brief: bool) -> None:
    made = report.bundle(value, how, brief=brief)
    assert set(made) == {model.MIME, "text/html", "text/plain"}
    check_characters(made["text/plain"])
    rows = made["text/plain"].split("\n")
    assert max(layout.width(row) for row in rows) <= 100
    check_page(made["text/html"])
    encoded = json.dumps(made, allow_nan=False).encode("utf-8")
    assert len(encoded) < 2 << 20
    assert made[model.MIME]["confidence"] == value.confidence


@ALWAYS
@given(
    st.builds(
        report.Card,
        st.one_of(st.none(), st.integers()),
        st.sampled_from(NASTY),
        st.one_of(st.none(), st.sampled_from(NASTY)),
        st.integers(0, 999),
        st.sampled_from(NASTY),
        st.booleans(),
    )
)
def test_every_card_can_be_shown(card: report.Card) -> None:
    made = report.card_bundle(card)
    assert set(made) == {"text/html", "text/plain"}
    check_characters(made["text/plain"])
    assert max(layout.width(row) for row in made["text/plain"].split("\n")) <= 100
    check_page(made["text/html"])


# ---- HTML


def test_html_marks_the_expression_and_says_all_that_the_text_says() -> None:
    page = check_page(report.html(REPORT, "Kernel > Restart"))
    assert page.marked == "self.pos(pos)"
    said = " ".join(page.said.split())
    for wanted in (
        "CERTAIN",
        "restart it (Kernel > Restart)",
        "In [4], line 14, Encoder.forward (In [6] line 9, .to(device), only noticed it)",
        "embedding, argument input, in encoder.pos (Embedding), num_embeddings=512",
        "0 <= index < 512",
        "512..639",
        "128 of 640 bad, first at [512]; the worst is 128 from the nearest valid value",
        "row 3 = dataset[643]",
        "The text is longer than the model's 512 positions.",
        "- ids = [tok(t) for t in texts] + ids = [tok(t)[:512] for t in texts]",
        "assert ids.size(1) <= 512",
        "%assertdoc verify \u2013 the fixed cell",
        "14 x = self.tok(ids)",
        "A restart loses model (weights).",
        "Driver agrees: Indexing.cu srcIndex < srcSelectDimSize, 128 lines.",
        "tok: Tokenizer, 500 kB",
    ):
        assert wanted in said


def test_html_shows_rows_of_the_data_set_beside_positions() -> None:
    examples = (
        model.Example(
            value=600, position=(3, 0), batch_row=3, dataset_index=643, meaning="tok: '#'"
        ),
        model.Example(value=601, position=(7, 5), batch_row=7, dataset_index=12, file="a.txt"),
    )
    value = replace(REPORT, finding=replace(FINDING, examples=examples, bad_count=2))
    said = " ".join(check_page(report.html(value)).said.split())
    assert "valuestands forpositionbatch rowdataset indexfile" in said
    assert "600tok: '#'[3, 0]3643 601[7, 5]712a.txt" in said
    assert plain_text(value).count("600 is tok: '#'") == 1 and "601 is" not in plain_text(value)


def test_picture_has_words_and_marks_only_bad_sides() -> None:
    page = report.html(REPORT)
    label = re.search(r'role="img" aria-label="([^"]*)"', page)
    assert label is not None
    assert label.group(1) == "valid 0 &lt;= index &lt; 512; found 512..639"
    both = replace(FINDING, bad_values=(-1, 600), distinct_bad=2)
    shares = re.findall(r"width:(\d+)%;border:", report.html(replace(REPORT, finding=both)))
    assert shares == ["30", "40", "30"]
    nan = replace(FINDING, bad_values=("nan",), distinct_bad=1)
    assert 'role="img"' not in report.html(replace(REPORT, finding=nan))


def test_html_escapes_names_values_and_paths() -> None:
    evil = '`<script>alert(1)</script>`" onclick="x'
    place = replace(CALL, source=f"x = {evil}", expression=evil, file=evil, execution_count=None)
    finding = replace(FINDING, location=place, module=evil, op=evil, bad_values=(evil,))
    edit = model.Edit(cell_id=evil, old=evil, new=evil + "2")
    fix = model.Fix(title=evil, explanation=evil, code=evil, edit=edit)
    value = replace(REPORT, headline=evil, finding=finding, fixes=(fix,), next_steps=(evil,))
    page = report.html(value, evil)
    assert "<script" not in page and 'onclick="' not in page
    assert check_page(page).said.count("<script>alert(1)</script>") >= 8


def test_brief_bundle_is_one_line_with_the_whole_json() -> None:
    first = model.FirstFailed(execution_count=3, source="step(x)")
    crash = replace(CRASH, stale=True, execution_count=9, first_failed=first)
    made = report.bundle(replace(REPORT, crash=crash), brief=True)
    assert made["text/plain"].count("\n") == 0
    assert "dead since In [3]" in made["text/html"]
    assert made[model.MIME]["crash"]["first_failed"]["execution_count"] == 3
    assert made[model.MIME]["finding"]["op"] == "embedding"


# ---- JSON


def test_json_is_the_report() -> None:
    made = report.bundle(REPORT)[model.MIME]
    assert model.from_json(json.dumps(made), model.Report) == REPORT


def test_huge_reports_are_bounded_and_stay_valid() -> None:
    long = "x" * 3_000_000
    finding = replace(
        FINDING,
        bad_values=(float("nan"), float("inf"), 10**5000) * 10_000,
        positions=((1, 2),) * 50_000,
        location=replace(CALL, source=long),
        user_frames=(replace(CALL, source=long),) * 1000,
    )
    edit = model.Edit(cell_id="c", old=long, new="y")
    fix = model.Fix(title="t", explanation=long, edit=edit)
    value = replace(REPORT, finding=finding, fixes=(fix,) * 300, headline="\ud800" + long)
    made = report.bundle(value)
    assert sum(len(json.dumps(part)) for part in made.values()) < 3 << 20
    back = msgspec.convert(made[model.MIME], model.Report)
    assert back.finding is not None
    assert back.finding.bad_values[:3] == ("nan", "inf", 2**64 - 1)
    assert back.fixes[0].edit is None  # a cut edit must not be applied
    assert back.headline.startswith("\ufffdx") and back.headline.endswith("more)")


def test_schema_file_is_generated_from_the_types() -> None:
    written = FILE.read_text(encoding="utf-8")
    assert written == schema(), "run: python -m nb_assertdoc.report.schema"
    definitions = json.loads(written)["$defs"]
    assert set(definitions["Report"]["properties"]) == {
        *("schema", "confidence", "headline", "crash", "finding", "other_findings", "cause"),
        *("fixes", "real_error", "replays", "lost", "kept", "next_steps", "environment"),
    }


# ---- the card


def test_card_says_what_a_person_must_know_first() -> None:
    card = report.Card(6, "Kernel > Restart", None, 128, "replaying step 40, 118 calls", True)
    lines = [
        "CUDA device-side assert in In [6]: an index or value is out of its valid range.",
        "  Your GPU is fine. This kernel's GPU state is dead: the kernel must be restarted "
        + "(Kernel >",
        "  Restart). Re-running a cell cannot help.",
        "  Finding the line now: replaying step 40, 118 calls ...",
        "  Interrupt (\u25a0) stops this replay. Queued cells will not run.",
    ]
    assert report.card_text(card).split("\n") == lines
    page = check_page(report.card_html(card))
    assert "Queued cells will not run." in page.said


def test_card_calls_a_simulated_gpu_one() -> None:
    text = report.card_text(report.Card(6, "", lines=3, simulated=True))
    assert "The GPU is simulated. This kernel's GPU state is dead" in text and "fine" not in text


def test_card_without_replay_and_with_only_a_messenger() -> None:
    card = report.Card(None, "", "cuBLAS", will_replay=False)
    text = " ".join(report.card_text(card).split())
    assert "device-side assert" not in text
    assert "cuBLAS failed in this cell; most likely the GPU was dead already" in text
    assert "%cpu_replay finds the line" in text and "Finding" not in text
    sure = " ".join(report.card_text(report.Card(6, "", "cuBLAS", lines=3)).split())
    assert "cuBLAS is only the messenger." in sure and "device-side assert in In [6]" in sure


# ---- the controls


def test_controls_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert report.controls({"scan": report.Action(lambda: "")}) is None


def test_each_step_is_known_again_as_what_it_was_written_as() -> None:
    stored = steps.foretold(["model"], ["texts", "tok"])
    written = {
        steps.verify(fixed=True): "verify",
        steps.VERIFY_ANOTHER: "verify",
        steps.SCAN: "scan",
        steps.CHECK_AGAIN: "replay",
        steps.replay("cpu"): "replay",
        steps.replay("history", "%%cpu_replay"): "replay",
        steps.replay_of(3): "replay",
        steps.restart("Kernel > Restart", by_magic=True): "restart",
        steps.restart("Kernel > Restart", by_magic=True, words=stored): "restart",
        steps.restart("Kernel > Restart (0 0)", by_magic=False): "restart",
        steps.RESTORE: "restore",
        steps.forget("1 MB", "/tmp/x", 7): "forget",
        steps.SAVE: "save",
        steps.BLOCKING: "blocking",
        steps.RUN_AGAIN: "",
        "run the notebook from its top: a new kernel has a working GPU": "",
    }
    assert {step: steps.read(step).kind for step in written} == written
    assert set(written.values()) == set(get_args(steps.Kind))
    assert all(
        steps.read(step).command for step, kind in written.items() if kind not in ("", "blocking")
    )
    assert [steps.read(steps.replay(engine)).engine for engine in steps.FURTHER_ENGINES] == [
        "cpu",
        "history",
    ]


@pytest.mark.parametrize("by_magic", [True, False])
@pytest.mark.parametrize("lost", [[], ["model"]])
@pytest.mark.parametrize("kept", [[], ["texts", "tok"]])
def test_what_a_restart_loses_and_keeps_is_known_again(
    by_magic: bool, lost: list[str], kept: list[str]
) -> None:
    step = steps.restart("Kernel > Restart", by_magic, steps.foretold(lost, kept))
    assert steps.read(step).given_back == ", ".join(kept)
    assert steps.read(step).foretells is bool(lost or kept)
    assert steps.once_restarted(step) == (
        "%assertdoc restore    gives back texts, tok" if kept else ""
    )
    plain = steps.read(steps.restart("Kernel > Restart", by_magic))
    assert not plain.foretells and not plain.given_back


def test_what_is_asked_before_the_restart() -> None:
    step = "%assertdoc restart    lost: model. After it %assertdoc restore gives back texts, tok"
    forewarn = 'the page will say "appears to have died"'
    asked = report.before_restart(replace(REPORT, next_steps=(step,)), forewarn)
    assert asked.split("\n") == [
        "Lost: model. After it %assertdoc restore gives back texts, tok.",
        'The page will say "appears to have died".',
    ]
    assert report.before_restart(None, "") == "All variables of this kernel are lost."


CELL = """
from nb_assertdoc import model, report
value = model.from_json(DATA, model.Report)
calls = []
def broken(): raise ValueError("no <b>batch</b>")
def interrupted(): raise KeyboardInterrupt
def verify(source):
    print("stray output"); display("stray display")
    calls.append(source)
    return "passes <here>"
box = report.controls({
    "verify": report.Action(verify, source="loss(y)\\n"),
    "broken": report.Action(broken),
    "interrupted": report.Action(interrupted),
    "scan": report.Action(lambda: report.Html("<b>3 rows</b>")),
    "restart": report.Action(lambda: calls.append("restart") or "restarting", asks="lost: <model>"),
})
display(report.bundle(value), raw=True)
display(report.controls_bundle(box), raw=True)
"""
CLICKS = """
_, hint, editor, row, answer = box.children
def click(label):
    button = next(b for b in row.children if b.description == label)
    button.click()
    return answer.value
editor.value = "loss(y - 1)"
said = [click(b) for b in ("Verify on the CPU", "%assertdoc broken", "%assertdoc interrupted",
                           "Scan the data", "Restart the kernel")]
asked = [b.description for b in row.children], list(calls)
click("Cancel"); cancelled = len(row.children), answer.value, list(calls)
click("Restart the kernel"); click("Yes, restart now")
ended = calls, [b.disabled for b in row.children], answer.value
_, row, answer = report.controls({"restart": report.Action(broken, asks="sure?")}).children
click("Restart the kernel"); click("Yes, restart now")
failed = [(b.description, b.disabled) for b in row.children], answer.value
"""
SAID = "import json; print(json.dumps([said, asked, cancelled, ended, failed, editor.description]))"


def test_report_and_controls_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    root = str(Path(report.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    data = f"DATA = {model.to_json(REPORT).decode()!r}"
    cells = [nbformat.v4.new_code_cell(source) for source in (data + CELL, CLICKS, SAID)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown, controls = cells[0].outputs
    assert shown.data["text/plain"] == report.text(REPORT)
    assert model.from_json(json.dumps(shown.data[model.MIME]), model.Report) == REPORT
    assert controls.data["text/plain"] == "run `%assertdoc report`"
    assert "application/vnd.jupyter.widget-view+json" in controls.data
    assert model.MIME not in controls.data
    assert cells[1].outputs == []  # what an action prints or displays lands in no cell
    said, asked, cancelled, ended, failed, name = json.loads(cells[2].outputs[0].text)
    verified, broken, interrupted, scanned, question = said
    assert "passes &lt;here&gt;" in verified
    assert "broken: no &lt;b&gt;batch&lt;/b&gt;" in broken
    assert "interrupted: interrupted" in interrupted
    assert scanned == "<b>3 rows</b>"
    assert "lost: &lt;model&gt;" in question
    assert asked == [["Yes, restart now", "Cancel"], ["loss(y - 1)"]]
    assert cancelled[0] == 5 and "lost" not in cancelled[1] and cancelled[2] == ["loss(y - 1)"]
    # The kernel is about to end: no button looks alive.
    assert ended[:2] == [["loss(y - 1)", "restart"], [True] * 5] and "restarting" in ended[2]
    assert failed[0] == [["Restart the kernel", False]] and "restart: no &lt;b&gt;" in failed[1]
    assert name == "Cell"  # what a screen reader calls the text area


LONG = {  # codes, and how they are laid out in 40 columns
    "assert bool((x >= 0).all()), 'more than one row of text'": [
        "assert bool((x >= 0).all()), \\",
        "    'more than one row of text'",
    ],
    "rows = [row[: 512] for row in rows if len(row) > 1]": [
        "rows = [row[: 512] for row in rows if",
        "    len(row) > 1]",
    ],
    "    assert tokenizer.vocabulary.size(first_of_all) == 5": [
        "    assert tokenizer.vocabulary.size(",
        "        first_of_all) == 5",
    ],
    "short = 1": ["short = 1"],
}


def test_code_is_broken_between_tokens_and_stays_the_same() -> None:
    for code, rows in LONG.items():
        assert wrap_code(code, 40) == rows
        assert max(map(len, rows)) <= 40
        assert ast.dump(ast.parse("\n".join(rows).strip())) == ast.dump(ast.parse(code.strip()))
    assert wrap_code("+  x = 'one' + 'two'", 16, indent=7, backslash=False) == [
        "+  x = 'one' +",
        "       'two'",
    ]
    token = "'" + 60 * "w" + "'"
    assert "".join(wrap_code(token, 40)).replace(" ", "") == token


def test_further_findings_are_counted() -> None:
    for count, said in ((6, "and 1 more finding\n"), (7, "and 2 more findings\n")):
        assert said in report.text(replace(REPORT, other_findings=(FINDING,) * count))
