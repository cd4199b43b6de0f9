"""What an MoE layer computes and keeps on one rank, its communication apart: every part at its
local size, as the estimate of a plan prices it (`costmodel/operators/layers/symbolic_moe.py`), with
as many rows for every expert.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.costmodel.communication.collective_cost import collective_seconds
from workbench.costmodel.compute.engine_traffic.moe_layer_bytes import (
    UPCAST_BYTES,
    MoeLayerSizes,
    moe_layer_bytes,
)
from workbench.costmodel.compute.kernel_rates import DeviceRates, gemm_seconds
from workbench.plan.operators.operator_graph import Operator
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_splits import ShardingStrategy

TEXTBOOK_COPIES = 8
"""Times that the experts' rows are moved by dispatch and combine, forward and backward."""


class LocalMoe:
    """The sizes of an MoE layer on one rank.

    Args:
        operator: The layer, over all ranks.
        strategy: How it is sharded.
        mesh: The ranks.
    """

    def __init__(self, operator: Operator, strategy: ShardingStrategy, mesh: LogicalMesh) -> None:
        self.sequences, self.width = (
            operator.dim(name) / strategy.num_shards(name, mesh) for name in ("rows", "width")
        )
        self.tokens, self.routed = (
            self.sequences * operator.dim(name) for name in ("tokens", "routed")
        )
        self.hidden, self.scores, self.experts, self.shared, self.matrices, self.top_k = map(
            operator.dim, ("hidden", "scores", "experts", "shared", "matrices", "choices")
        )
        self.expert_ranks = self.scores // self.experts

    @property
    def wide(self) -> float:
        """Elements of a tensor that has the width of the experts, routed and shared."""
        return (self.routed + self.tokens * self.shared) * self.width

    @property
    def kept(self) -> float:
        """Elements kept for backward beside the layer's output: rows dispatched to the experts,
        what these compute, and their outputs, which the gates weight.
        """
        return 2 * self.routed * self.hidden + self.matrices * self.wide

    def seconds(self, machine: MachineModel, element: int) -> float:
        """Forward and backward; `element` are bytes of an activation's."""
        device, own = machine.device, machine.experts
        router, wide = (own.router, UPCAST_BYTES) if own and own.router else (device, element)
        found = _linear_seconds(router, wide, self.tokens, self.scores, self.hidden)
        for rows, count, width in self._feed_forwards():
            into = _linear_seconds(device, element, rows, width, self.hidden)
            out = _linear_seconds(device, element, rows, self.hidden, width)
            found += count * ((self.matrices - 1) * into + out)
        # Of an activation: inputs read twice and their gradients written, two of the output.
        moved = (3 * (self.matrices - 1) + 2) * self.wide * element
        moved += self._routing_bytes(machine, element)
        return found + device.constants.traffic * moved / device.bandwidth

    def exchange(self, machine: MachineModel, element: int) -> tuple[float, float]:
        """(bytes of the rows that a rank sends to the experts' ranks, seconds of one all-to-all)"""
        size = self.routed * self.hidden * element
        if machine.experts is None or machine.experts.exchange is None:
            return size, 0.0
        link, constants = machine.experts.exchange, machine.device.constants
        once = collective_seconds("all_to_all", size, self.expert_ranks, link, constants)
        return size, float(once)

    def _feed_forwards(self) -> Iterator[tuple[float, int, float]]:
        """(rows, how many, width) of the experts, and of the shared ones, which are one layer."""
        yield self.routed / self.experts, self.experts, self.width
        if self.shared:
            yield self.tokens, 1, self.shared * self.width

    def _routing_bytes(self, machine: MachineModel, element: int) -> float:
        if machine.experts is None or not machine.experts.counts_operators:
            return TEXTBOOK_COPIES * self.routed * self.hidden * element
        # Rows of several ranks are sorted by expert, and back, in both passes.
        sorts = 2.0 if self.expert_ranks > 1 and self.experts > 1 else 0.0
        sizes = MoeLayerSizes(
            self.tokens,
            self.routed / self.tokens,
            self.hidden,
            self.scores,
            self.top_k,
            self.shared > 0,
            self.matrices == 3,
            self.experts * self.matrices * self.hidden * self.width,
        )
        moved = moe_layer_bytes(sizes, element, machine.experts.is_grouped)
        return (
            float(moved.forward + moved.backward) + sorts * 4 * self.routed * self.hidden * element
        )


def _linear_seconds(
    device: DeviceRates, element: int, rows: float, columns: float, inner: float
) -> float:
    """GEMMs of the output and of the gradients of input and weight."""
    orders = (rows, columns, inner), (rows, inner, columns), (columns, inner, rows)
    return sum(float(gemm_seconds(device, *order, element)) for order in orders)
