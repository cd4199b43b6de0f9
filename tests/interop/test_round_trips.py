"""There and back: what a format can say survives, and what it cannot is named, whatever the
plan.
"""

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.foreign_keys import flat
from workbench.interop.megatron.argument_words import flags
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan, build_plan, written_fields
from workbench.safe_io import yaml_files

SAMPLES = Path(__file__).parent / "foreign"
GPU_NAME = "h100-sxm-80gb"
AXES = ("strategy.tensor.size", "strategy.context.size")
BATCH = ("training.global_batch", "training.micro_batch")
ADAM = tuple(
    f"training.optimizer.{field}"
    for field in (
        "name",
        "learning_rate",
        "beta1",
        "beta2",
        "epsilon",
        "weight_decay",
        "warmup_steps",
        "decay",
        "clip",
    )
)
SHAPE = tuple(
    f"model.{field}"
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "norm",
        "biases",
        "tied",
        "window",
        "moe",
    )
)
ALWAYS_SAID = {
    "deepspeed": (
        "cluster.gpus",
        *AXES,
        "strategy.pipeline.size",
        "strategy.data.zero",
        "strategy.data.offload",
        "strategy.gradient_dtype",
        *BATCH,
        *ADAM,
    ),
    "megatron": (
        "cluster.gpus",
        *AXES,
        "strategy.pipeline.size",
        "strategy.pipeline.chunks",
        "strategy.pipeline.partition",
        "strategy.data.zero",
        "strategy.expert.size",
        *BATCH,
        *ADAM,
        *SHAPE,
        "strategy.gradient_dtype",
        "training.sequence_length",
        "training.steps",
        "training.seed",
        "training.optimizer.final_ratio",
        "training.optimizer.moments",
        "checkpoint.every",
    ),
    "torchtitan": (
        "cluster.gpus",
        *AXES,
        "strategy.pipeline.size",
        "strategy.expert.size",
        *BATCH,
        *ADAM,
        "training.sequence_length",
        "training.steps",
        "training.seed",
        "training.optimizer.final_ratio",
        "checkpoint.every",
        "telemetry.timeout_seconds",
        "name",
    ),
    "fsdp": ("cluster.gpus", *AXES, "strategy.precision"),
}
"""Fields that a format says for every plan drawn here; kept apart from the code that it tests."""

shapes = st.builds(
    lambda heads, kv, wide, **rest: {
        "heads": heads,
        "kv_heads": heads // kv,
        "hidden": heads * wide,
        **rest,
    },
    heads=st.just(4),
    kv=st.sampled_from([1, 2, 4]),
    wide=st.sampled_from([16, 32]),
    layers=st.integers(4, 9),
    ffn=st.sampled_from([128, 256]),
    vocab=st.sampled_from([256, 500]),
    max_positions=st.just(64),
    positions=st.sampled_from(["learned", "rope", "alibi"]),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    mlp=st.sampled_from(["gelu", "swiglu", "geglu", "relu"]),
    biases=st.sampled_from(["none", "qkv", "all"]),
    tied=st.booleans(),
    window=st.sampled_from([None, 16]),
    moe=st.sampled_from(
        [None, {"experts": 4, "top_k": 2, "ffn": 64, "shared": 1, "first_dense": 1}]
    ),
)
optimizers = st.fixed_dictionaries(
    {
        "learning_rate": st.floats(1e-6, 1),
        "beta1": st.floats(0, 0.99),
        "beta2": st.floats(0, 0.999),
        "epsilon": st.sampled_from([1e-8, 1e-6]),
        "weight_decay": st.floats(0, 1),
        "warmup_steps": st.integers(0, 5),
        "decay": st.sampled_from(["constant", "linear", "cosine"]),
        "final_ratio": st.sampled_from([0.0, 0.1, 1.0]),
        "clip": st.sampled_from([None, 1.0, 0.3]),
        "moments": st.sampled_from(["fp32", "bf16"]),
    }
)
SCHEDULES = [
    ("1f1b", 1),
    ("eager-1f1b", 1),
    ("gpipe", 1),
    ("zb-h1", 1),
    ("interleaved", 2),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


@st.composite
def plans(draw: Callable[..., Any]) -> Plan:
    """A small legal plan with every field that some format can say drawn."""
    tensor, context, pipeline, data = (
        draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 2], [1, 2], [1, 2, 4])
    )
    zero = draw(st.integers(0, 3))
    schedule, chunks = draw(st.sampled_from(SCHEDULES)) if pipeline > 1 else ("1f1b", 1)
    shape = draw(shapes)
    micro, per_rank = draw(st.integers(1, 2)), draw(st.sampled_from([4, 8]))
    precision = draw(st.sampled_from(["bf16", "fp16", "fp32", "fp8"]))
    offload = draw(
        st.sampled_from(
            ["none", *(["optimizer"] if zero else []), *(["parameters"] if zero == 3 else [])]
        )
    )
    stages, layers = pipeline * chunks, shape["layers"]
    counts = [1] * (stages - 1) + [layers - stages + 1]
    algorithm = draw(st.sampled_from(["ring", "ulysses", "usp"]))
    strategy = {
        "data": {
            "zero": zero,
            "offload": offload,
            "overlap": draw(st.booleans()),
            "bucket_mib": 32.0,
            "reduce": draw(st.sampled_from(["step", *(["microbatch"] if zero >= 2 else [])])),
            "shard": draw(st.sampled_from(["all", *([context] if zero else [])])),
            "keep_gathered": zero == 3 and draw(st.booleans()),
        },
        "tensor": {"size": tensor, "sequence": tensor > 1 and draw(st.booleans())},
        "context": {
            "size": context,
            "algorithm": algorithm,
            "ulysses_size": context if algorithm == "usp" else 1,
        },
        "pipeline": {
            "size": pipeline,
            "schedule": schedule,
            "chunks": chunks,
            "partition": draw(
                st.sampled_from(["balanced", counts, *(["uniform"] * (layers % stages == 0))])
            ),
        },
        "expert": {
            "size": draw(st.sampled_from([1, context * data])) if shape["moe"] and data < 4 else 1
        },
        "recompute": draw(
            st.sampled_from(
                ["none", "selective", "full", [0], [1, 3], ["blocks.*.mlp", "blocks.0"]]
            )
        ),
        "precision": precision,
        "gradient_dtype": draw(
            st.sampled_from(["fp32", "bf16" if precision == "fp8" else precision])
        ),
        "kernels": draw(st.sampled_from(["eager", "compiled", "fused"])),
        "placement": draw(st.permutations(["tensor", "context", "data", "pipeline"])),
    }
    training = {
        "sequence_length": draw(st.sampled_from([32, 64])),
        "micro_batch": micro,
        "steps": draw(st.integers(5, 500)),
        "global_batch": micro * data * per_rank,
        "optimizer": draw(optimizers),
        "seed": draw(st.integers(0, 9)),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "evaluation": {"every": draw(st.sampled_from([0, 7]))},
    }
    return build_plan(
        {
            "name": "drawn",
            "model": shape,
            "cluster": {"gpu": GPU_NAME, "gpus": tensor * context * pipeline * data},
            "strategy": strategy,
            "training": training,
            "checkpoint": {"every": draw(st.sampled_from([0, 3]))},
            "telemetry": {
                "timeout_seconds": draw(st.integers(1, 400)),
                "trackers": draw(st.sampled_from([[], ["wandb"], ["tensorboard", "mlflow"]])),
            },
        }
    )


def leaves(plan: ResolvedPlan) -> dict[str, Any]:
    return flat(written_fields(plan))


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float | int) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-11)
    return bool(ours == theirs)


def said(field: str, names: list[str]) -> bool:
    return not any(
        field == name or field.startswith(name + ".") or name.startswith(field + ".")
        for name in names
    )


OWN = ("version", "strategy.stack", "strategy.attention")
"""Fields that are the format's own."""


PIPED = "a pipeline of DeepSpeed's"
WITHOUT = {
    "0.1.0": ("strategy.expert.size",),
    "0.3.0": ("name",),
    PIPED: ("strategy.data.zero", "strategy.data.offload"),
}
"""Release of torchtitan, or `PIPED` -> fields that it cannot say, of those that others can."""


@pytest.mark.parametrize(
    ("format", "version"),
    [
        *((format, None) for format in interop.FORMATS if format not in interop.VERSIONS),
        *((format, release) for format, all in interop.VERSIONS.items() for release in all),
    ],
)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(plan=plans())
def test_a_plan_survives_or_its_loss_is_named(format: Any, version: Any, plan: Plan) -> None:
    full = plan.resolve()
    text, lost = interop.write(plan, format, version)
    names = [note.field for note in lost]
    assert len(set(names)) == len(names) and all(note.why for note in lost)
    lacks = {} if format == "megatron" else {"model": full.shape}
    back = interop.read(text, gpu=GPU_NAME, **lacks)
    assert back.format == interop.detect(text) == format
    assert back.plan.strategy.stack.startswith(format)
    assert not {
        note.field for note in back.untranslated if note.why == "the format does not know this key"
    }
    ours, theirs = leaves(full), leaves(back.plan.resolve())
    piped = format == "deepspeed" and full.sizes["pipeline"] > 1
    without = {*WITHOUT.get(PIPED if piped else version, ())}
    if format == "deepspeed" and full.strategy.gradient_dtype == "fp32":
        without |= {"strategy.data.zero"}  # its optimizer of bf16 parameters shards without ZeRO
    for field in set(ALWAYS_SAID[format]) - without:
        mine = {
            key: value for key, value in ours.items() if key == field or key.startswith(field + ".")
        }
        assert mine, field
        for key, value in mine.items():
            assert same(value, theirs.get(key)), f"{key}: {value} came back as {theirs.get(key)}"
            assert said(key, names), f"{key} came back, but is called lost"
    for field, value in ours.items():
        if field not in OWN:
            assert same(value, theirs.get(field)) or not said(field, names), (
                f"{field} was lost without a word"
            )


FILES: dict[str, dict[str, Any]] = {
    "ds_config.json": {"model": "llama-3-8b", "gpu": GPU_NAME},
    "megatron.sh": {"gpu": GPU_NAME},
    "megatron.yaml": {"gpu": GPU_NAME, "gpus": 16},
    "torchtitan.toml": {"gpu": GPU_NAME},
    "accelerate.yaml": {"model": "llama-3-8b", "gpu": GPU_NAME},
}


def keys_of(text: str, format: Any) -> dict[str, Any]:
    if format == "megatron":
        return {f"--{key}": value for key, value in flags(text).items()}
    parse = {"deepspeed": json.loads, "torchtitan": tomllib.loads, "fsdp": yaml_files.parse}[format]
    return flat(parse(text))


REWORDED = {
    "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_backward_prefetch",
    "--num-layers-per-virtual-pipeline-stage",
    "--cp-comm-type",
    "--recompute-activations",
    "--use-flash-attn",
    "--fp8-format",
    "model.converters",
    "training.compile",
}
"""Translated keys that come back in other words for the same thing."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_its_translated_keys(name: str) -> None:
    first = interop.load(SAMPLES / name, **FILES[name])
    version = "0.2.2" if first.format == "torchtitan" else None
    text, lost = interop.write(first.plan, first.format, version)
    lacks = {
        key: value
        for key, value in FILES[name].items()
        if key != "gpus" or first.format != "megatron"
    }
    second = interop.read(text, **lacks)
    assert second.plan.resolve() == first.plan.resolve()
    old, new = keys_of((SAMPLES / name).read_text(), first.format), keys_of(text, first.format)
    kept = [key for key in first.translated if key in new and key not in REWORDED]
    assert len(kept) > len(first.translated) / 2
    for key in set(first.translated) - REWORDED:
        written = old.get(key, old.get(key.lstrip("-").replace("-", "_")))
        if isinstance(written, str) or written is None or key in ("--nproc-per-node", "--nnodes"):
            continue  # a word in other letters, or a shell variable
        assert same(new.get(key), written), key
    assert {note.field for note in lost} <= {
        "model",
        "cluster.gpu",
        "training.sequence_length",
        "training.steps",
        *BATCH,
        "strategy.recompute",
        *(["corpus.source"] if first.format == "megatron" else []),
    }


def test_a_plan_of_a_catalog_model_keeps_its_name() -> None:
    text, lost = interop.write(
        Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="megatron-3d"), "megatron"
    )
    assert interop.read(text, gpu=GPU_NAME).plan.model == "llama-3-8b"
    assert "model.name" not in {note.field for note in lost}


@pytest.mark.parametrize("format", ["deepspeed", "fsdp"])
def test_a_partition_that_is_written_and_lost_is_named(format: Any) -> None:
    pipeline = {"size": 2, "schedule": "interleaved", "chunks": 2}
    named = {}
    for partition in ({}, {"partition": [2, 1, 1, 2]}):
        strategy = {"pipeline": {**pipeline, **partition}}
        plan = build_plan(
            {"model": "tiny", "cluster": {"gpu": GPU_NAME, "gpus": 2}, "strategy": strategy}
        )
        plan = plan.replace(**{"model.layers": 6 if partition else 8})
        named[bool(partition)] = {
            note.field: note.value for note in interop.write(plan, format).untranslated
        }
    assert named[True]["strategy.pipeline.partition"] == [2, 1, 1, 2]
    assert (
        "strategy.pipeline.chunks" in named[False]
        and "strategy.pipeline.partition" not in named[False]
    )


@pytest.mark.parametrize("format", interop.FORMATS)
def test_unequal_replicas_are_refused_by_name(format: Any) -> None:
    stages = {"strategy.pipeline.size": 2, "strategy.pipeline.replicas": [2, 1]}
    unequal = Plan.of("tiny", gpu=GPU_NAME, gpus=3, set=stages)
    with pytest.raises(PlanError, match=r"cannot be written as .*; legal: null") as refused:
        interop.write(unequal, format)
    assert [p.field for p in refused.value.problems] == ["strategy.pipeline.replicas"]


def test_what_is_written_is_named_even_where_it_decides_nothing() -> None:
    data = {"zero": 3, "overlap": False, "reduce": "step"}
    plan = build_plan(
        {"model": "tiny", "cluster": {"gpu": GPU_NAME, "gpus": 1}, "strategy": {"data": data}}
    )
    lost = {note.field: note for note in interop.write(plan, "fsdp").untranslated}
    for field in ("overlap", "reduce"):
        note = lost[f"strategy.data.{field}"]
        assert note.value == data[field] and note.why.endswith("here it decides nothing")
    assert "strategy.data.overlap" not in {
        n.field for n in interop.write(Plan.of("tiny", gpu=GPU_NAME), "fsdp").untranslated
    }


@pytest.mark.parametrize("format", ["deepspeed", "fsdp"])
def test_an_uneven_partition_that_nobody_wrote_is_named(format: interop.Format) -> None:
    data = {"model": "llama-3-8b", "cluster": {"gpu": GPU_NAME, "gpus": 12}}
    pipeline = {"size": 2, "chunks": 3, "schedule": "interleaved"}
    plan = build_plan({**data, "strategy": {"pipeline": pipeline}})
    held = plan.resolve().strategy.pipeline.partition
    assert isinstance(held, list) and len(set(held)) > 1
    lost = {note.field: note.value for note in interop.write(plan, format).untranslated}
    assert lost["strategy.pipeline.partition"] == held


def test_a_seed_of_a_newer_torchtitan_is_the_plans() -> None:
    job = "[parallelism]\ntensor_parallel_degree = 2\n[debug]\nseed = 7\ndeterministic = true\n"
    found = interop.read(job, model="llama-3-8b", gpu=GPU_NAME, gpus=8)
    assert (found.plan.training.seed, found.plan.training.deterministic) == (7, True)
    assert not [note for note in found.untranslated if note.field.startswith("debug")]
