"""The catalogue of asserts: reading the driver's lines, folding them, and plain words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nb_assertdoc.catalogue import (
    Entry,
    driver_line,
    entries,
    entry,
    explain,
    fold,
    operators_of,
    parse,
    topics,
)
from nb_assertdoc.errors import UsageError

TARGET = "t >= 0 && t < n_classes"
SELECT = "srcIndex < srcSelectDimSize"
BACKTICKS = "probability tensor contains either `inf`, `nan` or element < 0"


def line(
    file: str = "Loss.cu", text: str = TARGET, function: str = "kernel: ", thread: int = 3
) -> str:
    return (
        f"/pytorch/aten/src/ATen/native/cuda/{file}:244: {function}block: [0,0,0],"
        f" thread: [{thread},0,0] Assertion `{text}` failed."
    )


def ids(text: str) -> list[list[str]]:
    return [[known.id for known in one.candidates] for one in parse(text)]


def all_operators(text: str) -> frozenset[str] | None:
    return operators_of(fold(parse(text)))


@pytest.mark.parametrize("known", entries(), ids=lambda known: known.id)
def test_every_entry_is_recognised_by_its_own_line(known: Entry) -> None:
    (parsed,) = parse(driver_line(known.id, thread=5))
    assert known in parsed.candidates
    assert parsed.function == known.functions[0]
    if known.file != "*.py":
        assert parsed.file == known.file
        assert parsed.line in (known.lines or (1,))
    if "{" not in known.assertion:
        assert parsed.assertion == known.assertion
        (folded,) = fold([parsed])
        assert folded.catalogue_id == known.id


@pytest.mark.parametrize("known", entries(), ids=lambda known: known.id)
def test_every_entry_says_what_must_hold(known: Entry) -> None:
    assert known.rule
    assert known.causes
    assert known.explanation.endswith(".")
    if known.user_reachable and known.family not in {"triton", "compiled_nan"}:
        assert known.operators
        assert known.argument
    answer = explain(known.id)
    assert known.rule in " ".join(answer.split())
    assert max(map(len, answer.splitlines())) <= 100
    assert len(answer.splitlines()) <= 20


def test_the_catalogue_is_whole() -> None:
    assert len(entries()) == 125
    assert len({known.id for known in entries()}) == 125
    assert sum(known.user_reachable for known in entries()) == 87


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        # PyPI wheels of several ages, conda
        (line(), ("Loss.cu", 244, "kernel", TARGET, ["nll_target"])),
        (
            "../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [35,0,0],"
            f" thread: [32,0,0] Assertion `{SELECT}` failed.",
            ("Indexing.cu", 1146, "indexSelectLargeIndex", SELECT, ["index_select_small"]),
        ),
        (
            "/opt/conda/conda-bld/pytorch_1614378083779/work/aten/src/ATen/native/cuda/Indexing.cu"
            f":605: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] Assertion `{SELECT}`"
            " failed.",
            ("Indexing.cu", 605, "indexSelectSmallIndex", SELECT, ["index_select_small"]),
        ),
        # Windows has no function; slashes are mixed
        (
            r"C:\cb\pytorch_1000000000000\work\aten\src\ATen\native\cuda\Loss.cu:242: block:"
            rf" [0,0,0], thread: [6,0,0] Assertion `{TARGET}` failed.",
            ("Loss.cu", 242, None, TARGET, ["nll_target"]),
        ),
        (
            r"C:/cb/pytorch_1000/work\c10/core/DynamicCast.h:78: block: [1,0,0], thread: [6,0,0]"
            r" Assertion `false` failed.",
            ("DynamicCast.h", 78, None, "false", ["dynamic_cast"]),
        ),
        # lambdas
        (
            line(
                "IndexKernel.cu",
                'index >= -sizes[i] && index < sizes[i] && "index out of bounds"',
                "lambda [](int)->auto::operator()(int)->auto: ",
            ),
            (
                "IndexKernel.cu",
                244,
                "lambda [](int)->auto::operator()(int)->auto",
                'index >= -sizes[i] && index < sizes[i] && "index out of bounds"',
                ["index_kernel_2_0"],
            ),
        ),
        # before 1.9: whole signatures, other files
        (
            "/pytorch/aten/src/THC/THCTensorIndex.cu:361: void indexSelectLargeIndex(TensorInfo<T,"
            " IndexType>, TensorInfo<T, IndexType>, TensorInfo<long, IndexType>, int, int,"
            " IndexType, IndexType, long) [with T = float, IndexType = unsigned int, DstDim = 2]:"
            f" block: [0,0,0], thread: [32,0,0] Assertion `{SELECT}` failed.",
            ("THCTensorIndex.cu", 361, None, SELECT, ["index_select_small"]),
        ),
        # Triton and inductor
        (
            "/tmp/torchinductor_me/xx/cabc.py:25: unknown: block: [3,0,0], thread: [6,0,0]"
            " Assertion `index out of bounds: 0 <= tmp4 < 24` failed.",
            (
                "cabc.py",
                25,
                "unknown",
                "index out of bounds: 0 <= tmp4 < 24",
                ["inductor_bounds"],
            ),
        ),
        (
            "<frozen importlib._bootstrap_external>:843: _call_with_frames_removed: block: [3,0,0],"
            " thread: [6,0,0] Assertion `index out of bounds: tmp4 < 24` failed.",
            (
                "<frozen importlib._bootstrap_external>",
                843,
                "_call_with_frames_removed",
                "index out of bounds: tmp4 < 24",
                ["inductor_bounds_upper"],
            ),
        ),
        (
            "unknown:0: unknown: block: [3,0,0], thread: [6,0,0] Assertion `index out of bounds: 0"
            " <= tl.broadcast_to(tmp4, [XBLOCK]) < 24` failed.",
            (
                "unknown",
                0,
                "unknown",
                "index out of bounds: 0 <= tl.broadcast_to(tmp4, [XBLOCK]) < 24",
                ["inductor_bounds"],
            ),
        ),
        # Intel XPU, ROCm
        (
            "/build/xpu/sycl/Indexing.cpp:615: operator(): global id: [0,0,0], local id: [1,0,0]"
            f" Assertion `{SELECT}` failed",
            ("Indexing.cpp", 615, "operator()", SELECT, ["index_select_small"]),
        ),
        (
            "/work/aten/src/ATen/native/hip/Indexing.hip:1290: void indexSelectLargeIndex(int):"
            f" Device-side assertion `{SELECT}' failed.",
            (
                "Indexing.hip",
                1290,
                "void indexSelectLargeIndex(int)",
                SELECT,
                ["index_select_small"],
            ),
        ),
        # the verbose macro
        (
            "[CUDA_KERNEL_ASSERT] /__w/pytorch/pytorch/aten/src/ATen/native/cuda/Repeat.cu:20:"
            " compute_cuda_kernel: block: [0,0,0], thread: [0,0,0]: Assertion failed:"
            " `result_size == cumsum_ptr[size - 1]`: Invalid input! In `repeat_interleave`, the"
            " `output_size` argument (7) must be the same as the sum.",
            (
                "Repeat.cu",
                20,
                "compute_cuda_kernel",
                "result_size == cumsum_ptr[size - 1]",
                ["repeat_output_size"],
            ),
        ),
        # texts: with backticks, empty, without a message, copied through Markdown
        (
            line("TensorCompare.cu", BACKTICKS),
            ("TensorCompare.cu", 244, "kernel", BACKTICKS, ["multinomial_async"]),
        ),
        (
            line("TensorCompare.cu", ""),
            ("TensorCompare.cu", 244, "kernel", "", ["index_put_accumulate", "assert_async_msg"]),
        ),
        (
            line("ValidateCompressedIndicesCommon.h", "cond && message"),
            (
                "ValidateCompressedIndicesCommon.h",
                244,
                "kernel",
                "cond && message",
                ["sparse_compressed_invariants"],
            ),
        ),
        (line().replace("`", ""), ("Loss.cu", 244, "kernel", TARGET, ["nll_target"])),
        # what stands before it on the line
        ("[rank1]: " + line(), ("Loss.cu", 244, "kernel", TARGET, ["nll_target"])),
        (
            "\r  3%|▎     | 12/400 [00:01<00:39,  9.9it/s]" + line(),
            ("Loss.cu", 244, "kernel", TARGET, ["nll_target"]),
        ),
        ("loss 0.31" + line()[1:], ("Loss.cu", 244, "kernel", TARGET, ["nll_target"])),
        ("\x1b[31m" + line() + "\x1b[0m", ("Loss.cu", 244, "kernel", TARGET, ["nll_target"])),
    ],
)  # fmt: skip
def test_every_form_of_the_line(
    printed: str, expected: tuple[str, int, str | None, str, list[str]]
) -> None:
    (parsed,) = parse("before\n" + printed + "\nafter\n")
    file, number, function, assertion, candidates = expected
    assert (parsed.file, parsed.line, parsed.assertion) == (file, number, assertion)
    assert [known.id for known in parsed.candidates] == candidates
    if function:
        assert parsed.function == function
    assert parsed.thread is None or len(parsed.thread) == 3


def test_a_pre_1_9_signature_is_kept_whole() -> None:
    signature = "void kernel(TensorInfo<T, I>, int) [with T = float, I = unsigned int]"
    (parsed,) = parse(line(function=signature + ": "))
    assert parsed.function == signature


def test_block_and_thread_are_read() -> None:
    (parsed,) = parse(line().replace("block: [0,0,0]", "block: [7,1,2]"))
    assert (parsed.block, parsed.thread) == ((7, 1, 2), (3, 0, 0))


def test_two_lines_that_lost_the_line_end_between_them() -> None:
    assert ids(line() + line("Indexing.cu", SELECT)) == [["nll_target"], ["index_select_small"]]


def test_lines_that_were_cut() -> None:
    whole = line("Indexing.cu", SELECT, "indexSelectSmallIndex: ")
    cut_in_text = whole[: whole.index("DimSize")]
    (parsed,) = parse(cut_in_text + "\nepoch 3 of 7\nDimSize` failed.\n")
    assert parsed.assertion == SELECT  # only one text of that file begins so
    assert ids(whole[: whole.index("Assertion")] + "\n") == []
    assert ids(whole[: whole.index("thread")] + whole) == [["index_select_small"]]
    # Loss.cu has two texts that begin so: nothing is made up
    assert parse(line(text="cur_target ")[:-9])[0].assertion == "cur_target"


def test_what_is_not_a_device_assert() -> None:
    assert parse("python: convert.c:12: int main(): Assertion `x > 0' failed.") == ()
    assert parse("AssertionError: block: [0,0,0]") == ()
    assert parse(line().replace("[3,", "[" + "3" * 5000 + ",")) == ()
    assert parse("") == ()


def test_fold_counts_each_distinct_line() -> None:
    many = [line(thread=thread) for thread in range(300)]
    many[150] = line("Indexing.cu", SELECT)
    first, second = fold(parse("\n".join(many)))
    assert (first.text, first.count, first.catalogue_id) == (TARGET, 299, "nll_target")
    assert (first.kernel_file, first.line) == ("Loss.cu", 244)
    assert (second.text, second.count) == (SELECT, 1)


def test_a_line_with_several_meanings_has_no_single_id() -> None:
    fork = line("FasterLoss.cu")  # the text is of Loss.cu and of NLLLoss2d.cu
    assert fold(parse(fork))[0].catalogue_id is None
    assert set(ids(fork)[0]) == {"nll_target", "nll2d_target"}


@pytest.mark.parametrize(
    ("printed", "inside", "outside"),
    [
        (driver_line("nll_target"), {"cross_entropy", "nll_loss"}, {"embedding", "index"}),
        (driver_line("index_select_small"), {"embedding", "index_select", "index"}, {"nll_loss"}),
        (driver_line("vectorized_gather"), {"embedding", "index", "gather"}, {"scatter_add_"}),
        (driver_line("scatter_gather"), {"embedding", "gather", "scatter_add_"}, {"nll_loss"}),
        (driver_line("scatter_fill"), {"one_hot", "scatter_"}, {"embedding"}),
        (driver_line("index_kernel"), {"index", "index_put_"}, {"embedding"}),
        (driver_line("bce_input"), {"binary_cross_entropy"}, {"cross_entropy"}),
        (driver_line("multinomial_async"), {"multinomial"}, {"index_put_"}),
        (line("TensorCompare.cu", ""), {"index_put_"}, {"multinomial"}),
        # what a Windows wheel prints for all of them
        (
            line("TensorCompare.cu", "input[0] != 0", ""),
            {"multinomial", "index_put_", "normal"},
            {"embedding"},
        ),
        (driver_line("inductor_bounds"), {"cross_entropy", "embedding", "index"}, {"multinomial"}),
    ],
)
def test_operators_that_a_line_allows(printed: str, inside: set[str], outside: set[str]) -> None:
    allowed = all_operators(printed)
    assert allowed is not None
    assert inside <= allowed
    assert not outside & allowed


@pytest.mark.parametrize(
    "printed",
    [
        "",
        driver_line("dynamic_cast"),
        driver_line("triton_user"),
        line("TensorCompare.cu", "a message of the user's own"),
        line("New.cu", "something quite new"),
    ],
)
def test_lines_that_tell_no_operator(printed: str) -> None:
    assert all_operators(printed) is None


def test_driver_lines_of_several_threads_differ() -> None:
    lines = {driver_line("nll_target", thread) for thread in range(40)}
    assert len(lines) == 40
    assert parse(driver_line("vectorized_gather", 9))[0].block == (9, 0, 0)


def test_an_unknown_id_is_named() -> None:
    with pytest.raises(UsageError, match="nll_targit"):
        entry("nll_targit")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (line(), ["class label", "cross_entropy", "`target`"]),
        (TARGET, ["class label", "cross_entropy"]),
        ("Loss.cu", ["Loss.cu"]),
        ("index out of bounds: 0 <= tmp7 < 50", ["torch.compile"]),
        ("RuntimeError: CUDA error: device-side assert triggered", ["restart", "out of range"]),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
         ["matrix product", "assert lines"]),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", ["cuDNN"]),
        ("CUDA error: an illegal memory access was encountered", ["unchecked index"]),
        ("CUDA error: unspecified launch failure", ["ROCm"]),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", ["rank"]),
        ("Hardware", ["Xid", "ECC"]),
        ("try except", ["No."]),
        ("launch_blocking", ["before CUDA starts"]),
        (line("New.cu", "something new"), ["not in the catalogue", "something new"]),
        (line("TensorCompare.cu", ""), ["no text", "index_put_"]),
        ("IndexError: Target 10 is out of bounds.", ["class label", "ignore_index"]),
        ("IndexError: index out of range in self", ["row", "embedding"]),
        ("RuntimeError: all elements of input should be between 0 and 1", ["BCEWithLogitsLoss"]),
        ("Compile with `TORCH_USE_CUDA_DSA` to enable", ["hint", "not the error"]),
        ("RuntimeError: CUDA error: out of memory", ["not an assert", "No restart"]),
    ],
)  # fmt: skip
def test_explain(asked: str, words: list[str]) -> None:
    answer = explain(asked)
    for word in words:
        assert word in " ".join(answer.split())
    assert "Nothing is known" not in answer
    assert max(map(len, answer.splitlines())) <= 100


@pytest.mark.parametrize("asked", ["", "   "])
def test_explain_of_nothing_lists_what_may_be_asked(asked: str) -> None:
    assert explain(asked).startswith("Give the text of a CUDA error")
    assert all(name in explain(asked) for name in topics())


@pytest.mark.parametrize("asked", ["why is the sky blue", "KeyError: 'x'", "`", "{}"])
def test_explain_says_when_it_does_not_know(asked: str) -> None:
    answer = explain(asked)
    assert answer.startswith("Nothing is known about")
    assert all(topic in answer for topic in topics())


def test_explain_guesses_at_typing_errors() -> None:
    assert "Did you mean hardware?" in explain("hardwear")
    assert "Did you mean nll_target?" in explain("nll_targit")


def test_topics_cover_the_usual_questions() -> None:
    assert set(topics()) == {
        "hardware", "why-late", "try-except", "launch-blocking", "dsa", "several-gpus", "restart",
        "labels", "labels-look-fine", "embeddings", "wrong-loss", "verify",
    }  # fmt: skip
    for name, answer in topics().items():
        assert 3 <= len(answer.splitlines()) <= 15, name
        assert max(map(len, answer.splitlines())) <= 100, name
        assert explain(name) == answer


pieces = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from([line(), line("TensorCompare.cu", BACKTICKS), line("X.cu", ""), "\n", "`"]),
        st.tuples(st.sampled_from([line(), driver_line("scatter_fill")]), st.integers(0, 200)).map(
            lambda pair: pair[0][: pair[1]]
        ),
        st.tuples(st.sampled_from([line(), driver_line("scatter_fill")]), st.integers(0, 200)).map(
            lambda pair: pair[0][pair[1] :]
        ),
    ),
    max_size=12,
)


@settings(deadline=None)  # the machine may be busy
@given(pieces)
def test_cut_and_interleaved_text_never_raises(parts: list[str]) -> None:
    text = "".join(parts)
    parsed = parse(text)
    assert sum(one.count for one in fold(parsed)) == len(parsed) <= text.count("thread: [")
    explain(text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.text("abc \r[]%|", max_size=20))
def test_whole_lines_are_all_counted(threads: list[int], noise: str) -> None:
    text = "\n".join(noise + line(thread=thread) for thread in threads)
    (folded,) = fold(parse(text))
    assert (folded.text, folded.kernel_file, folded.count) == (TARGET, "Loss.cu", len(threads))
