"""Whether a plan is legal: decided here, once, for every instrument.

Each rule yields every problem it finds, with the field, the numbers and the nearest legal values. A
plan that is legal need not fit its GPUs, and need not be something that this version can run:
`support` says that.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import PlanError, Problem
from workbench.machine import gpu_catalog
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import layer_profile_rules, legal_sizes, python_model_rules
from workbench.plan.rules.strategy import axis_rules, kernel_rules, recompute_rules
from workbench.plan.rules.task import (
    conversation_rules,
    finetune_rules,
    four_bit_rules,
    preference_rules,
)
from workbench.plan.rules.task.task_words import in_words_of_task
from workbench.plan.schema import NARROW, STORED, Plan
from workbench.untrusted_text import shown

BYTES = 256
"""Vocabulary that byte-level tokens need."""


def check(plan: Plan) -> list[Problem]:
    """All that is illegal in `plan`, which may be short or complete; empty if it is legal."""
    try:
        plan.resolve()
    except PlanError as error:
        return error.problems
    return []


def problems(plan: ResolvedPlan) -> list[Problem]:
    """All that is illegal in a plan whose names are looked up and defaults filled."""
    broken = [*(_shape(plan) if isinstance(plan.model, Shape) else []), *_cluster(plan)]
    if broken:
        return broken  # sizes mean nothing on a shape or a cluster that cannot exist
    rules = (
        *axis_rules.RULES,
        _batch,
        _sequence,
        _precision,
        kernel_rules.problems,
        recompute_rules.problems,
        _documents,
        _training,
        finetune_rules.problems,
        four_bit_rules.problems,
        _corpus,
        preference_rules.problems,
        conversation_rules.problems,
    )
    if plan.code:
        rules = (
            *axis_rules.WITHOUT_SHAPE,
            *python_model_rules.RULES,
            _batch,
            _precision,
            _documents,
            _training,
            four_bit_rules.problems,
            _corpus,
            conversation_rules.problems,
        )
    if plan.profiled:
        own = (*axis_rules.OF_LAYERS, *layer_profile_rules.RULES)
        rules = (*own, _batch, _precision, _documents, _training, four_bit_rules.problems)
    return in_words_of_task((problem for rule in rules for problem in rule(plan)), plan)


def _shape(plan: ResolvedPlan) -> Iterator[Problem]:
    shape = plan.shape
    yield from _heads(shape)
    yield from _rope_scaling(shape)
    yield from _latent_attention(shape)
    yield from _expert_groups(shape)
    yield from _norms(plan, shape)
    if shape.moe and shape.moe.top_k > shape.moe.experts:
        yield Problem(
            "model.moe.top_k",
            f"is {shape.moe.top_k} of {shape.moe.experts} experts; legal: 1 to {shape.moe.experts}",
        )
    if shape.moe and shape.moe.renormalise and shape.moe.top_k == 1:
        yield Problem(
            "model.moe.renormalise",
            "is true with top_k 1: the only gate would always be 1, and the router "
            "learn nothing from the loss; legal: false",
        )
    if shape.mtp_layers >= shape.layers:
        yield Problem(
            "model.mtp_layers",
            f"is {shape.mtp_layers} of {shape.layers} layers; legal: 0 to {shape.layers - 1}",
        )
    if shape.moe and shape.moe.first_dense > shape.layers:
        yield Problem(
            "model.moe.first_dense",
            f"is {shape.moe.first_dense} of {shape.layers} layers; legal: 0 to {shape.layers}",
        )


def _heads(shape: Shape) -> Iterator[Problem]:
    if shape.mla is None and shape.heads % int(shape.kv_heads or 1):
        near = legal_sizes.near(int(shape.kv_heads or 1), legal_sizes.divisors(shape.heads))
        yield Problem(
            "model.kv_heads",
            f"{shape.kv_heads} does not divide heads = {shape.heads}; legal: {near}",
        )
    width = shape.mla.rope_dim if shape.mla else int(shape.head_dim or 0)
    field = "model.mla.rope_dim" if shape.mla else "model.head_dim"
    if (rotated := shape.rotary_dim) is not None:
        yield from _rotary_dim(shape, rotated)
        return
    if shape.positions == "rope" and width % 2:
        yield Problem(
            field, f"is {width}, and rotary positions turn pairs; legal: {width - 1}, {width + 1}"
        )


def _norms(plan: ResolvedPlan, shape: Shape) -> Iterator[Problem]:
    if shape.zero_centered_norms and shape.norm != "rmsnorm":
        yield Problem("model.zero_centered_norms", f"is true with norm '{shape.norm}'; legal: null")
    ranks = plan.strategy.tensor.ranks
    if shape.qk_norm == "width" and ranks > int(shape.kv_heads or 0):
        yield Problem(
            "model.qk_norm",
            f"is 'width' on {ranks} tensor ranks, of which several would hold one of "
            f"{shape.kv_heads} key-value heads; legal: strategy.tensor.size up to {shape.kv_heads}",
        )
    if shape.window_rope_theta and (shape.window is None or shape.positions != "rope"):
        yield Problem(
            "model.window_rope_theta",
            f"is {shape.window_rope_theta:g} with window {shape.window} and positions "
            f"'{shape.positions}'; legal: null, or a window and 'rope'",
        )
    beside = "parallel_residual" if shape.parallel_residual else "mla" if shape.mla else None
    if shape.branch_norms and beside:
        yield Problem(
            "model.branch_norms", f"is '{shape.branch_norms}' beside model.{beside}; legal: null"
        )


def _latent_attention(shape: Shape) -> Iterator[Problem]:
    mla = shape.mla
    if mla is None:
        return
    for name, value, legal in (
        ("positions", shape.positions, "rope"),
        ("qk_norm", shape.qk_norm, None),
        ("rotary_dim", shape.rotary_dim, None),
    ):
        if value != legal:
            yield Problem(
                f"model.{name}", f"is {value!r} beside model.mla; legal: {legal or 'null'}"
            )
    if mla.value_dim > mla.query_dim:
        yield Problem(
            "model.mla.value_dim",
            f"is {mla.value_dim}, wider than a query head, nope_dim {mla.nope_dim} + rope_dim "
            f"{mla.rope_dim}; legal: up to {mla.query_dim}",
        )


def _expert_groups(shape: Shape) -> Iterator[Problem]:
    moe = shape.moe
    if moe is None:
        return
    if (moe.groups is None) != (moe.top_groups is None):
        yield Problem(
            "model.moe.top_groups",
            f"is {moe.top_groups} with groups {moe.groups}; legal: both, or neither",
        )
    if moe.groups is None or moe.top_groups is None:
        return
    least = 2 if moe.score_bias else 1
    if moe.experts % moe.groups or moe.experts < least * moe.groups:
        legal = [n for n in legal_sizes.divisors(moe.experts) if moe.experts >= least * n]
        yield Problem(
            "model.moe.groups",
            f"is {moe.groups} of {moe.experts} experts; legal: "
            f"{legal_sizes.near(moe.groups, legal)}, each of {least} or more",
        )
        return
    size = moe.experts // moe.groups
    first = -(-moe.top_k // size)
    if not first <= moe.top_groups <= moe.groups:
        yield Problem(
            "model.moe.top_groups",
            f"is {moe.top_groups} of {moe.groups} groups of {size} experts, top_k {moe.top_k}; "
            f"legal: {first} to {moe.groups}",
        )


def _rotary_dim(shape: Shape, rotated: int) -> Iterator[Problem]:
    most = int(shape.head_dim or 0)
    if shape.positions != "rope" or shape.mla is not None:
        what = "model.mla" if shape.mla else f"positions '{shape.positions}'"
        yield Problem("model.rotary_dim", f"is {rotated} with {what}; legal: null")
    elif rotated % 2 or rotated > most:
        near = min(rotated - rotated % 2 or 2, most - most % 2)
        yield Problem(
            "model.rotary_dim",
            f"is {rotated}, and rotary positions turn pairs of a head's {most} entries; "
            f"legal: {near}",
        )


def _rope_scaling(shape: Shape) -> Iterator[Problem]:
    if shape.rope_scaling is None:
        return
    kind = shape.rope_scaling.type
    if shape.positions != "rope":
        yield Problem(
            "model.rope_scaling", f"is set with positions '{shape.positions}'; legal: null"
        )
    if kind == "dynamic" and int(shape.head_dim or 0) <= 2:
        yield Problem(
            "model.head_dim",
            f"is {shape.head_dim}, too few for rope_scaling of type 'dynamic'; legal: 4 or more",
        )
    if kind == "yarn" and shape.rope_theta <= 1:
        yield Problem(
            "model.rope_theta",
            f"is {shape.rope_theta:g} with rope_scaling of type 'yarn'; legal: above 1",
        )


def _cluster(plan: ResolvedPlan) -> Iterator[Problem]:
    c, most = plan.cluster, plan.fabric.gpus_per_node
    nodes, per_node = int(c.nodes or 1), int(c.gpus_per_node or 1)
    if per_node > most:
        yield Problem(
            "cluster.gpus_per_node",
            f"is {per_node}, but a node of fabric {plan.fabric.name} "
            f"has {most} GPUs; legal: 1 to {most}",
        )
    if nodes * per_node != c.gpus:
        whole = [n * per_node for n in range(max(1, c.gpus // per_node), c.gpus // per_node + 2)]
        yield Problem(
            "cluster.gpus",
            f"is {c.gpus}, but {nodes} nodes x {per_node} GPUs = {nodes * per_node}; every "
            f"node holds the same number; legal: {legal_sizes.near(c.gpus, whole)}",
        )
    yield from _racks(plan)


def _racks(plan: ResolvedPlan) -> Iterator[Problem]:
    """Racks that a plan describes itself are full; of a site's in the catalog, a job may take
    part.
    """
    fabric, nodes = plan.fabric, int(plan.cluster.nodes or 1)
    known = fabric == gpu_catalog.clusters().get(fabric.name)
    if not fabric.rack_nodes or known or nodes <= fabric.rack_nodes:
        return
    if nodes % fabric.rack_nodes:
        near = legal_sizes.near(fabric.rack_nodes, legal_sizes.divisors(nodes))
        yield Problem(
            "cluster.fabric.rack_nodes",
            f"is {fabric.rack_nodes}, which does not divide {nodes} nodes into full racks; "
            f"legal: null, {near}, {nodes} or more",
        )


def _batch(plan: ResolvedPlan) -> Iterator[Problem]:
    t, data = plan.training, plan.sizes["data"]
    unit = t.micro_batch * data
    if t.global_batch % unit:
        below = t.global_batch // unit * unit
        near = ", ".join(str(batch) for batch in (below, below + unit) if batch)
        yield Problem(
            "training.global_batch",
            f"is {t.global_batch}, not a multiple of micro-batch {t.micro_batch} x "
            f"data-parallel size {data} = {unit}; legal: {near}",
        )


def _sequence(plan: ResolvedPlan) -> Iterator[Problem]:
    length, most = plan.training.sequence_length, plan.shape.max_positions
    if plan.shape.positions == "learned" and length > most:
        yield Problem(
            "training.sequence_length",
            f"is {length}, but model {plan.shape.name} has a table of {most} "
            f"learned positions; legal: 1 to {most}",
        )


def _precision(plan: ResolvedPlan) -> Iterator[Problem]:
    s, has = plan.strategy, list(plan.gpu.tflops)
    if plan.gpu.device != "cpu" and s.precision not in ("fp32", *has):
        legal_names = ", ".join(
            dtype for dtype in ("fp32", "tf32", "bf16", "fp16", *NARROW) if dtype in ("fp32", *has)
        )
        yield Problem(
            "strategy.precision",
            f"is {s.precision}, which {plan.gpu.name} does not have; legal: {legal_names}",
        )
    if plan.gpu.device == "cpu" and s.precision in ("tf32", *NARROW):
        yield Problem(
            "strategy.precision",
            f"is {s.precision}, which CPU ranks do not have; legal: fp32, bf16, fp16",
        )
    parameters = STORED.get(s.precision, s.precision)
    if s.gradient_dtype not in ("fp32", parameters):
        kinds = " or ".join(dict.fromkeys(("fp32", parameters)))
        yield Problem(
            "strategy.gradient_dtype",
            f"is {s.gradient_dtype} with precision {s.precision}; legal: {kinds}",
        )


def _training(plan: Plan) -> Iterator[Problem]:
    t = plan.training
    if t.optimizer.warmup_steps > t.steps:
        yield Problem(
            "training.optimizer.warmup_steps",
            f"is {t.optimizer.warmup_steps}, more than training.steps = "
            f"{t.steps}; legal: 0 to {t.steps}",
        )
    if t.evaluation.every and plan.corpus.holdout == 0:
        yield Problem(
            "corpus.holdout",
            "is 0, so training.evaluation.every = "
            f"{t.evaluation.every} has no text to read; legal: above 0 and below 1, e.g. 0.05",
        )


def _documents(plan: ResolvedPlan) -> Iterator[Problem]:
    """Why documents of a packed sequence cannot be separated."""
    if plan.corpus.separate_documents and (why := _undivided_documents(plan)):
        field = "packing" if plan.corpus.packing else "separate_documents"
        yield Problem(f"corpus.{field}", f"is true, and {why}")


def _undivided_documents(plan: ResolvedPlan) -> str | None:
    s = plan.strategy
    if plan.code or plan.profiled:
        what = "is code" if plan.code else "is a layer profile"
        return f"{plan.model_name} {what}, whose attention is its own; legal: false"
    if s.stack != "workbench":
        return f"strategy.stack is {s.stack}, whose attention is its own; legal: false"
    if s.operators or s.tensor.algorithm != "1d":
        beside = "strategy.operators" if s.operators else f"tensor.algorithm '{s.tensor.algorithm}'"
        return f"{beside} may split sequences among ranks; legal: tensor.algorithm '1d', or false"
    scaling = plan.shape.rope_scaling
    if scaling is not None and scaling.type == "dynamic":
        return (
            "model.rope_scaling of type 'dynamic' follows the length of one document; legal: "
            "another type, or false"
        )
    return None


def _corpus(plan: ResolvedPlan) -> Iterator[Problem]:
    if plan.vocab < BYTES:
        yield Problem("model.vocab", f"is {plan.vocab}, too few for bytes; legal: at least {BYTES}")
    name = plan.corpus.tokenizer
    if name not in ("bytes", "bpe") and not name.endswith((".json", ".gguf")) and "/" not in name:
        yield Problem(
            "corpus.tokenizer",
            f"is {shown(name)}; legal: bytes, bpe, or the path of a tokenizer.json or a GGUF file",
        )
    if name in ("bytes", "bpe") and plan.corpus.end_of_text is not None:
        yield Problem(
            "corpus.end_of_text",
            f"is {shown(plan.corpus.end_of_text)}, and {name} has one end of text, token 0; legal: "
            "none, or corpus.tokenizer = a tokenizer.json",
        )
