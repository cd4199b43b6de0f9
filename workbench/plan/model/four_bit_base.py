"""What a base in 4 bits takes, and what share of it stays in the parameters' dtype."""

from __future__ import annotations

from math import prod
from typing import Any

from workbench.plan.model.block_linears import LinearSize, model_linears
from workbench.plan.model.parameter_count import parameters
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.runtime_facts.four_bit_sizes import FourBitFormat


def four_bit_format(plan: ResolvedPlan) -> FourBitFormat | None:
    """How a plan's base is stored in 4 bits; None where it is not."""
    quantize = None if plan.finetune is None else plan.finetune.quantize
    if quantize is None:
        return None
    return FourBitFormat(quantize.format, quantize.group, quantize.double)


def four_bit_notes(plan: ResolvedPlan) -> dict[str, Any]:
    """`four_bit_base`: bytes and parameters of the base, unsharded, in 4 bits and unquantized
    (embedding, head, norms, biases, routers); empty where it is not in 4 bits.
    """
    form = four_bit_format(plan)
    if form is None or plan.code or plan.profiled:
        return {}
    linears = list(model_linears(plan.shape).values())
    stored, size = sum(map(_numel, linears)), sum(_bytes(linear, form) for linear in linears)
    left = parameters(plan.shape).total - stored
    left_bytes = left * state_bytes(plan).parameter
    groups = f"groups of {form.group}" + (", double quantization" if form.double else "")
    return {
        "four_bit_base": {
            "format": f"{form.name}, {groups}",
            "parameters": stored,
            "bytes": size,
            "bits_per_parameter": 8 * size / stored,
            "unquantized_parameters": left,
            "unquantized_bytes": left_bytes,
            "unquantized_share": left / (left + stored),
            "unquantized_share_of_bytes": left_bytes / (left_bytes + size),
        }
    }


def _numel(linear: LinearSize) -> int:
    return prod((linear.outputs, linear.inputs, linear.experts or 1))


def _bytes(linear: LinearSize, form: FourBitFormat) -> int:
    return linear.outputs * (linear.experts or 1) * form.row_bytes(linear.inputs)
