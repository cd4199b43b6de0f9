"""What this version can do with a legal plan, by verb: one table, read by `run`, `rehearse` and the
list of strategies.

Widening the product means widening this table: a field that is not fully built is refused by name,
never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from workbench.errors import PlanError, Problem
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import WRITTEN_IF_CHANGED
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import layer_profile_rules, legal_sizes, python_model_rules
from workbench.plan.rules.strategy import float8_rules, operator_rules, recompute_rules
from workbench.plan.rules.task.task_words import in_words_of_task
from workbench.plan.schema import Plan
from workbench.schedules.generators import SCHEDULES

Verb = Literal["estimate", "rehearse", "run"]


def _schedule(plan: Plan) -> str:
    """The schedule, where there is a pipeline to follow it."""
    return plan.strategy.pipeline.schedule if plan.strategy.pipeline.size > 1 else "1f1b"


def _named_schedule(plan: Plan) -> str:
    """The same; a table that a user drew is read by its ranks, whatever its name."""
    return "1f1b" if plan.strategy.pipeline.schedule.endswith(".csv") else _schedule(plan)


def _stage_without_layers(plan: ResolvedPlan, verb: Verb) -> list[Problem]:
    """The engine builds no stage of the embedding or the head alone."""
    counts = plan.strategy.pipeline.partition
    if not isinstance(counts, list) or 0 not in counts:
        return []
    what = f"{counts} gives stage {counts.index(0)} no layer, which this version cannot {verb}; "
    return [Problem("strategy.pipeline.partition", f"{what}legal: a layer or more on each")]


def _split_of_an_expert(plan: Plan) -> int | None:
    """Tensor ranks of an expert, where they are not all."""
    split = plan.strategy.expert.tensor
    return None if split == plan.strategy.tensor.ranks else split


def _experts_on_grid(plan: ResolvedPlan) -> list[Problem]:
    """Nobody lays a mixture over a grid: Colossal-AI, whose grids these are, refuses it beside all
    tensor ranks.
    """
    tensor = plan.strategy.tensor
    moe = None if plan.code else plan.shape.moe
    if moe is None or tensor.algorithm == "1d":
        return []
    what = (
        f"is '{tensor.algorithm}', which splits a token's width over the grid {tensor.size}, "
        f"but the router of "
    )
    what += f"{moe.experts} experts needs the unsharded width; legal: '1d' with tensor.size "
    near = legal_sizes.near(tensor.ranks, legal_sizes.tensor_sizes(plan.shape, tensor.ranks))
    what += f"{near}, or a dense model"
    return [Problem("strategy.tensor.algorithm", what)]


def _routing(name: str, usual: Any) -> Callable[[ResolvedPlan], Any]:
    """A field of a mixture, None where it is as usual."""

    def read(plan: ResolvedPlan) -> Any:
        value = getattr(plan.shape.moe, name, usual)
        return None if value == usual else value

    return read


ONLY_1D_BLOCK_FIELDS = (
    "qk_norm",
    "parallel_residual",
    "rotary_dim",
    "branch_norms",
    "zero_centered_norms",
    "embedding_scale",
    "window_rope_theta",
)
"""Fields of a layer, null unless set, that operator strategies and tensor grids do not know: norms
of a rank's heads, the order of branches, and entries of a head that are not rotated.
"""


def _field_of_shape(name: str) -> tuple[str, Callable[[ResolvedPlan], Any]]:
    return f"model.{name}", lambda plan: getattr(plan.shape, name)


ROUTING_FIELDS = tuple(
    (f"model.moe.{name}", _routing(name, usual))
    for name, usual in WRITTEN_IF_CHANGED.items()
    if name != "top_groups"
)
"""How tokens choose experts beyond a softmax and its largest scores."""
ONLY_1D_FIELDS: tuple[tuple[str, Callable[[ResolvedPlan], Any]], ...] = (
    ("model.positions", lambda p: "alibi" if p.shape.positions == "alibi" else None),
    ("model.logit_softcap", lambda p: p.shape.logit_softcap),
    *map(_field_of_shape, ONLY_1D_BLOCK_FIELDS),
    ("model.mla", lambda p: "set" if p.shape.mla else None),
    *ROUTING_FIELDS,
    ("finetune.lora", lambda p: "set" if p.lora else None),
)
"""Fields that neither a tensor grid nor an operator strategy knows: slopes of a rank's heads,
logits that are capped, those of a layer, latents, and other routing.
"""


def _beside_grid_or_operators(plan: ResolvedPlan, verb: Verb) -> list[Problem]:
    """What is legal neither where modules have strategies of their own nor on a grid."""
    sharded = operator_rules.sides(plan) or plan.strategy.tensor.algorithm != "1d"
    if plan.code or not sharded:
        return []
    beside = "strategy.operators"
    if not operator_rules.sides(plan):
        beside = f"strategy.tensor.algorithm '{plan.strategy.tensor.algorithm}'"
    why = (
        f"which this version cannot {verb} beside {beside}; legal: strategy.tensor of '1d' without"
    )
    return [
        Problem(field, f"is {value!r}, {why} strategy.operators, or a model without it")
        for field, read in ONLY_1D_FIELDS
        if (value := read(plan)) is not None
    ]


def _kernels_of_code(plan: Plan) -> list[Problem]:
    """Kernels replace the seams of our own models."""
    if not plan.code or plan.strategy.kernels == "eager":
        return []
    why = (
        f"and '{plan.code.python}' is code, without the seams that kernels replace; legal: 'eager'"
    )
    return [Problem("strategy.kernels", f"is '{plan.strategy.kernels}', {why}")]


ENGINE_LIMITS: tuple[tuple[str, Callable[[ResolvedPlan], Any], tuple[Any, ...]], ...] = (
    ("strategy.data.overlap", lambda p: p.strategy.data.overlap, (True,)),
    ("strategy.data.offload_tier", lambda p: p.strategy.data.offload_tier, ("host",)),
    ("strategy.stack", lambda p: p.strategy.stack, ("workbench",)),
    ("training.optimizer.moments", lambda p: p.training.optimizer.moments, ("fp32", "bf16")),
    (
        "model.moe.capacity",
        lambda p: p.shape.moe.capacity if p.shape.moe and p.strategy.context.size > 1 else None,
        (None,),
    ),
    ("strategy.precision", lambda p: p.strategy.precision, ("fp32", "tf32", "bf16", "fp16", "fp8")),
    ("strategy.expert.tensor", _split_of_an_expert, (None,)),
    ("model.mtp_layers", lambda p: p.shape.mtp_layers, (0,)),
)
"""(field, how a complete plan says it, what the engine can do): for `rehearse` and `run`, which
share the engine.
"""

RUN_LIMITS: tuple[tuple[str, Callable[[ResolvedPlan], Any], tuple[Any, ...]], ...] = (
    ("model.unmodelled", lambda p: p.shape.unmodelled, (None,)),
)
"""The same for `run` alone: a model planned without them has their memory and collectives, but not
their values.
"""

OF_SHAPE = ("model.", "strategy.tensor.")
"""Fields that say something of a model's shape."""


def _parts_recomputed(plan: ResolvedPlan) -> list[int | str] | None:
    """What is recomputed, where a list names parts of layers whose modules have no strategies of
    their own.
    """
    wanted = plan.strategy.recompute
    if isinstance(wanted, str) or not wanted or operator_rules.sides(plan):
        return None
    modules = recompute_rules.recomputed_modules(wanted, plan.shape)
    whole = recompute_rules.recomputed_layers(wanted, plan.shape)
    return wanted if len(modules) > len(whole) else None


ESTIMATE_LIMITS: tuple[tuple[str, Callable[[ResolvedPlan], Any], tuple[Any, ...]], ...] = (
    ("strategy.pipeline.schedule", _named_schedule, tuple(SCHEDULES)),
    ("strategy.recompute", _parts_recomputed, (None,)),
)
"""The same for `estimate`."""


OPERATOR_ESTIMATE_LIMITS: tuple[tuple[str, Callable[[ResolvedPlan], Any], tuple[Any, ...]], ...] = (
    ("strategy.stack", lambda p: p.strategy.stack, ("workbench",)),
    ("strategy.precision", lambda p: p.strategy.precision, ("fp32", "tf32", "bf16", "fp16", "fp8")),
    ("finetune.lora", lambda p: "set" if p.lora else None, (None,)),
    ("model.mla", lambda p: "set" if p.shape.mla else None, (None,)),
    *((*_field_of_shape(name), (None,)) for name in ONLY_1D_BLOCK_FIELDS),
    ("model.mtp_layers", lambda p: p.shape.mtp_layers, (0,)),
    ("model.logit_softcap", lambda p: p.shape.logit_softcap, (None,)),
    *((field, read, (None,)) for field, read in ROUTING_FIELDS),
)
"""The same for `estimate` where strategy.operators say how each module is sharded: the operators of
what is left out do not run on shapes yet (`costmodel/operators`).
"""

CODE_ESTIMATE_LIMITS: tuple[tuple[str, Callable[[ResolvedPlan], Any], tuple[Any, ...]], ...] = (
    ("strategy.stack", lambda p: p.strategy.stack, ("workbench",)),
    ("strategy.precision", lambda p: p.strategy.precision, ("fp32", "tf32", "bf16", "fp16")),
)
"""The same for `estimate` of a user's traced module."""


def unsupported(plan: ResolvedPlan, verb: Verb, allow_code: bool = False) -> list[Problem]:
    """What a complete `plan` asks that this version cannot do with `verb`, field by field; empty if
    it can.

    A model that is code is refused, unless the user allows it (`allow_code`).
    """
    found = _lacking(plan, verb)
    if not allow_code:
        found += python_model_rules.forbidden(plan)
    return found


def require(plan: ResolvedPlan, verb: Verb, allow_code: bool = False) -> None:
    """Raise `PlanError` where a complete `plan` asks `verb` for what this version cannot do."""
    if found := unsupported(plan, verb, allow_code):
        raise PlanError(found)


def estimated_only(plan: ResolvedPlan) -> str:
    """Why this version can estimate a complete `plan` but not run it; empty if it can run it."""
    found = unsupported(plan, "run", allow_code=True)
    return f"is estimated only, for this version cannot run it: {found[0]}" if found else ""


@lru_cache(maxsize=256)
def runnable(preset: str) -> bool:
    """Whether the preset named `preset` can run: tried on eight GPUs with a small model, of
    experts if need be.
    """
    model = "tiny-moe" if "expert" in catalog.strategies()[preset].strategy else "tiny-gpt"
    cluster = {"gpu": "h100-sxm-80gb", "gpus": 1 if preset == "single" else 8}
    try:
        plan = Plan.model_validate(
            {"model": model, "cluster": cluster, "strategy": {"preset": preset}}
        )
        return not _lacking(plan.resolve(), "run")
    except PlanError:
        return False


def _lacking(plan: ResolvedPlan, verb: Verb) -> list[Problem]:
    table = {
        "estimate": ESTIMATE_LIMITS,
        "rehearse": ENGINE_LIMITS,
        "run": (*ENGINE_LIMITS, *RUN_LIMITS),
    }[verb]
    if plan.profiled and verb != "estimate":
        return [layer_profile_rules.not_runnable(plan, verb)]
    beside = ""
    if verb == "estimate" and plan.code:
        table = CODE_ESTIMATE_LIMITS
    elif verb == "estimate" and operator_rules.sides(plan):
        table, beside = (*table, *OPERATOR_ESTIMATE_LIMITS), " beside strategy.operators"
    if plan.code:
        table = tuple(row for row in table if not row[0].startswith(OF_SHAPE))
    unfit = operator_rules.problems(plan)
    unfit += _kernels_of_code(plan)
    if verb != "estimate":
        unfit += _experts_on_grid(plan) + _beside_grid_or_operators(plan, verb)
        unfit += [*float8_rules.problems(plan), *_stage_without_layers(plan, verb)]
    unfit += [
        Problem(field, f"is {value!r}{beside}; this version can {verb} {_legal(can)}")
        for field, read, can in table
        if (value := read(plan)) not in can
    ]
    return in_words_of_task(unfit, plan)


def _legal(can: tuple[Any, ...]) -> str:
    return "only without it" if can in ((None,), ({},)) else " or ".join(map(repr, can))
