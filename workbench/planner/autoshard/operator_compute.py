"""Seconds of one operator's forward and backward on one rank, by the cost model's roofline.

Launch floors are left out: a layer launches as many kernels under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.costmodel.compute.kernel_rates import (
    PassTimes,
    fused_attention,
    gemm_seconds,
    unfused_attention,
)
from workbench.plan.operators.operator_graph import Operator
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.moe_cost import LocalMoe
from workbench.planner.autoshard.operator_splits import ShardingStrategy


def compute_seconds(
    operator: Operator,
    strategy: ShardingStrategy,
    mesh: LogicalMesh,
    machine: MachineModel,
    local: Mapping[str, float],
    element: int,
) -> float:
    """Seconds forward and backward of a rank's part of `operator`, communication apart.

    Args:
        operator: The operator, with its sizes over all ranks.
        strategy: How it is sharded.
        mesh: The ranks.
        machine: What a rank computes with.
        local: Elements of a rank's part of each tensor, by name.
        element: Bytes of an activation's element.
    """
    device = machine.device
    if operator.kind == "MoE":
        seconds = LocalMoe(operator, strategy, mesh).seconds(machine, element)
    elif operator.causal_flops or operator.kind == "Softmax":
        seconds = _attention(operator, strategy, mesh, machine, local[operator.output.name])
    else:
        moved = _moved_elements(operator, local) * element / device.bandwidth
        if operator.kind == "MatMul":
            seconds = max(_gemms(operator, strategy, mesh, machine), moved)
        elif operator.kind == "Einsum" and len(operator.inputs) == 2:
            seconds = max(_batched_gemms(operator, strategy, mesh, machine), moved)
        else:
            seconds = device.constants.traffic * moved
    return float(device.constants.compute_slowdown * seconds)


def _moved_elements(operator: Operator, local: Mapping[str, float]) -> float:
    """Elements read and written at the textbook count.

    Forward reads the inputs and writes the output; backward reads the inputs and the output's
    gradient, and writes the inputs' gradients. The sum with a residual is an output too.
    """
    output = local[operator.output.name]
    learned = [t for t in operator.inputs if t.kind != "index"]
    # A table is read by the rows that are looked up, as much as the output, not as a whole.
    read = sum(output if operator.kind == "Embedding" else local[t.name] for t in learned)
    sums = sum(t.kind == "residual" for t in operator.inputs)
    return 3 * read + 2 * (1 + sums) * output


def _gemms(
    operator: Operator, strategy: ShardingStrategy, mesh: LogicalMesh, machine: MachineModel
) -> float:
    """FLOPs of output, input gradient and weight gradient, for each GEMM of the operator."""
    names = operator.inputs[0].dims
    inner, columns, *tokens = (
        operator.dim(name) / strategy.num_shards(name, mesh)
        for name in ("inner", "columns", *(name for name in names if name != "inner"))
    )
    rows = math.prod(tokens)
    device, fp8 = machine.device, machine.fp8 and operator.fp8
    fused = machine.framework.kernels.fused_qkv
    widths = (sum(operator.gemm_widths),) if fused else operator.gemm_widths
    total = 0.0
    for width in widths:
        n = columns * width / operator.dim("columns")
        # Bytes of an element 0: the operator's traffic is counted as a whole.
        total += float(gemm_seconds(device, rows, n, inner, 0, fp8))
        total += float(gemm_seconds(device, rows, inner, n, 0, fp8))
        total += float(gemm_seconds(device, n, inner, rows, 0, fp8))
    return total


def _batched_gemms(
    operator: Operator, strategy: ShardingStrategy, mesh: LogicalMesh, machine: MachineModel
) -> float:
    """As `_gemms`, of two inputs: dimensions of both and of the output count GEMMs."""
    left, right, output = (set(t.dims) for t in (*operator.inputs, operator.output))

    def local(names: set[str], whole: float = 1.0) -> float:
        return math.prod(operator.dim(n) / strategy.num_shards(n, mesh) for n in names) * whole

    rows, columns, inner = left - right, right - left, (left & right) - output
    count, device = local(left & right & output), machine.device
    # What a dimension that no strategy names adds to the elements, rows have.
    hidden = operator.output.share
    sides = local(rows, hidden), local(columns), local(inner)
    m, n, k = (max(1.0, side) for side in sides)
    orders = (m, n, k), (m, k, n), (n, k, m)
    return count * sum(float(gemm_seconds(device, *order, 0)) for order in orders)


def _attention(
    operator: Operator,
    strategy: ShardingStrategy,
    mesh: LogicalMesh,
    machine: MachineModel,
    output: float,
) -> float:
    """Fused attention, or the batched GEMMs and the softmax that it is without."""
    flops = operator.causal_flops / strategy.num_ranks_used(mesh)
    device, dropout = machine.device, machine.framework.saved_tensors.dropout_masks
    if operator.kind == "Softmax":
        return _total(unfused_attention(device, 0.0, 128, output, dropout))
    head_dim = operator.dim("depth")
    if operator.kind == "BatchMatMul":
        return _total(unfused_attention(device, flops, head_dim, 0.0, dropout))
    if not machine.framework.kernels.fused_attention:
        scores = output / head_dim * operator.dim("key")
        return _total(unfused_attention(device, flops, head_dim, scores, dropout))
    return _total(fused_attention(device, flops, head_dim, operator.dim("key")))


def _total(times: PassTimes) -> float:
    return float(times.forward + times.backward)
