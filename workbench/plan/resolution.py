"""From a plan as people write it to a plan that says everything: catalog, preset, defaults,
legality, hashes.
"""

from __future__ import annotations

import math
import os
from typing import Any

from workbench import errors
from workbench.errors import PlanError, refuse
from workbench.machine import calibration_file, gpu_catalog
from workbench.machine.attached import attached, local_cluster
from workbench.machine.hardware import GPU, Fabric
from workbench.plan import corpus_files, schema
from workbench.plan.base_weights import adapters_sha256, base_sha256
from workbench.plan.catalog import catalog, gguf_config, huggingface_config
from workbench.plan.conversation_corpus import resolved_corpus
from workbench.plan.model import python_model_file
from workbench.plan.model.attention_kernel import decided_attention
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.model.layer_profile_file import layer_profile, pinned_profile, profiled_model
from workbench.plan.model.model_shape import Shape
from workbench.plan.preset_sizes import resolve_sizes, splits_nothing
from workbench.plan.resolved_plan import NO_SHAPE, ResolvedPlan
from workbench.plan.rules import calibration_rules, check, legal_sizes, python_model_rules
from workbench.plan.schedule_table import schedule_sha256
from workbench.plan.schema import (
    STORED,
    Cluster,
    Plan,
    Precision,
    ProfiledModel,
    PythonModel,
    Strategy,
    axis_sizes,
    build_plan,
    written_fields,
)
from workbench.plan.stage_partition import partition, profile_partition
from workbench.safe_io.gguf_files import SUFFIX

USUAL_LENGTH = 2048
"""Default tokens of a sequence, where the model takes as many."""
LEAST_BATCH = 8
MICROBATCHES_A_RANK = 4
"""Default global batch: enough microbatches for a pipeline as long as the job to keep its bubble
under a fifth.
"""


def resolve(plan: Plan) -> ResolvedPlan:
    """`plan` with every default filled and every name looked up. Raises `PlanError` naming all that
    is illegal.
    """
    model = _model(plan)
    shape = model if isinstance(model, Shape) else None
    gpu, fabric = _hardware(plan.cluster)
    cluster = _cluster(plan.cluster, gpu, fabric)
    written = written_fields(plan)
    task = written.get(plan.task_section, {})
    sequence = task.get("sequence_length", _usual_length(model))
    asked = with_preset(plan.strategy)
    if isinstance(model, PythonModel):
        python_model_rules.refuse_rules(asked, "code", "ddp, zero-1 to zero-3")
    elif isinstance(model, ProfiledModel):
        python_model_rules.refuse_rules(asked, "a layer profile", "ddp")
    where = (shape, cluster["gpus"], cluster["gpus_per_node"], sequence)
    strategy = resolve_sizes(asked, *where)
    if why := splits_nothing(asked, strategy, *where):
        raise refuse(
            "strategy.preset" if plan.strategy.preset else "strategy",
            f"{plan.strategy.preset or 'it'} {why}",
        )
    task = _task({"sequence_length": sequence, **task}, strategy, cluster["gpus"])
    filled = build_plan(
        {
            **written,
            "model": model.model_dump(),
            "cluster": cluster,
            plan.task_section: task,
            "strategy": strategy,
            "corpus": resolved_corpus(plan.corpus),
        }
    )
    result = _decided(filled, model, gpu)
    problems = [
        *check.problems(result),
        *calibration_rules.calibration_problems(result, local=plan.cluster.gpu == "local"),
    ]
    if problems:
        raise PlanError(problems)
    return result


def pin(plan: Plan) -> ResolvedPlan:
    """The resolved plan, with paths made absolute, and what they hold (corpus, calibration, custom
    schedule) named by its hash, so that the plan runs from any folder.

    Raises `PlanError` if one of them is missing or is no longer the one that the plan was resolved
    with.
    """
    full = plan.resolve()
    load, measured = full.checkpoint.load, full.cluster.calibration
    changes = _pinned_corpus(full.corpus)
    if measured is not None:
        changes |= {"cluster.calibration": _absolute(measured)}
        changes |= {"cluster.calibration_sha256": calibration_file.calibration_sha256(measured)}
    table = full.strategy.pipeline.schedule
    if table.endswith(".csv"):
        changes |= {"strategy.pipeline.schedule": _absolute(table)}
        changes |= {"strategy.pipeline.schedule_sha256": schedule_sha256(table)}
    pinned = {"model.sha256": python_model_file.pinned(full.code).sha256} if full.code else {}
    if full.profiled:
        changes |= {"model.layer_profile": _absolute(full.profiled.layer_profile)}
    changes |= {"checkpoint.load": load and _absolute(load)}
    for field, path in _finetuned_files(full):
        changes[field] = _absolute(path)
    if full.finetune and (base := full.finetune.base):
        found, pinned_base = base_sha256(_absolute(base)), full.finetune.base_sha256
        _expect("finetune.base_sha256", pinned_base, found, f"weights {pinned_base}, '{base}'")
        changes["finetune.base_sha256"] = found
    if full.lora and (initial := full.lora.initial):
        found, given = adapters_sha256(_absolute(initial)), full.lora.initial_sha256
        _expect("finetune.lora.initial_sha256", given, found, f"adapters {given}, '{initial}'")
        changes["finetune.lora.initial_sha256"] = found
    return full.with_fields(**changes, **pinned)


def _finetuned_files(plan: ResolvedPlan) -> list[tuple[str, str]]:
    """(field, path) of what fine-tuning starts from."""
    tune = plan.finetune
    found = (
        ("finetune.base", tune and tune.base),
        ("finetune.lora.initial", plan.lora and plan.lora.initial),
    )
    return [(field, path) for field, path in found if path]


def _pinned_corpus(corpus: schema.Corpus) -> dict[str, Any]:
    """Changes that name the corpus's files by absolute path and hash."""
    hashes = [corpus_files.corpus_sha256(one) for one in corpus_files.source_files(corpus)]
    found = hashes[0]
    changes: dict[str, Any] = {}
    if corpus.mix is None:
        changes["corpus.source"] = _absolute_source(corpus.source)
    else:
        found = corpus_files.mixed_sha256(hashes)
        changes["corpus.mix"] = [
            {**part.model_dump(), "source": _absolute_source(part.source), "sha256": sha256}
            for part, sha256 in zip(corpus.mix, hashes, strict=True)
        ]
    _expect("corpus.sha256", corpus.sha256, found, f"text {corpus.sha256}, '{corpus.source}'")
    changes["corpus.sha256"] = found
    if tokenizer := corpus_files.tokenizer_path(corpus):
        sha256 = corpus_files.file_sha256(tokenizer, "corpus.tokenizer").hex()
        named = f"tokenizer {corpus.tokenizer_sha256}, '{tokenizer}'"
        _expect("corpus.tokenizer_sha256", corpus.tokenizer_sha256, sha256, named)
        changes["corpus.tokenizer"] = _absolute(str(tokenizer))
        changes["corpus.tokenizer_sha256"] = sha256
    if template := corpus_files.template_path(corpus):
        sha256 = corpus_files.file_sha256(template, "corpus.template").hex()
        named = f"template {corpus.template_sha256}, '{template}'"
        _expect("corpus.template_sha256", corpus.template_sha256, sha256, named)
        changes["corpus.template"] = _absolute(str(template))
        changes["corpus.template_sha256"] = sha256
    return changes


def _expect(field: str, pinned: str | None, found: str, named: str) -> None:
    if pinned not in (None, found):
        raise refuse(
            field,
            f"the plan was resolved with {named} now holds {found}; remove the field to train on "
            "what is there",
        )


def _absolute_source(source: str) -> str:
    return source if source == "stdlib" else _absolute(source)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _model(plan: Plan) -> Shape | PythonModel | ProfiledModel:
    """What the plan's `model` names, looked up; a layer profile by its hash."""
    if plan.code:
        return plan.code
    profiled = profiled_model(plan.model)
    return pinned_profile(profiled) if profiled else model_shape(plan.model)


def _usual_length(model: Shape | PythonModel | ProfiledModel) -> int:
    """Sequence length of a plan that does not say it; a layer profile's own."""
    if isinstance(model, ProfiledModel):
        return layer_profile(model).sequence_length or USUAL_LENGTH
    return min(USUAL_LENGTH, model.max_positions) if isinstance(model, Shape) else USUAL_LENGTH


def model_shape(model: str | Shape | PythonModel | ProfiledModel) -> Shape:
    """The shape that a plan's `model` means: itself, a catalog entry, a Hugging Face
    config.json, or a GGUF file.
    """
    if isinstance(model, Shape):
        return model
    if isinstance(model, PythonModel):
        raise refuse(
            "model.python",
            f"'{model.python}' is code, so its shape is not known; legal: a catalog name, a "
            "shape, a config.json",
        )
    if profiled := profiled_model(model):
        raise refuse("model", f"'{profiled.layer_profile}' {NO_SHAPE}")
    assert isinstance(model, str)
    if model in catalog.models():
        return catalog.models()[model].shape
    if model.endswith(SUFFIX):
        return gguf_config.read_gguf_config(model)
    if model.endswith(".json") or os.path.isdir(model):
        return huggingface_config.read_huggingface_config(model)
    raise errors.unknown_name("model", model, catalog.models())


def with_preset(strategy: Strategy) -> dict[str, Any]:
    """The strategy as plain data: the preset's fields, overridden by those written beside it; rules
    unresolved.
    """
    written = strategy.model_dump(exclude_unset=True)
    if strategy.preset is None:
        return written
    if strategy.preset not in catalog.strategies():
        raise errors.unknown_name("strategy.preset", strategy.preset, catalog.strategies())
    return _merged(catalog.strategies()[strategy.preset].strategy, written)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = _merged(base[key], value) if both else value
    return result


def _hardware(cluster: Cluster) -> tuple[GPU, Fabric]:
    if cluster.gpu == "local":
        gpu, fabric = local_cluster(attached(), cluster.gpus)
    elif isinstance(cluster.gpu, GPU):
        gpu, fabric = cluster.gpu, _usual_fabric(cluster.gpu)
    elif cluster.gpu in gpu_catalog.gpus():
        entry = gpu_catalog.gpus()[cluster.gpu]
        gpu, fabric = entry.gpu, gpu_catalog.clusters()[entry.fabric]
    else:
        raise errors.unknown_name("cluster.gpu", cluster.gpu, ["local", *gpu_catalog.gpus()])
    if isinstance(cluster.fabric, Fabric):
        return gpu, cluster.fabric
    if cluster.fabric is not None:
        if cluster.fabric not in gpu_catalog.clusters():
            raise errors.unknown_name("cluster.fabric", cluster.fabric, gpu_catalog.clusters())
        fabric = gpu_catalog.clusters()[cluster.fabric]
    return gpu, fabric


def _usual_fabric(gpu: GPU) -> Fabric:
    entry = gpu_catalog.gpus().get(gpu.name)
    return gpu_catalog.clusters()[entry.fabric if entry else gpu_catalog.default_fabric()]


def _cluster(cluster: Cluster, gpu: GPU, fabric: Fabric) -> dict[str, Any]:
    """The cluster as plain data, nodes and GPUs a node filled in from each other."""
    gpus, nodes, per_node = cluster.gpus, cluster.nodes, cluster.gpus_per_node
    if per_node is None:
        per_node = math.ceil(gpus / (nodes or _even_nodes(gpus, fabric.gpus_per_node)))
    return {
        "gpu": gpu.model_dump(),
        "gpus": gpus,
        "gpus_per_node": per_node,
        "nodes": nodes or math.ceil(gpus / per_node),
        "fabric": fabric.model_dump(),
        "calibration": cluster.calibration,
        "calibration_sha256": cluster.calibration_sha256,
    }


def _even_nodes(gpus: int, most: int) -> int:
    """Nodes that hold the same number of GPUs each: the fewest, or up to twice as many if those
    come out even.
    """
    fewest = math.ceil(gpus / most)
    return next((nodes for nodes in range(fewest, 2 * fewest + 1) if gpus % nodes == 0), fewest)


def _task(written: dict[str, Any], strategy: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The batch filled in: a micro-batch of one sequence, of one pair, or as many as a tensor grid
    or the replicas of a stage split it into.
    """
    result, tensor = dict(written), strategy.get("tensor", {})
    if (parts := legal_sizes.token_parts(tensor.get("algorithm", "1d"), tensor.get("size", 1))) > 1:
        result.setdefault("micro_batch", parts)
    pipeline = strategy.get("pipeline", {})
    if (replicas := pipeline.get("replicas")) and pipeline.get("distribution") != "round_robin":
        result.setdefault("micro_batch", max(replicas))
    if result.get("preference") is not None:
        result.setdefault("micro_batch", 2)
    batch = MICROBATCHES_A_RANK * gpus * result.get("micro_batch", 1)
    result.setdefault("global_batch", max(LEAST_BATCH, batch))
    return result


def _decided(plan: Plan, model: Shape | PythonModel | ProfiledModel, gpu: GPU) -> ResolvedPlan:
    """`plan` with `auto` values decided and every field written out."""
    shape = model if isinstance(model, Shape) else None
    profile = layer_profile(model) if isinstance(model, ProfiledModel) else None
    data, asked = plan.model_dump(), plan.strategy
    if plan.lora:
        data["finetune"]["lora"] = plan.lora.model_dump()
    strategy, pipeline = data["strategy"], data["strategy"]["pipeline"]
    length = plan.task.sequence_length
    strategy["precision"] = _precision(asked.precision, gpu, profile)
    strategy["gradient_dtype"] = _gradient_dtype(plan, strategy["precision"])
    if shape and asked.attention == "auto" and asked.stack == "workbench":
        documents = plan.corpus.separate_documents
        kernel = decided_attention(gpu, strategy["precision"], shape, length, documents)
        strategy["attention"] = kernel
    stages = asked.pipeline.size * asked.pipeline.chunks
    rule = pipeline["partition"]
    found: str | list[int] = [1] * stages  # a model that is code is cut where it is traced
    if shape:
        found = partition(shape, rule, stages, length, pipeline["replicas"])
    elif profile:
        found = profile_partition(profile, rule, stages, _pace(plan, stages))
    pipeline["partition"] = found if isinstance(found, list) else []
    data["name"] = plan.name or _name(plan, model, gpu)
    full = ResolvedPlan.model_validate(data)
    return full if isinstance(found, list) else _unpartitioned(full, rule)


def _unpartitioned(plan: ResolvedPlan, rule: str) -> ResolvedPlan:
    """`plan` with the rule that no layers can follow, so that the check of it names that rule."""
    pipeline = plan.strategy.pipeline.model_copy(update={"partition": rule})
    strategy = plan.strategy.model_copy(update={"pipeline": pipeline})
    return plan.model_copy(update={"strategy": strategy})


def _pace(plan: Plan, stages: int) -> list[int] | None:
    """Sequences of a microbatch that the busiest replica of each stage has; None where all stages
    have as many.
    """
    replicas = plan.strategy.pipeline.replicas
    if replicas is None or len(replicas) != stages:
        return None
    return [-(-plan.task.micro_batch // count) for count in replicas]


def _name(plan: Plan, model: Shape | PythonModel | ProfiledModel, gpu: GPU) -> str:
    name = model.python.rpartition(":")[2] if isinstance(model, PythonModel) else model.name
    asked = plan.strategy
    kernels = "" if asked.kernels == "eager" else f", {asked.kernels}"
    return f"{name} on {plan.world_size} {gpu.name}, {asked.preset or 'custom'}{kernels}"


def _precision(asked: Precision, gpu: GPU, profile: LayerProfile | None) -> str:
    """`auto`: bf16 where the GPU has it, else fp16; fp32 on CPU ranks, which emulate 16 bits; of a
    layer profile its own, fp32 where it says none, as published ones.
    """
    if asked != "auto":
        return asked
    if profile:
        return profile.precision or "fp32"
    if gpu.device == "cpu":
        return "fp32"
    return next((dtype for dtype in ("bf16", "fp16") if dtype in gpu.tflops), "fp32")


def _gradient_dtype(plan: Plan, precision: str) -> str:
    """`auto`: fp32 where gradients of several microbatches add up; the parameters' dtype otherwise
    and under ZeRO.
    """
    parameters = STORED.get(precision, precision)
    asked, task = plan.strategy, plan.task
    wanted = asked.gradient_dtype
    if wanted == "auto":
        replicas = axis_sizes(asked, plan.world_size)["data"]
        microbatches = task.global_batch // (task.micro_batch * replicas)
        adds_up = microbatches > 1 or asked.pipeline.size > 1
        wanted = "fp32" if adds_up and asked.data.zero == 0 else "parameters"
    return parameters if wanted == "parameters" else wanted


Plan.resolver, Plan.pinner = staticmethod(resolve), staticmethod(pin)
