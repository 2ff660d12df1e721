"""The frozen types that pass between stages, and their JSON form.

`Report` is the published contract (`application/vnd.nb-assertdoc.report.v1+json`); `Evidence` and
`Order` are the two files that the host and the worker exchange. Everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import msgspec

MIME = "application/vnd.nb-assertdoc.report.v1+json"
SCHEMA = "nb-assertdoc.report.v1"
REBUILT = "earlier cells were run again to rebuild what the cell needs"  # lowers the confidence
SHOWN_VALUES = 256  # most distinct values and positions that a finding carries

Confidence = Literal["certain", "likely", "not_found", "clean"]
Engine = Literal["ghost", "cpu", "history"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
Outcome = Literal["fault", "clean", "other_error", "stopped", "unavailable"]
Number = int | float | str  # a str is one of "nan", "inf", "-inf": JSON has no such numbers


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: frozen, keyword-only."""


R = TypeVar("R", bound=Record)


class Place(Record, frozen=True, kw_only=True):
    """A line of code. `line` is 1-based in its cell or file; `cell` is 0-based in the .ipynb."""

    line: int
    source: str
    cell: int | None = None
    execution_count: int | None = None
    cell_id: str | None = None
    file: str | None = None
    expression: str | None = None
    function: str | None = None  # with arguments and loop variables, e.g. "train_one(lr=0.3)"


class AssertLine(Record, frozen=True, kw_only=True):
    """One distinct line that the GPU driver printed, with how often it came."""

    text: str
    catalogue_id: str | None
    kernel_file: str
    line: int
    count: int


class FirstFailed(Record, frozen=True, kw_only=True):
    """The execution whose kernel really failed, with its source as it was then."""

    execution_count: int | None
    source: str


class Crash(Record, frozen=True, kw_only=True):
    """What the host saw."""

    exception: str
    message: str
    surface: Place
    execution_count: int | None
    error_code: int | None = None
    messenger: str | None = None  # "cuBLAS", "cuDNN", ... when another library brought the news
    assert_lines: tuple[AssertLine, ...] = ()
    stale: bool = False
    first_failed: FirstFailed | None = None
    rank: int | None = None


class Bound(Record, frozen=True, kw_only=True):
    """Valid range: half-open for an index, closed (`high_inclusive`) for values as BCE's input."""

    low: int | float
    high: int | float
    high_inclusive: bool = False
    ignore: int | None = None


class Round(Record, frozen=True, kw_only=True):
    """A loop, by the source of its header, and its 0-based iteration."""

    loop: str
    iteration: int


class Span(Record, frozen=True, kw_only=True):
    """Batches that follow each other."""

    first: int
    last: int


def batches(spans: Sequence[Span]) -> str:
    """ "batches 0..4 and 7"."""
    parts = [f"{s.first}" if s.first == s.last else f"{s.first}..{s.last}" for s in spans]
    one = len(spans) == 1 and spans[0].first == spans[0].last
    return f"{'batch' if one else 'batches'} {' and '.join(parts)}"


class Step(Record, frozen=True, kw_only=True):
    """Where in a loop the faulty call was. `iteration` is 0-based within the innermost loop."""

    loop: str
    iteration: int
    batch_rows: tuple[int, ...] = ()
    dataset_indices: tuple[int, ...] | None = None
    split: str | None = None
    # The loops around that one, outermost first: from the loop over the loader on, if there is one.
    around: tuple[Round, ...] = ()
    left_out: tuple[Span, ...] = ()  # batches before this one that the replay did not run again

    @property
    def of_data(self) -> Round:
        """The loop over the data, else the outermost one."""
        return self.around[0] if self.around else Round(loop=self.loop, iteration=self.iteration)


class Example(Record, frozen=True, kw_only=True):
    """One bad value. `meaning` and `file`: in the user's own tables, "word2id['zebra']"."""

    value: Number
    position: tuple[int, ...]
    batch_row: int | None = None
    dataset_index: int | None = None
    meaning: str | None = None
    file: str | None = None


class Finding(Record, frozen=True, kw_only=True):
    """One faulty call, with the values that were read in it."""

    op: str
    aten_op: str
    argument: str
    bad_values: tuple[Number, ...]
    distinct_bad: int
    bad_count: int
    total: int
    positions: tuple[tuple[int, ...], ...]
    bound: Bound | None
    margin: float | None
    location: Place
    user_frames: tuple[Place, ...] = ()  # outermost first
    module: str | None = None
    module_type: str | None = None
    table: str | None = None
    step: Step | None = None
    examples: tuple[Example, ...] = ()  # the first bad values one by one, in order of position


class Cause(Record, frozen=True, kw_only=True):
    """Why the value was out of range."""

    key: str
    title: str
    explanation: str
    because: tuple[str, ...] = ()


class Edit(Record, frozen=True, kw_only=True):
    """A change of the user's own code: replace `old` by `new` in the cell."""

    cell_id: str | None
    old: str
    new: str


class Fix(Record, frozen=True, kw_only=True):
    """What to do about a cause."""

    title: str
    explanation: str
    code: str | None = None
    edit: Edit | None = None


class RealError(Record, frozen=True, kw_only=True):
    """The CPU's own error for the same call."""

    type: str
    message: str
    traceback: tuple[str, ...] = ()


class Tightest(Record, frozen=True, kw_only=True):
    """The call that came nearest to its bound without leaving it (`margin` 0: the last value)."""

    op: str
    argument: str
    module: str | None
    value: Number
    bound: Bound
    margin: float


class Checks(Record, frozen=True, kw_only=True):
    """How much a replay has checked."""

    calls: int = 0
    operators: int = 0
    tightest: tuple[Tightest, ...] = ()


class Replay(Record, frozen=True, kw_only=True):
    """One try of one engine."""

    engine: str
    outcome: Outcome
    seconds: float
    peak_rss_bytes: int | None = None
    steps: int | None = None
    checks: Checks = Checks()
    differences: tuple[str, ...] = ()


class Lost(Record, frozen=True, kw_only=True):
    """A variable that could not be salvaged."""

    name: str
    what: str
    why: str


class Kept(Record, frozen=True, kw_only=True):
    """A variable that was salvaged."""

    name: str
    type: str
    bytes: int


class Environment(Record, frozen=True, kw_only=True):
    """Versions and platform of the host."""

    python: str
    ipython: str
    platform: str
    torch: str | None = None
    devices: tuple[str, ...] = ()


class Report(Record, frozen=True, kw_only=True):
    """The contract of section 7 of docs/architecture.md."""

    confidence: Confidence
    headline: str
    environment: Environment
    crash: Crash | None = None
    finding: Finding | None = None
    other_findings: tuple[Finding, ...] = ()
    cause: Cause | None = None
    fixes: tuple[Fix, ...] = ()
    real_error: RealError | None = None
    replays: tuple[Replay, ...] = ()
    lost: tuple[Lost, ...] = ()
    kept: tuple[Kept, ...] = ()
    next_steps: tuple[str, ...] = ()
    schema: str = SCHEMA


# ---- what a worker writes down: evidence.json


class Values(Record, frozen=True, kw_only=True):
    """Summary of a set of integers or floats: of one tensor, or of one column of a data set."""

    count: int
    minimum: Number | None = None
    maximum: Number | None = None
    distinct: tuple[Number, ...] = ()  # sorted, at most SHOWN_VALUES
    distinct_count: int = 0
    complete: bool = True  # False: a budget ended the scan early
    bad_count: int = 0  # how many of them are outside the finding's bound


class Tokenizer(Record, frozen=True, kw_only=True):
    """A tokenizer found among the notebook's variables."""

    name: str  # the variable
    size: int  # len(tokenizer): with added tokens
    vocab_size: int | None = None  # without
    model_max_length: int | None = None
    tokens: dict[str, str] = {}  # bad id -> token text


class Variable(Record, frozen=True, kw_only=True):
    """A variable of the notebook that a rule may name: an int, a sized container, a column."""

    name: str
    value: str


class Observed(Record, frozen=True, kw_only=True):
    """A finding with all that the replay could see around it; the material of the cause rules."""

    finding: Finding
    dtype: str  # of the index tensor, "int64"
    shape: tuple[int, ...]  # of the index tensor
    values: Values  # all values of the index tensor of the failing call
    input_shape: tuple[int, ...] = ()  # of the tensor that is indexed, or of the loss's input
    # The same field over the data set as far as it was scanned, and the data set's own name;
    # without a name: the values of all calls so far.
    data: Values | None = None
    data_name: str | None = None
    late: bool = False  # an earlier call of the operator could not be checked: its index is lost
    index_expression: str | None = None  # the index argument in the user's call, "labels"
    table_expression: str | None = None  # the table, or the loss's input, "logits"
    config: dict[
        str, int | str | None
    ] = {}  # num_labels, vocab_size, ... of a model's config object
    tokenizers: tuple[Tokenizer, ...] = ()
    variables: tuple[Variable, ...] = ()
    sources: tuple[str, ...] = ()  # the cells run so far
    first_nan: str | None = None  # the first parameter or module output that held NaN
    unknown: tuple[
        str, ...
    ] = ()  # what the finding depends on that was made up; () allows "certain"
    real_error: RealError | None = None


class Measured(Record, frozen=True, kw_only=True):
    """All values that one argument of one operator had. Minimum and maximum: without `ignore`."""

    op: str
    argument: str
    module: str | None
    table: str | None
    bound: Bound | None
    calls: int
    count: int
    ignored: int
    bad: int
    minimum: float | None
    maximum: float | None


class Evidence(Record, frozen=True, kw_only=True):
    """What one replay wrote down."""

    engine: str
    outcome: Outcome
    seconds: float  # in all, from the worker's first line
    cell_seconds: float = 0.0  # of them, since the cell began
    observed: tuple[Observed, ...] = ()
    checks: Checks = Checks()
    differences: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()  # places where a made-up value decided a branch of user code
    ghost_operators: tuple[str, ...] = ()  # not checked: their argument was a ghost
    missing: tuple[str, ...] = ()  # lost values that the cell touched: they need `history`
    shortened: bool = False  # batches of the cell's loops were left out
    floats_lost: bool = False  # weights, or other floats that were only on the GPU
    # Of the loader plan's loop: "recorded" batches up to those that must run, "left" before them,
    # "anew" (its data set has another length), "" (not met).
    loop: str = ""
    error: RealError | None = None  # what ended the replay, if it was not the fault
    warnings: tuple[str, ...] = ()  # the user's own warnings (tokenizers warn of long texts)
    peak_rss_bytes: int | None = None
    steps: int | None = None
    measured: tuple[Measured, ...] = ()  # where the order asks for it


# ---- what the host asks of a worker: order.json


class Source(Record, frozen=True, kw_only=True):
    """The source of one execution, under the file name that its code objects carry."""

    filename: str
    source: str
    execution_count: int | None = None
    cell_id: str | None = None
    cell: int | None = None  # 0-based in the .ipynb, where known
    above: int = 0  # lines of the cell above this text: `%%time` and its like compile their body


class LoaderPlan(Record, frozen=True, kw_only=True):
    """A loop over a DataLoader. Its index lists, of whatever type, lie in `loader.pickle`."""

    key: str  # of the call site of `__iter__`
    first: int  # ordinal of the first recorded list within its epoch
    count: int
    workers: int
    base_seed: int | None
    finished: bool  # the host's loop had used up the loader
    part: Literal["leads", "follows", "around", "before"] = "leads"  # see `recorder.parts`
    late: int = 0  # steps that one that follows is behind
    round: int = 1  # how often the cell had begun this loop
    alone: bool = True  # no other loop over a loader ran in the meantime
    edited: bool = False  # the code was changed since: the data set may have another length
    must_run: int = 0  # the last batches that may not be skipped


class Order(Record, frozen=True, kw_only=True):
    """One replay."""

    engine: Engine
    real_floats: bool
    cell: Source
    sources: tuple[Source, ...] = ()  # every cell run so far, for the text of a line
    history: tuple[Source, ...] = ()  # executions to run first, in this order
    rebound: tuple[str, ...] = ()  # names whose value `capsule/` has, not `variables/`
    cwd: str = "."
    sys_path: tuple[str, ...] = ()
    device_count: int = 1
    device_name: str = "NVIDIA GPU"
    capability: tuple[int, int] = (8, 0)
    device_memory: int = 16 << 30
    default_dtype: str = "float32"
    default_device: str | None = None  # of `torch.set_default_device`
    loader: LoaderPlan | None = None  # the loop that failed, or leads it
    other_loaders: tuple[LoaderPlan, ...] = ()
    whole: bool = False  # run every batch from the start, as far as the time allows
    max_steps: int | None = None
    batches: int | None = None  # measure ranges in so many batches of each loop, fault or not
    seconds: float = 15.0


def to_json(record: Record | tuple[Record, ...]) -> bytes:
    """The JSON form of any record of this module, or of several."""
    return msgspec.json.encode(record)


def from_json(data: bytes | str, type_: type[R]) -> R:
    """Read a record back. Raises `msgspec.ValidationError` when `data` is not a `type_`."""
    return msgspec.json.decode(data, type=type_)
