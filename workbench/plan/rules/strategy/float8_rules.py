"""What fp8 GEMMs are built for: torchao's tensor-wise scaling of the blocks' linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from workbench.errors import PlanError, Problem, refuse
from workbench.plan.model.head_split import padded_heads_per_rank
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy import operator_rules
from workbench.schedules.generators import SCHEDULES

GEMM_MULTIPLE = 16
"""cuBLAS's fp8 GEMMs take tensors whose rows are multiples of 16 bytes."""
VERIFIED_PRECISIONS: dict[str, tuple[str, ...]] = {"cpu": ("fp64", "fp32"), "gpu": ("fp32", "bf16")}
"""What a plan can be verified in, by where; the first is the default. A plan in fp8 only in fp8."""


def problems(plan: ResolvedPlan) -> list[Problem]:
    """Why a complete plan's fp8 GEMMs cannot run; empty if they can, or there are none."""
    if plan.strategy.precision != "fp8":
        return []
    if plan.code:
        why = "which has no blocks whose linear layers are known; legal with it: bf16"
        return [Problem("strategy.precision", f"is fp8, and '{plan.code.python}' is code, {why}")]
    return [*_axes(plan), *_shape(plan)]


def _axes(plan: ResolvedPlan) -> Iterator[Problem]:
    s = plan.strategy
    if plan.lora:
        yield Problem(
            "finetune.lora",
            "is set, beside whose adapters frozen weights are not fp8; legal with "
            "strategy.precision fp8: finetune.method: full",
        )
    if s.tensor.algorithm != "1d" and s.tensor.ranks > 1:
        yield Problem(
            "strategy.tensor.algorithm",
            f"is '{s.tensor.algorithm}', whose tiles fp8 does not scale together; legal with "
            "strategy.precision fp8: '1d'",
        )
    if s.pipeline.replicas and not s.pipeline.is_round_robin:
        yield Problem(
            "strategy.pipeline.replicas",
            f"is {s.pipeline.replicas}, whose parts of a microbatch fp8 does not scale together; "
            "legal with strategy.precision fp8: none, or pipeline.distribution: round_robin",
        )
    schedule = SCHEDULES.get(s.pipeline.schedule)
    if s.pipeline.size > 1 and (schedule is None or schedule.splits_backward):
        legal = ", ".join(name for name, each in SCHEDULES.items() if not each.splits_backward)
        yield Problem(
            "strategy.pipeline.schedule",
            f"is '{s.pipeline.schedule}', which may compute weight gradients apart from backward, "
            f"where the scales are no longer known; legal with strategy.precision fp8: {legal}",
        )


def _shape(plan: ResolvedPlan) -> Iterator[Problem]:
    shape, ranks = plan.shape, plan.strategy.tensor.ranks
    if shape.mla is not None:
        yield Problem(
            "model.mla",
            "is set, whose projections of latents are not fp8; legal with strategy.precision fp8: "
            "a model without it",
        )
    if shape.moe is not None:
        yield Problem(
            "model.moe",
            f"has {shape.moe.experts} experts, whose grouped GEMMs are not fp8; legal with "
            "strategy.precision fp8: a dense model",
        )
    if plan.strategy.operators:
        yield from [] if operator_rules.problems(plan) else _operators(plan)
        return
    heads, kv_heads = padded_heads_per_rank(shape, ranks)
    head_dim, t = int(shape.head_dim or 0), plan.training
    sizes = {
        "model.hidden": ("is", shape.hidden),
        "model.ffn": (f"over {ranks} tensor ranks is", shape.ffn / ranks),
        "model.heads": (f"over {ranks} tensor ranks have the width", heads * head_dim),
        "model.kv_heads": (f"over {ranks} tensor ranks have the width", kv_heads * head_dim),
        "training.micro_batch": (
            f"{t.micro_batch} x sequence_length {t.sequence_length} over "
            f"{plan.strategy.context.size} context ranks has this many tokens:",
            t.micro_batch * t.sequence_length / plan.strategy.context.size,
        ),
    }
    for field, (words, size) in sizes.items():
        if size % GEMM_MULTIPLE:
            yield Problem(
                field,
                f"{words} {size:g}, which fp8 GEMMs do not take; legal with strategy.precision "
                f"fp8: a multiple of {GEMM_MULTIPLE}",
            )


def _operators(plan: ResolvedPlan) -> Iterator[Problem]:
    """Each operator's own pieces of its GEMM."""
    shape, t = plan.shape, plan.training
    tokens = t.micro_batch * t.sequence_length // plan.strategy.context.size
    found = operator_rules.pieces(plan)
    widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
    gemms = {f"attention.{name}": (shape.hidden, width) for name, width in widths.items()}
    gemms |= {"attention.o": (shape.q_width, shape.hidden), "mlp.up": (shape.hidden, shape.ffn)}
    gemms |= {"mlp.down": (shape.ffn, shape.hidden)}
    gemms |= {"mlp.gate": (shape.hidden, shape.ffn)} if shape.gated else {}
    for layer, (name, (inner, columns)) in product(range(shape.layers), gemms.items()):
        path = f"blocks.{layer}.{name}"
        split = found.get(path, {})
        split = split | {"rows": split.get("rows", 1) * split.get("tokens", 1)}
        sizes = {"rows": tokens, "inner": inner, "columns": columns}
        for dim, size in ((dim, size / split.get(dim, 1)) for dim, size in sizes.items()):
            if size % GEMM_MULTIPLE:
                yield Problem(
                    "strategy.operators",
                    f"gives {path} {size:g} {dim} a rank, which fp8 GEMMs do not take; legal with "
                    f"strategy.precision fp8: a multiple of {GEMM_MULTIPLE}",
                )
                return


def verified_precision(plan: ResolvedPlan, precision: str | None, on: str) -> str:
    """The precision to verify a plan in; the first that is legal where none is given.

    Raises:
        PlanError: `precision` or `on` is not legal.
    """
    if on not in VERIFIED_PRECISIONS:
        raise refuse("--on", f"is '{on}'; legal: {', '.join(VERIFIED_PRECISIONS)}")
    is_fp8 = plan.strategy.precision == "fp8"
    legal = ("fp8",) if is_fp8 else VERIFIED_PRECISIONS[on]
    if precision is None or precision in legal:
        return precision or legal[0]
    raise PlanError(Problem("--precision", _why_not(precision, on, is_fp8, legal)))


def _why_not(precision: str, on: str, is_fp8: bool, legal: tuple[str, ...]) -> str:
    if is_fp8:
        return (
            f"is '{precision}', but strategy.precision is fp8, whose scales and casts are what "
            "would not be verified then; legal: fp8, or the same plan with strategy.precision bf16"
        )
    where = " with --on gpu" if on == "gpu" else ""
    hints = {"fp8": "fp8 with strategy.precision fp8", "bf16": "bf16 with --on gpu"}
    return f"is '{precision}'{where}; legal: {', '.join((*legal, *_hint(hints, precision)))}"


def _hint(hints: dict[str, str], precision: str) -> tuple[str, ...]:
    """Where `precision` would be legal, if anywhere."""
    return (hints[precision],) if precision in hints else ()
