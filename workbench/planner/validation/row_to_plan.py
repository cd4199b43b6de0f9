"""A row as a `Plan`: what the row says, and for what it leaves open its framework's documented
defaults.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from workbench.errors import PlanError
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.legal_sizes import divisors
from workbench.plan.schema import build_plan
from workbench.planner.validation import cell_parsers, gpu_names
from workbench.planner.validation.framework_names import FrameworkDefaults, find_framework
from workbench.planner.validation.implied_fields.published_models import published_model
from workbench.planner.validation.implied_fields.row_batches import (
    MICROBATCHES,
    batch_sizes,
    gpus_and_data_size,
    num_gpus,
    stated_batch,
)
from workbench.planner.validation.implied_fields.stage_layers import layers_of_stages
from workbench.planner.validation.measured_rows import MeasuredRow
from workbench.planner.validation.row_shapes import (
    Inexpressible,
    is_dense,
    is_moe,
    missing_fields,
    row_shape,
)
from workbench.units import GIB

SCHEDULES = (
    ("dualpipe-v", r"dual.?pipe"),
    ("zb-v", r"zb.?v|zero.?bubble v"),
    ("zb-h2", r"zb.?h?2"),
    ("zb-h1", r"zb|zero.?bubble"),
    ("interleaved", r"interleav|looped|virtual"),
    ("gpipe", r"gpipe|f-?then-?b|all.?forward"),
    ("1f1b", r"1f1b|one.?f|dapple|pipedream"),
)


@dataclass(frozen=True)
class PlannedRow:
    """A row, the complete plan that says it, and the figures that can be compared."""

    row: MeasuredRow
    plan: ResolvedPlan
    profile: str
    """The framework profile that the row names, its versions and options together."""
    seconds: float | None
    """Measured step time of the plan's global batch."""
    memory_gib: float | None
    """Measured peak."""
    assumed: tuple[str, ...]
    """Plan fields that took their framework's documented default, because the row leaves them
    open.
    """


def is_complete(row: MeasuredRow) -> bool:
    """Whether the row is one that must be expressible: a measured dense decoder of known model and
    batch.

    These are the shape, the sequence, the number of GPUs and their name, and enough of batch and
    micro-batch to know both, said or implied; fields with a documented default (recompute,
    sharding, schedule, sequence parallelism) may be open.
    """
    return is_dense(row) and _is_known(row)


def is_complete_moe(row: MeasuredRow) -> bool:
    """The same of a row whose model is a mixture of experts, whatever else it has."""
    return is_moe(row) and _is_known(row)


def _is_known(row: MeasuredRow) -> bool:
    gpus = num_gpus(row)
    if not row.measured or missing_fields(row) or not row.gpu or gpus is None:
        return False
    data = max(1, gpus // (row.tensor * row.pipeline * row.context))
    return None not in stated_batch(row, data)


def row_to_plan(row: MeasuredRow, profile: str | None = None) -> PlannedRow:
    """The plan that `row` describes, complete and legal. Raises `Inexpressible` with a reason to be
    counted by.

    `profile` names a framework profile to predict with in place of the row's own, whose defaults
    still hold.
    """
    if not row.measured:
        raise Inexpressible("not a measurement")
    if row.impossible:
        raise Inexpressible(f"impossible {', '.join(row.impossible)}")
    model = row_shape(row)
    gpus, data = gpus_and_data_size(row)
    gpu = gpu_names.find_gpu(row.gpu, row.gpu_memory)
    if gpu is None:
        raise Inexpressible(f"GPU unknown: {row.gpu or 'none given'}")
    framework = _row_framework(row, gpu)
    micro, batch, known = batch_sizes(row, data, framework)
    if framework.has_untied_head:
        model = model.model_copy(update={"tied": False})
    strategy, training, assumed = _strategy_fields(row, framework, gpu, model.layers, data)
    strategy["stack"] = profile or framework.name
    network = gpu_names.find_fabric(gpu.name, f"{row.table} {row.gpu} {row.notes}".lower())
    if cell_parsers.is_hybrid_sharded(row.sharding):
        _shard_within_node(
            strategy, data * row.context, max(1, network.gpus_per_node // row.tensor)
        )
    pipeline = strategy["pipeline"]
    stages = pipeline["size"] * pipeline.get("chunks", 1)
    published = published_model(row)
    dealt = layers_of_stages(
        framework.partition, model, stages, published.shape if published else None
    )
    if dealt is not None:
        pipeline["partition"] = dealt
    elif stages > model.layers:
        raise Inexpressible("more pipeline stages than layers")
    written = {
        "name": row.label,
        "model": model,
        "strategy": strategy,
        "cluster": {"gpu": gpu, "gpus": gpus, "fabric": network},
        "finetune" if "lora" in training else "training": {
            "sequence_length": row.sequence,
            "global_batch": batch,
            "micro_batch": micro,
            **training,
        },
    }
    try:
        plan = build_plan(written).resolve()
    except PlanError as error:
        raise Inexpressible(f"illegal: {error.problems[0].field}") from None
    return PlannedRow(
        row,
        plan,
        framework.family,
        _measured_seconds(row, batch, known),
        _measured_gib(row, framework),
        tuple(assumed),
    )


def _measured_seconds(row: MeasuredRow, batch: int, known: bool) -> float | None:
    """Measured step time: as printed, else from a rate and the batch; None where the batch is not
    known.
    """
    if row.step_seconds:
        return row.step_seconds if known else None
    if row.samples_per_second:
        return batch / row.samples_per_second
    return (
        batch * row.sequence / row.tokens_per_second
        if row.tokens_per_second and row.sequence
        else None
    )


def _measured_gib(row: MeasuredRow, framework: FrameworkDefaults) -> float | None:
    """Measured peak, GiB; a bare GB of the allocator's figures is what the framework's own reports
    mean
    by it.
    """
    if (
        row.memory_gib is None
        or not row.is_bare_gb
        or row.memory_kind not in ("allocated", "reserved")
    ):
        return row.memory_gib
    return row.memory_gib * framework.bytes_per_gb / GIB


def _shard_within_node(strategy: dict[str, Any], replicas: int, most: int) -> None:
    """Hybrid sharding: the largest group that stays inside a node."""
    strategy["data"]["shard"] = max(size for size in divisors(replicas) if size <= most)


SEQUENCE_PARALLEL_SINCE = 2022.05
"""When Megatron-LM got sequence parallelism and selective recomputation (2205.05198)."""


def _row_framework(row: MeasuredRow, gpu: GPU) -> FrameworkDefaults:
    said = cell_parsers.is_fused_attention(row.attention)
    fused = "fp8" in gpu.tflops if said is None else said
    sharded = row.pipeline == 1 and (row.zero or 0) >= 2
    when, rowwise = (
        cell_parsers.report_year(f"{row.source} {row.table}"),
        re.search(r"row.?wise", row.precision.lower()) is not None,
    )
    in_place = cell_parsers.says_fused_loss(f"{row.framework} {row.attention} {row.notes}")
    whole = cell_parsers.says_whole_loss(row.notes)
    sequence = bool(row.sequence_parallel) or "select" in row.recompute.lower()
    sequence = sequence or (when or 0) >= SEQUENCE_PARALLEL_SINCE
    return find_framework(row.framework, sharded, fused, when, rowwise, in_place, whole, sequence)


def _attention(row: MeasuredRow, framework: FrameworkDefaults) -> str | None:
    """The attention that a row states, where its framework usually runs another; FlashAttention
    without a number is the second, which torch has too.
    """
    said = cell_parsers.is_fused_attention(row.attention)
    generation = cell_parsers.attention_generation(row.attention)
    if said is None or (said == framework.fuses_attention and generation is None):
        return None
    return (generation or "flash-2") if said else "unfused"


def _strategy_fields(
    row: MeasuredRow, framework: FrameworkDefaults, gpu: GPU, layers: int, data: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(strategy, training, plan fields that took a default) as plain data."""
    precision = cell_parsers.narrowest_precision(row.precision) or "auto"
    if precision == "mxfp8" and precision not in gpu.tflops:
        precision = "fp8"  # the row speaks of MXFP8 on other GPUs
    if precision == "fp4" or (precision == "nvfp4" and precision not in gpu.tflops):
        raise Inexpressible("precision fp4")
    if re.search(r"opt\w*.in.bwd|optimizer.in.back", row.text):
        raise Inexpressible("optimizer steps inside backward")
    if re.search(r"footnote \d+:\s*(;|$)", row.notes):
        raise Inexpressible("options stand in a footnote that is not there")
    if re.search(r"select\w*.*\bmlp\b", row.recompute.lower()):
        raise Inexpressible("selective recomputation of the feed-forward")
    said = _stated_fields(row, layers, data)
    if attention := _attention(row, framework):
        said["strategy.attention"] = attention
    usual = {
        path: value
        for path, value in framework.defaults_of(row.model).items()
        if path not in said and _applies(path, row, framework)
    }
    _refuse_spread_experts(row, usual, data)
    plan: dict[str, Any] = {"strategy": {"precision": precision}, "training": {}}
    for path, value in {**usual, **said}.items():
        if value is not None:
            _set_path(plan, path.split("."), value)
    _make_consistent(plan["strategy"], row)
    if cell_parsers.trains_adapters(row.text):
        plan["training"]["lora"] = _lora(row, framework)
    return plan["strategy"], plan["training"], sorted(usual)


def _refuse_spread_experts(row: MeasuredRow, usual: dict[str, Any], data: int) -> None:
    """Experts over more ranks than data x context lie over tensor ranks, whole, as far as the
    framework's defaults say so.
    """
    split = usual.get("strategy.expert.tensor") or row.tensor
    if row.expert > 1 and (data * row.context * (row.tensor // split)) % row.expert:
        raise Inexpressible("experts spread over tensor ranks too")


def _stated_fields(row: MeasuredRow, layers: int, data: int) -> dict[str, Any]:
    """Plan fields that the row itself states, by dotted path."""
    words = f"{row.sharding} {row.notes} {row.table}"
    recompute = cell_parsers.recompute_kind(row.recompute, layers)
    shard = cell_parsers.shard_group_size(row.sharding)
    found: dict[str, Any] = {
        "strategy.tensor.size": row.tensor,
        "strategy.pipeline.size": row.pipeline,
        "strategy.context.size": row.context,
        "strategy.context.algorithm": "ulysses"
        if row.context > 1 and cell_parsers.says_all_to_all_context(words)
        else None,
        "strategy.expert.size": row.expert,
        "strategy.data.zero": row.zero,
        "strategy.recompute": recompute,
        "strategy.tensor.sequence": row.sequence_parallel,
        "strategy.gradient_dtype": cell_parsers.gradient_dtype(row.precision),
        "strategy.pipeline.chunks": row.chunks if row.pipeline > 1 else None,
        "strategy.data.shard": shard if shard and shard < data * row.context else None,
        "training.optimizer.moments": cell_parsers.moments_dtype(f"{row.precision} {row.notes}"),
        "training.optimizer.master": "none"
        if cell_parsers.updates_16bit_weights(row.precision)
        else None,
        "strategy.kernels": cell_parsers.kernels(f"{row.framework} {row.notes}"),
    }
    if cell_parsers.says_fused_head(f"{row.framework} {row.attention} {row.notes}"):
        found["strategy.loss"] = "fused_linear"
    if (offload := cell_parsers.offload_kind(words)) != "none":
        found["strategy.data.offload"] = offload
    if (
        cell_parsers.updates_16bit_weights(row.precision)
        and found["training.optimizer.moments"] is None
    ):
        found["training.optimizer.moments"] = "bf16"
    return {path: value for path, value in found.items() if value is not None}


def _applies(path: str, row: MeasuredRow, framework: FrameworkDefaults) -> bool:
    """Whether a default has something to act on: no sequence parallelism without tensor, no chunks
    without stages.
    """
    holds = {
        "several": num_gpus(row) != 1,
        "no pipeline": row.pipeline == 1,
        "zero-3 without a pipeline": row.pipeline == 1 and row.zero == 3,
    }
    if not holds.get(framework.conditions.get(path, ""), True):
        return False
    if path == "strategy.tensor.sequence":
        return row.tensor > 1
    if path == "strategy.expert.tensor":
        return row.tensor > 1 and is_moe(row)
    if path == "strategy.pipeline.chunks":
        return row.pipeline > 1 and "interleav" in row.schedule.lower()
    return not path.startswith(("finetune.lora", "training.global_batch", MICROBATCHES))


def _make_consistent(strategy: dict[str, Any], row: MeasuredRow) -> None:
    """The schedule that goes with the chunks, and shards and offloads that ZeRO's stage allows."""
    pipeline, data = strategy["pipeline"], strategy.setdefault("data", {})
    chunks = pipeline.get("chunks", 1)
    if pipeline["size"] > 1:
        named_as = next(
            (name for name, pattern in SCHEDULES if re.search(pattern, row.schedule.lower())),
            "1f1b",
        )
        pipeline["schedule"] = "interleaved" if chunks > 1 and named_as == "1f1b" else named_as
        if named_as == "interleaved" and chunks == 1:
            pipeline["chunks"] = 2
    if strategy["tensor"]["size"] == 1:
        strategy["tensor"].pop("sequence", None)
    zero = data.setdefault("zero", 0)
    if row.gpus == 1 and data.get(
        "offload"
    ):  # on one GPU sharding changes nothing, but says what may leave it
        zero = data["zero"] = max(zero, 3 if data["offload"] == "parameters" else 1)
    if zero == 0:
        data.pop("shard", None)
        data.pop("offload", None)
    elif data.get("offload") == "parameters" and zero < 3:
        data["offload"] = "optimizer"
    if data.get("reduce") == "microbatch" and zero < 2:
        data.pop("reduce")


def _lora(row: MeasuredRow, framework: FrameworkDefaults) -> dict[str, Any]:
    """The adapters: of the rank that the row says, else of the framework's documented one, on the
    layers on which it documents them.
    """
    targets = framework.defaults_of(row.model).get("finetune.lora.targets")
    found: dict[str, Any] = {"rank": _lora_rank(row, framework)}
    return found if targets is None else found | {"targets": str(targets).split()}


def _lora_rank(row: MeasuredRow, framework: FrameworkDefaults) -> int:
    if "qlora" in row.text or "nf4" in row.text:
        raise Inexpressible("adapters on a quantised model")
    said = re.search(r"\b(?:rank|dim|r)\s*[=: ]\s*(\d+)", row.notes.lower())
    rank = (
        cell_parsers.positive_integer(said.group(1))
        if said
        else framework.defaults_of(row.model).get("finetune.lora.rank")
    )
    if rank is None:
        raise Inexpressible("adapters of unknown rank")
    return int(rank)


def _set_path(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
    target[path[-1]] = value
