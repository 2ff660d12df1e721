"""Causes in graphs: edges between nodes, and nodes that are pooled by the number of their group."""

from __future__ import annotations

import ast
import re

from nb_assertdoc.model import Fix

from .facts import TABLES, Facts, vocabulary, words
from .fixes import CHAIN, keep, name_of
from .indices import fits
from .rule import Match, Rule

NODE = vocabulary(
    "edge edges edge_index node nodes neighbor neighbors neighbour neighbours adj senders receivers"
)
ENDS = vocabulary("src dst row col head tail source")
KIND = r"(node|edge)_(type|attr|feat|label|class)"  # what it is, not which one
# Functions of libraries that reduce rows by the number of their group.
REDUCE = (
    r"global_\w*pool\w*|(unsorted_)?segment_\w+|scatter(_(add|sum|mean|min|max|mul|std|softmax))?"
)
GROUP = vocabulary("batch cluster clusters group groups graph_id graph_ids segment segments")
SIZES = ("size", "dim_size", "num_segments", "num_groups", "num_graphs")


def _call(facts: Facts) -> ast.Call | None:
    """The user's call at the failing line."""
    try:
        node = ast.parse((facts.observed.finding.location.expression or "").strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None
    return node.body if isinstance(node.body, ast.Call) else None


def _picks_rows(facts: Facts) -> bool:
    """Rows picked by one end of the edges are added up by the other."""
    line = facts.observed.finding.location.source
    summed = r"(index_add|scatter_(add|reduce|mean|sum))_?\(.*\w\[|(?<![.\w])scatter\(\w+\["
    return re.search(summed, line) is not None


def _in_layer(facts: Facts) -> bool:
    """Library code that passes messages along the edges: a layer, or a call that is given edges."""
    finding = facts.observed.finding
    if not facts.indexes or facts.observed.index_expression is not None:
        return False
    layer = "Conv" in (finding.module_type or "") or "aggr_module" in (finding.module or "")
    given = bool(words(finding.location.source) & (NODE | {"adj_t"}))
    return layer or (given and facts.graph)


def node_index(facts: Facts) -> Match | None:
    if not (facts.indexes or facts.op in TABLES) or not facts.bad:
        return None
    if facts.op in TABLES and any(re.search(KIND, name) for name in facts.names):
        return None
    named = facts.mentions(r"\b(nodes?|edges?|neighbou?rs?)\b")
    if NODE & facts.names:
        score = 81
    elif _in_layer(facts) or (facts.graph and ENDS & facts.names):
        score = 74
    elif _picks_rows(facts) and (named or facts.graph):
        score = 70
    else:
        return None
    high, name = facts.high, name_of(facts, "edge_index")
    there = "only 1 node is counted" if high == 1 else f"there are {high} nodes"
    why = (
        "Nodes were removed or renumbered and the edges still carry the old numbers, or numbering "
        "starts at 1."
        if high != 1
        else "Where there are more, the features have a dimension too many: [nodes, 1, size]."
    )
    return Match(
        score=score,
        explanation=f"The edges name node {facts.found}, but {there} ({facts.valid}). {why}",
        because=(
            *facts.sizes("node|num|n_"),
            "smaller numbers are in range and may silently name the wrong node",
        ),
        fixes=(
            Fix(
                title="Renumber the edges after nodes were dropped",
                explanation="Map old numbers to new ones (a dict, or "
                "torch_geometric.utils.subgraph with relabel_nodes=True) and drop edges of "
                "removed nodes.",
                code=keep(name, high),
            ),
            Fix(
                title="Or keep all nodes, if the features are incomplete",
                explanation="The number of feature rows must be at least the largest node "
                "number plus one.",
                code=f"assert {facts.observed.table_expression or 'x'}.size(0) > "
                f"int({name}.max()), 'fewer feature rows than nodes'",
            ),
        ),
    )


def extra_dimension(facts: Facts) -> Match | None:
    """Features of shape [nodes, 1, size]: the layer counts the nodes along the wrong dimension."""
    shape = facts.observed.input_shape
    if facts.high != 1 or len(shape) < 3 or not _in_layer(facts) or 0 not in fits(facts):
        return None
    call = _call(facts)
    given = ast.unparse(call.args[0]) if call is not None and call.args else ""
    name = given if re.fullmatch(CHAIN, given) else "x"
    return Match(
        score=86,
        explanation=f"The layer takes features of shape [nodes, size] and was given "
        f"{list(shape)}: it counts the nodes along a dimension of size 1, not along the "
        f"first, of size {shape[0]}. The edges themselves are in range.",
        fixes=(
            Fix(
                title="Remove the dimension of size 1 from the features",
                explanation="squeeze(1), often of ids of shape [nodes, 1] before they go through "
                "an embedding.",
                code=f"assert {name}.dim() == 2, 'features are [nodes, size]'",
            ),
        ),
    )


def group_id(facts: Facts) -> Match | None:
    if not facts.bad or not (facts.sums or facts.op == "scatter"):
        return None
    call, finding, index = _call(facts), facts.observed.finding, facts.observed.index_expression
    name, size = index, None
    if index is None and call is not None:
        function = getattr(call.func, "attr", getattr(call.func, "id", ""))
        module = finding.module_type or ""
        readout = module.endswith("Aggregation") and "aggr_module" not in (finding.module or "")
        if not (readout or re.fullmatch(REDUCE, function)):
            return None
        named = {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}
        second = ast.unparse(call.args[1]) if len(call.args) > 1 else None
        name = named.get("batch") or named.get("index") or second
        size = next((f"{k}={named[k]}" for k in SIZES if k in named), None)
    elif not (facts.sums and GROUP & facts.index_words):
        return None
    if (NODE | ENDS) & words(name) or _picks_rows(facts):
        return None
    need = int(facts.bad[-1]) + 1
    shown = f"`{name}`" if name and len(name) <= 40 else "the group numbers"
    plain = name if name and re.fullmatch(CHAIN, name) else name_of(facts, "batch")
    made = f", and `{size}` makes" if size else ", and there is room for"
    return Match(
        score=83,
        explanation=f"Rows are added up by the number of their group in {shown}: it holds "
        f"{facts.found}{made} {facts.high} groups ({facts.valid}).",
        because=tuple(facts.sizes("num|size|n_|cluster|group|graph|batch")),
        fixes=(
            Fix(
                title=f"Make room for {need} groups, or number the groups without gaps",
                explanation="The size is the largest number plus one, over the whole batch; "
                "torch.unique(numbers, return_inverse=True)[1] closes gaps.",
                code=keep(plain, need),
            ),
        ),
    )


RULES = (
    Rule(
        "node_index_ge_num_nodes",
        "An edge names a node that does not exist",
        "Edges hold node numbers 0..n-1, n = rows of the features. After nodes were dropped, "
        "edges must be renumbered; numbers that happen to be in range are silently wrong.",
        node_index,
    ),
    Rule(
        "node_features_extra_dimension",
        "The node features have a dimension too many",
        "Graph layers take features of shape [nodes, size]. With [nodes, 1, size], as an embedding "
        "of ids of shape [nodes, 1] gives, they count the nodes along the dimension of size 1. "
        "Squeeze it away.",
        extra_dimension,
    ),
    Rule(
        "group_id_ge_num_groups",
        "A group number is not below the number of groups",
        "Pooling and scatter functions add rows up by the number of their group: graph, cluster or "
        "segment. The size that they are given must be at least the largest number plus one.",
        group_id,
    ),
)
