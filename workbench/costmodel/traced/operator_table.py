"""The table of operators on shapes: what the forward of each allocates, what it keeps for backward,
and what backward allocates.

One entry an operator; one test an entry, against torch on fake tensors. A model with an operator
that is not here is refused: no figure is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable

from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.traced.entries.attention import attention_entry, dropout_entry
from workbench.costmodel.traced.entries.combined import COMBINED
from workbench.costmodel.traced.entries.elementwise import ELEMENTWISE
from workbench.costmodel.traced.entries.ends import embedding_entry, own_loss_entry
from workbench.costmodel.traced.entries.moving import MOVING
from workbench.costmodel.traced.entries.ordered import ORDERED
from workbench.costmodel.traced.entries.pointwise import POINTWISE, Entry
from workbench.costmodel.traced.entries.products import (
    addmm_entry,
    bmm_entry,
    conv1d_entry,
    einsum_entry,
    linear_entry,
    matmul_entry,
    outer_entry,
)
from workbench.costmodel.traced.entries.reductions import REDUCTIONS
from workbench.costmodel.traced.node_call import NodeCall, unknown
from workbench.errors import PlanError
from workbench.plan.operators.traced.traced_graph import LOSS_OP, TracedNode

ENTRIES: dict[str, Entry] = {
    "linear": linear_entry,
    "addmm": addmm_entry,
    "matmul": matmul_entry,
    "mm": matmul_entry,
    "bmm": bmm_entry,
    "einsum": einsum_entry,
    "outer": outer_entry,
    "conv1d": conv1d_entry,
    "embedding": embedding_entry,
    "scaled_dot_product_attention": attention_entry,
    "dropout": dropout_entry,
    "cross_entropy_loss": own_loss_entry,
    **POINTWISE,
    **ELEMENTWISE,
    **COMBINED,
    **REDUCTIONS,
    **ORDERED,
    **MOVING,
}
"""Operator -> what it does on shapes."""
PRODUCTS = frozenset(
    {"linear", "addmm", "matmul", "mm", "bmm", "einsum", "conv1d", "scaled_dot_product_attention"}
)
"""Operators whose multiplications are priced one by one."""

OF_COMPLEX = frozenset({"add", "sub", "mul", *MOVING}) - {"_to_copy", "pad"}
"""Operators whose entries hold for complex numbers too."""


def require_entries(nodes: Iterable[TracedNode]) -> None:
    """Raise `PlanError` for every operator that the table lacks."""
    lacking = {node.op: node for node in reversed([*nodes]) if node.op not in ENTRIES}
    lacking.pop(LOSS_OP, None)
    if lacking:
        raise PlanError([p for node in lacking.values() for p in unknown(node).problems])


def run(c: NodeCall) -> list[SymbolicTensor]:
    """Results of an operator on a rank's shards."""
    dtypes = (*c.dtypes, *(y.dtype for y in c.node.outputs))
    if c.node.op not in OF_COMPLEX and any(dtype.startswith("torch.complex") for dtype in dtypes):
        c.refused("of complex numbers")
    results = list(ENTRIES[c.node.op](c))
    if c.node.op not in PRODUCTS:
        record_moves(c, results)
    return results


def record_moves(c: NodeCall, results: list[SymbolicTensor]) -> None:
    """Record what an operator reads and writes, where its results are new; its backward reads what
    forward did, and writes as much.
    """
    new = [y for y in results if all(y.storage is not x.storage for x in c.inputs)]
    if not new:
        return
    written, read = sum(y.bytes for y in new), sum(x.bytes for x in c.inputs)
    trained = sum(x.bytes for x in c.inputs if x.node is not None)
    c.r.compute("moved", written + read, (written + read + trained) * (trained > 0))
