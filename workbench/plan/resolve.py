"""From a plan as people write it to a plan that says everything: catalog, preset, defaults,
legality, hashes.
"""

from __future__ import annotations

import math
import os
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.machine import calibration_file
from workbench.machine.attached import attached, local_cluster
from workbench.plan import corpus_files, python_model_file
from workbench.plan.catalog import catalog, huggingface_config
from workbench.plan.custom_schedule import digest
from workbench.plan.model_shape import Shape
from workbench.plan.plan_files import build, plain
from workbench.plan.preset_sizes import resolve_sizes, splits_nothing
from workbench.plan.rules import check, legal_sizes, python_model_rules
from workbench.plan.schema import STORED, Card, Cluster, Fabric, Plan, PythonModel, Strategy
from workbench.plan.stage_partition import partition

LEAST_BATCH = 8
MICROBATCHES_A_RANK = 4
"""Default global batch: enough microbatches for a pipeline as long as the job to keep its bubble
under a fifth.
"""


def complete(plan: Plan) -> Plan:
    """`plan` with every default filled and every name looked up. Raises `PlanError` naming all that
    is illegal.
    """
    shape = None if plan.code else model_shape(plan.model)
    card, fabric = _hardware(plan.cluster)
    cluster = _cluster(plan.cluster, card, fabric)
    written = plain(plan)
    sequence = written.get("training", {}).get(
        "sequence_length", min(2048, shape.max_positions if shape else 2048)
    )
    asked = with_preset(plan.strategy)
    if shape is None:
        python_model_rules.refuse_rules(asked)
    where = (shape, cluster["gpus"], cluster["gpus_per_node"], sequence)
    strategy = resolve_sizes(asked, *where)
    if why := splits_nothing(asked, strategy, *where):
        raise refuse(
            "strategy.preset" if plan.strategy.preset else "strategy",
            f"{plan.strategy.preset or 'it'} {why}",
        )
    training = _training(
        {"sequence_length": sequence, **written.get("training", {})}, strategy, cluster["gpus"]
    )
    model = plan.code or shape
    assert isinstance(model, PythonModel | Shape)
    filled = build(
        {
            **written,
            "model": model.model_dump(),
            "cluster": cluster,
            "training": training,
            "strategy": strategy,
        }
    )
    result = _settled(filled)
    problems = [
        *check.problems(result),
        *calibration_file.problems(result, local=plan.cluster.gpu == "local"),
    ]
    if problems:
        raise PlanError(problems)
    return result


def resolved(plan: Plan) -> Plan:
    """`complete()`, paths made absolute, and what they hold (corpus, calibration, drawn schedule)
    named by its hash, so that the plan runs from any folder.

    Raises `PlanError` if one of them is missing or is no longer the one that the plan was resolved
    with.
    """
    full = complete(plan)
    source, load, measured = full.corpus.source, full.checkpoint.load, full.cluster.calibration
    found = corpus_files.digest(source)
    if full.corpus.sha256 not in (None, found):
        raise refuse(
            "corpus.sha256",
            f"the plan was resolved with text {full.corpus.sha256}, "
            f"'{source}' "
            f"now holds {found}; remove the field to train on what is there",
        )
    changes = {
        "corpus.sha256": found,
        "corpus.source": source if source == "stdlib" else _absolute(source),
    }
    if measured is not None:
        changes |= {"cluster.calibration": _absolute(measured)}
        changes |= {"cluster.calibration_sha256": calibration_file.digest(measured)}
    table = full.strategy.pipeline.schedule
    if table.endswith(".csv"):
        changes |= {"strategy.pipeline.schedule": _absolute(table)}
        changes |= {"strategy.pipeline.schedule_sha256": digest(table)}
    pinned = {"model.sha256": python_model_file.pinned(full.code).sha256} if full.code else {}
    return full.replace(**changes, **pinned, **{"checkpoint.load": load and _absolute(load)})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def model_shape(model: str | Shape | PythonModel) -> Shape:
    """The shape that a plan's `model` means: itself, a catalog entry, or a Hugging Face
    config.json.
    """
    if isinstance(model, Shape):
        return model
    if isinstance(model, PythonModel):
        raise refuse(
            "model.python",
            f"'{model.python}' is code, so its shape is not known; "
            f"legal: a catalog name, a "
            "shape, a config.json",
        )
    if model in catalog.models():
        return catalog.models()[model].shape
    if model.endswith(".json") or os.path.isdir(model):
        return huggingface_config.read(model)
    raise catalog.unknown("model", model, catalog.models())


def with_preset(strategy: Strategy) -> dict[str, Any]:
    """The strategy as plain data: the preset's fields, overridden by those written beside it; rules
    unresolved.
    """
    written = strategy.model_dump(exclude_unset=True)
    if strategy.preset is None:
        return written
    if strategy.preset not in catalog.strategies():
        raise catalog.unknown("strategy.preset", strategy.preset, catalog.strategies())
    return _merged(catalog.strategies()[strategy.preset].strategy, written)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = _merged(base[key], value) if both else value
    return result


def _hardware(cluster: Cluster) -> tuple[Card, Fabric]:
    if cluster.gpu == "local":
        card, fabric = local_cluster(attached(), cluster.gpus)
    elif isinstance(cluster.gpu, Card):
        card, fabric = cluster.gpu, _usual_fabric(cluster.gpu)
    elif cluster.gpu in catalog.gpus():
        entry = catalog.gpus()[cluster.gpu]
        card, fabric = entry.card, catalog.clusters()[entry.fabric]
    else:
        raise catalog.unknown("cluster.gpu", cluster.gpu, ["local", *catalog.gpus()])
    if isinstance(cluster.fabric, Fabric):
        return card, cluster.fabric
    if cluster.fabric is not None:
        if cluster.fabric not in catalog.clusters():
            raise catalog.unknown("cluster.fabric", cluster.fabric, catalog.clusters())
        fabric = catalog.clusters()[cluster.fabric]
    return card, fabric


def _usual_fabric(card: Card) -> Fabric:
    entry = catalog.gpus().get(card.name)
    return catalog.clusters()[entry.fabric if entry else catalog.default_fabric()]


def _cluster(cluster: Cluster, card: Card, fabric: Fabric) -> dict[str, Any]:
    """The cluster as plain data, nodes and cards a node filled in from each other."""
    gpus, nodes, per_node = cluster.gpus, cluster.nodes, cluster.gpus_per_node
    if per_node is None:
        per_node = math.ceil(gpus / (nodes or _even_nodes(gpus, fabric.gpus_per_node)))
    return {
        "gpu": card.model_dump(),
        "gpus": gpus,
        "gpus_per_node": per_node,
        "nodes": nodes or math.ceil(gpus / per_node),
        "fabric": fabric.model_dump(),
        "calibration": cluster.calibration,
        "calibration_sha256": cluster.calibration_sha256,
    }


def _even_nodes(gpus: int, most: int) -> int:
    """Nodes that hold the same number of cards each: the fewest, or up to twice as many if those
    come out even.
    """
    fewest = math.ceil(gpus / most)
    return next((nodes for nodes in range(fewest, 2 * fewest + 1) if gpus % nodes == 0), fewest)


def _training(written: dict[str, Any], strategy: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The batch filled in: a micro-batch of one sequence, or as many as a tensor grid splits it
    into.
    """
    result, tensor = dict(written), strategy.get("tensor", {})
    if (parts := legal_sizes.token_parts(tensor.get("algorithm", "1d"), tensor.get("size", 1))) > 1:
        result.setdefault("micro_batch", parts)
    batch = MICROBATCHES_A_RANK * gpus * result.get("micro_batch", 1)
    if replicas := strategy.get("pipeline", {}).get("replicas"):
        batch *= math.lcm(*replicas)
    result.setdefault("global_batch", max(LEAST_BATCH, batch))
    return result


def _settled(plan: Plan) -> Plan:
    """`plan` with `auto` values decided and every field written out."""
    data = plan.model_dump()
    strategy, pipeline = data["strategy"], data["strategy"]["pipeline"]
    strategy["precision"] = _precision(plan)
    strategy["gradient_dtype"] = _gradient_dtype(plan, strategy["precision"])
    stages = plan.strategy.pipeline.size * plan.strategy.pipeline.chunks
    pipeline["partition"] = (
        [1]
        if plan.code
        else partition(
            plan.shape,
            pipeline["partition"],
            stages,
            plan.training.sequence_length,
            pipeline["replicas"],
        )
    )
    if not plan.name:
        model, preset = plan.model_name.rpartition(":")[2], strategy["preset"] or "custom"
        kernels = "" if plan.strategy.kernels == "eager" else f", {plan.strategy.kernels}"
        data["name"] = f"{model} on {plan.world_size} {plan.card.name}, {preset}{kernels}"
    return build(data)


def _precision(plan: Plan) -> str:
    """`auto`: bf16 where the card has it, else fp16; fp32 on CPU ranks, which emulate 16-bit
    arithmetic.
    """
    if plan.strategy.precision != "auto":
        return plan.strategy.precision
    if plan.card.device == "cpu":
        return "fp32"
    return next((dtype for dtype in ("bf16", "fp16") if dtype in plan.card.tflops), "fp32")


def _gradient_dtype(plan: Plan, precision: str) -> str:
    """`auto`: fp32 where gradients of several microbatches add up; the parameters' dtype otherwise
    and under ZeRO.
    """
    parameters = STORED.get(precision, precision)
    wanted = plan.strategy.gradient_dtype
    if wanted == "auto":
        adds_up = plan.num_microbatches > 1 or plan.strategy.pipeline.size > 1
        wanted = "fp32" if adds_up and plan.strategy.data.zero == 0 else "parameters"
    return parameters if wanted == "parameters" else wanted
