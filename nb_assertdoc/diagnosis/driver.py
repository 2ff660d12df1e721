"""Compare the driver's assert lines with the finding."""

from __future__ import annotations

from .facts import vocabulary

# Public operators that run the same CUDA kernels: a line of one says nothing against the other.
SAME_KERNELS = (
    vocabulary("cross_entropy nll_loss nll_loss2d"),
    vocabulary("embedding index_select index_add index_copy index_fill"),
    vocabulary("embedding embedding_bag"),
    vocabulary("index index_put take put getitem setitem take_along_dim"),
    vocabulary("gather scatter scatter_add scatter_reduce one_hot take_along_dim"),
    vocabulary("multinomial categorical"),
    vocabulary("bernoulli"),
)


def _plain(op: str) -> str:
    return op.rsplit(".", 1)[-1].strip("_")


def contradiction(finding_op: str, allowed: frozenset[str] | None) -> str | None:
    """A sentence if the driver's lines cannot come from the finding's operator, else None.

    `allowed`: public operators that the lines allow; None or empty: nothing is known.
    """
    if not allowed:
        return None
    op, lines = _plain(finding_op), {_plain(name) for name in allowed}
    related = {op}.union(*(group for group in SAME_KERNELS if op in group))
    if related & lines:
        return None
    told = ", ".join(sorted(allowed)[:4])
    return (
        f"The driver's assert line belongs to {told}; the replay found a fault in {finding_op}. "
        "They may be two faults."
    )
