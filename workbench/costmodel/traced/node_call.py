"""One operator of a traced graph, called on a rank's shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.errors import PlanError, refuse
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode

LEGAL = "legal: to rehearse or run it, which need no entry"


@dataclass(frozen=True)
class NodeCall:
    """What an entry of the table reads.

    Attributes:
        r: The rank.
        node: The operator.
        inputs: Its tensors on this rank, in the order of its arguments.
        shapes: Local shape of each result.
        sizes: Bytes of an element of each.
        dtypes: Of its tensors.
    """

    r: SymbolicRank
    node: TracedNode
    inputs: list[SymbolicTensor]
    shapes: list[tuple[int, ...]]
    sizes: list[int]
    dtypes: list[str]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        args = self.node.args
        return args[index] if index < len(args) else self.node.kwargs.get(name, default)

    def dim(self, index: int, name: str = "dim", default: int = 0) -> int:
        """An argument that is a dim of the first tensor, from 0."""
        return int(self.argument(index, name, default)) % max(1, len(self.inputs[0].shape))

    @property
    def subtracts_input(self) -> bool:
        """Whether the one tensor is what is subtracted."""
        return (self.node.op == "rsub") == isinstance(self.node.args[0], TensorRef)

    @property
    def divides_number(self) -> bool:
        """Whether the one tensor is the divisor."""
        return not isinstance(self.node.args[0], TensorRef)

    def refused(self, how: str) -> NoReturn:
        """Refuse a form of an operator that its entry does not know."""
        raise unknown(self.node, how)


def unknown(node: TracedNode, how: str = "") -> PlanError:
    """That an operator has no entry in the table: which, where, and what is legal."""
    where = f"{node.name} ({node.line})" if node.line else node.name
    said = f"{node.op} {how}".strip()
    return refuse(
        "model.python", f"has an operator that no estimate knows: {where} is {said}; {LEGAL}"
    )
