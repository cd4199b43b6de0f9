"""Reasons for leaving out what a foreign file says deny nothing that the plan's schema has."""

import ast
import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

import workbench.interop
from tests.interop.foreign_samples import TITAN
from workbench import interop
from workbench.interop.accelerate import fsdp_keys
from workbench.interop.deepspeed import deepspeed_keys
from workbench.interop.foreign_keys import NO_FIELD, _why
from workbench.interop.gpt_neox import gpt_neox_keys
from workbench.interop.megatron import megatron_keys
from workbench.interop.torchtitan import torchtitan_keys
from workbench.interop.trainer import trainer_keys
from workbench.plan.schema import Plan
from workbench.planner.estimate import estimate

INTEROP = Path(workbench.interop.__file__).parent
TABLES: dict[str, ModuleType] = {
    "deepspeed": deepspeed_keys,
    "megatron": megatron_keys,
    "torchtitan": torchtitan_keys,
    "accelerate": fsdp_keys,
    "gpt_neox": gpt_neox_keys,
    "trainer": trainer_keys,
}


def _parts(kind: Any) -> Iterator[Any]:
    """The types and values that an annotation is made of."""
    if get_origin(kind) in (Union, UnionType, Annotated, list, Literal):
        for part in get_args(kind):
            yield from _parts(part)
    else:
        yield kind


def _fields(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, list[str]]]:
    """(dotted path, the words that it may be) of each field of the schema."""
    for name, field in model.model_fields.items():
        parts = list(_parts(field.annotation))
        yield above + name, [part for part in parts if isinstance(part, str)]
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields(part, f"{above}{name}.")


SCHEMA = dict(_fields(Plan))


def _words(name: str) -> set[str]:
    return {word.removesuffix("s") for word in re.split(r"[._\-]", name) if word}


def _own_words(path: str) -> set[str]:
    """Words that a field of the strategy or training is known by: its name's, with its section's
    where that is one word.
    """
    section, _, name = path.rpartition(".")
    words = _words(name)
    return words if len(words) > 1 else words | _words(section.rpartition(".")[2])


def _literals(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


SAID = {path: _own_words(path) for path in SCHEMA if re.match(r"strategy\.(\w+\.\w|offload)", path)}
"""Fields of how the work is split -> the words that say them."""


@pytest.mark.parametrize("format", TABLES)
def test_no_reason_hides_a_field_that_says_the_key(format: str) -> None:
    table = TABLES[format]
    known = {*table.KNOWN, *getattr(table, "SECTIONS", ()), *getattr(table, "OPEN", ())}
    readers = [path for path in (INTEROP / format).glob("*.py") if "_keys" not in path.name]
    folders = [*readers, *(INTEROP / "deepspeed").glob("read_*.py")]
    ends = {text.rpartition(".")[2] for path in folders for text in _literals(path)}
    ends |= {f"{axis}_parallel_size" for axis in ends}  # read by a name made of the axis
    hidden = {
        f"{key} ({path})": why
        for key in known
        for path, words in SAID.items()
        if words <= _words(key)
        and key.rpartition(".")[2] not in ends
        and key.rpartition(".")[2].removeprefix("fsdp_") not in ends
        and path not in (why := _why(key, table.WHYS))
    }
    assert hidden == {}, "read the key, or say in its reason why the field does not say it"


def test_fields_that_reasons_name_are_the_schemas() -> None:
    named = {
        (path.name, field)
        for path in INTEROP.rglob("*.py")
        for text in _literals(path)
        for field in re.findall(
            r"\b(?:strategy|training|checkpoint|telemetry|cluster|corpus|finetune)\.[a-z_0-9.]*\w",
            text,
        )
        if " " in text and field not in torchtitan_keys.KNOWN
    }
    assert {
        (name, field)
        for name, field in named
        if field not in SCHEMA and field.replace("training.", "finetune.") not in SCHEMA
    } == set()


DENIED = {
    "a plan trains with adamw or sgd": ("training.optimizer.name", {"adamw", "sgd"}),
    "a plan decays constantly, linearly or by a cosine": (
        "training.optimizer.decay",
        {"constant", "linear", "cosine"},
    ),
    "a plan offloads what is sharded": (
        "strategy.data.offload",
        {"none", "optimizer", "parameters"},
    ),
    "a plan's moments are both of one dtype": (
        "training.optimizer.moments",
        {"fp32", "bf16", "int8"},
    ),
    "a plan's master weights": ("training.optimizer.master", {"auto", "none"}),
    "a plan's context parallelism is the same": (
        "strategy.context.algorithm",
        {"ring", "ulysses", "usp"},
    ),
    "a plan's blocks are of 8 bits": (
        "strategy.precision",
        {"fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "auto"},
    ),
    "a plan knows no such schedule": ("strategy.pipeline.schedule", set()),
    "a plan recomputes layer by layer": ("strategy.recompute", {"none", "selective", "full"}),
    "a plan balances experts by a loss": ("model.moe.auxiliary_loss", set()),
    "a plan's model has relu, not its square": (
        "model.mlp",
        {"gelu", "gelu_exact", "relu", "swiglu", "geglu"},
    ),
    "a plan's geglu takes the exact GELU": (
        "model.mlp",
        {"gelu", "gelu_exact", "relu", "swiglu", "geglu"},
    ),
    "a plan compiles its layers or nothing": (
        "strategy.kernels",
        {"eager", "compiled", "fused", "liger"},
    ),
    "a plan's gated": ("model.mlp", {"gelu", "gelu_exact", "relu", "swiglu", "geglu"}),
}
"""Reason that denies a value -> the field of that value, and the words that it may be: where the
schema knows more, the reason is to be read again.
"""
NO_FIELD_YET = {
    "a plan's base has 4 bits or 16": "finetune.quantize.bits",
    "a plan's evaluation has the micro-batch of training": "training.evaluation.micro_batch",
    "a plan's adapters have one rate": "finetune.lora.rate_of_b",
    "a plan has one rate for all weights": "training.optimizer.groups",
    "a plan's reference is what training starts from": "finetune.preference.reference",
    "a plan warms up linearly": "training.optimizer.warmup",
    "a plan warms up within its steps": "training.optimizer.warmup",
    "a plan decays until its last step": "training.optimizer.decay_steps",
    "a plan decays over all its steps": "training.optimizer.decay_steps",
    "a plan decays from the end of the warm-up on": "training.optimizer.decay_steps",
    "a plan reads a number of batches": "training.evaluation.all",
    "a plan hides no tensor-parallel communication": "strategy.tensor.overlap",
    "a plan keeps no second, smaller shard": "strategy.data.second_shard",
    "a plan sends parameters as they are": "strategy.data.quantize",
    "a plan sends gradients as they are": "strategy.data.quantize",
    "a plan drops": "training.attention_dropout",
    "a plan's batch is the same in every step": "training.rampup",
    "a plan scales the loss by its own rule": "training.loss_scale",
    "a plan knows no such conversion of layers": "model.converters",
    "a plan has one coefficient": "model.moe.auxiliary_losses",
    "a plan's dense layers are the first ones": "model.moe.layers",
    "a plan has no such budget": "strategy.recompute_budget",
    "a plan reduces gradients in strategy.gradient_dtype": "strategy.data.reduce_dtype",
    "a plan offloads only a sharded optimizer": "strategy.data.offload_unsharded",
    "a plan evaluates with the batch that it trains with": "training.evaluation.batch",
    "a plan's model is a decoder, without an encoder": "model.encoder",
    "a plan trains on text, not on": "training.reinforcement",
    "a plan trains every layer, or adapters": "finetune.frozen",
    "a plan learns from tokens, not": "finetune.distillation",
    "a plan waits for no GPU between layers": "strategy.synchronize_each_layer",
    "a plan recomputes layers without timing each": "telemetry.profile_backward",
    "a plan scales no learning rate or output by the width": "training.optimizer.mup",
    "a plan never drops attention's probabilities": "training.attention_dropout",
    "which a plan's model cannot say": "model.moe.layers",
    "a plan's model has experts in every layer": "model.moe.layers",
    "a plan's shared experts are as wide as the others": "model.moe.shared_ffn",
    "a plan keeps the input of every layer, not of groups": "strategy.recompute_groups",
    "a plan keeps the inputs of recomputed layers": "strategy.partition_activations",
    "a plan pads": "model.padded_vocab",
    "a plan's weights start by the model's own rule": "model.init_std",
    "a plan splits the loss over tensor-parallel ranks": "strategy.tensor.loss",
    "a plan's ring passes keys and values along": "strategy.context.rotate",
    "a plan keeps parameters in the precision that it computes in": "strategy.parameter_dtype",
    "a plan keeps 16-bit parameters beside fp32 master weights": "strategy.parameter_dtype",
    "a plan reduces fp32 gradients as they are": "strategy.reduce_dtype",
    "a plan scales each tensor by its own largest entry": "strategy.fp8_recipe",
    "a plan's fp8 scales each tensor by its own largest entry": "strategy.fp8_recipe",
    "a plan's output gradients are e5m2": "strategy.fp8_format",
    "a plan fills the pipeline once a step": "strategy.pipeline.microbatch",
    "a plan's AdamW decays weights apart from gradients": "training.optimizer.coupled_decay",
    "a plan's operators are its own": "strategy.onnx_safe",
    "a plan interleaves groups of": "strategy.pipeline.group",
    "in host memory that cannot be swapped; a plan's always is": "strategy.data.pin_memory",
    "a plan does linearly": "training.optimizer.warmup",
    "a plan's gradients are not bf16": "strategy.fp32_gradient_dtype",
    "a plan's loss is the cross entropy of its model": "training.loss",
    "a plan captures no graphs": "strategy.graphs",
    "a plan offloads parameters only together": "strategy.data.offload_parameters",
    "a plan offloads parameters only where stage 3": "strategy.data.offload_parameters",
}
"""Reason that denies a concept -> the field that would have it."""


def test_reasons_that_deny_a_value_know_all_that_a_field_may_be() -> None:
    texts = [text for path in INTEROP.rglob("*.py") for text in _literals(path)]
    for reason, (field, values) in DENIED.items():
        assert any(reason in text for text in texts), f"no reason says {reason!r} any more"
        assert set(SCHEMA[field]) == values, f"{field} has changed: is {reason!r} still true?"
    for reason, field in NO_FIELD_YET.items():
        assert any(reason in text for text in texts), f"no reason says {reason!r} any more"
        assert field not in SCHEMA, f"{field} says what {reason!r} denies"


NO_FIELD_WORDS = re.compile(
    r"a plan(?:'s [\w-]+){0,2} (?:\w+ (?:no|only|never|not)\b|does not|never|cannot|"
    r"keeps|reduces|splits|fills|compiles|waits|scales|recomputes|interleaves|pads|passes|takes|"
    r"decays|starts?)\b|no field of a plan|that a plan does not set"
)
SAYS_NOTHING_OF_THE_SCHEMA = (
    NO_FIELD,
    "a plan has no name for",
    "why a plan does not hold it",
    "that a plan does not set",  # of a section: the test above holds its keys to the schema
    "no such setting",
    "a plan does not set it",
    "that a plan has not",
    "no field of a plan's model says it",
    "whose states and steps a plan does not know",
    "Steps of a plan that does not say them",
    "a plan keeps a number of checkpoints",
    "a plan has its own fields for it",
    "of fp8 a plan knows one, beside blocks (MX)",
    "Not translated: what the file says and a plan cannot",
    "strategy.",  # the reason names the field
)


def test_each_denial_is_listed() -> None:
    listed = (*DENIED, *NO_FIELD_YET, *SAYS_NOTHING_OF_THE_SCHEMA)
    assert [
        text
        for path in INTEROP.rglob("*.py")
        for text in _literals(path)
        if NO_FIELD_WORDS.search(text)
        and "\n" not in text
        and not any(reason in text for reason in listed)
    ] == []


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (
            "--micro-batch-size 1 --moe-router-topk 2 --moe-aux-loss-coeff 0 --fp8-margin 0 "
            "--no-position-embedding --position-embedding-type rope --no-masked-softmax-fusion "
            "--moe-permute-fusion",
            {
                "--moe-router-topk": "--num-experts",
                "--moe-aux-loss-coeff": "--num-experts",
                "--fp8-margin": "strategy.precision",
                "--no-position-embedding": "model.positions",
                "--no-masked-softmax-fusion": "strategy.kernels",
                "--moe-permute-fusion": "--num-experts",
            },
        ),
        (
            "--num-experts 4 --moe-permute-fusion --moe-router-dtype fp32 --deepspeed "
            "--no-pipeline-parallel --zero-stage 1",
            {
                "--moe-permute-fusion": "strategy.kernels",
                "--moe-router-dtype": NO_FIELD,
                "--deepspeed": "strategy.stack",
                "--no-pipeline-parallel": "strategy.pipeline.size",
            },
        ),
        (
            '{"zero_optimization": {"stage": 1}, "compile": {"disable": false}}',
            {"compile.disable": "strategy.kernels"},
        ),
        (
            '{"zero_optimization": {"stage": 3, "param_persistence_threshold": 35840}}',
            {"zero_optimization.param_persistence_threshold": "70.0 KiB"},
        ),
        (
            "base_model: x\nadapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\n"
            "micro_batch_size: 1\npeft: {loftq_config: {loftq_bits: 4}}\n",
            {"peft.loftq_config.loftq_bits": "adapters start"},
        ),
        (
            "stage: sft\nmodel_name_or_path: x\nfinetuning_type: full\nuse_v1_kernels: true\n",
            {"use_v1_kernels": "kernels that an estimate"},
        ),
    ],
)
def test_why_a_key_is_left_out_is_true_of_the_file(text: str, reasons: dict[str, str]) -> None:
    megatron = text.startswith("--")
    text = _megatron(text) if megatron else text
    model = None if megatron else "llama-3-8b"
    found = interop.read(text, model=model, gpu="b200", gpus=16)
    whys = {note.field: note.why for note in found.untranslated}
    assert {k: v for k, v in reasons.items() if v not in whys.get(k, "")} == {}, whys


SHARE = {"strategy.data.offload": "optimizer", "strategy.data.offload_ratio": 0.3}
DISK = {"strategy.data.offload": "parameters", "strategy.data.offload_tier": "disk"}
RATIO = "strategy.data.offload_ratio"


def _deepspeed(**zero: Any) -> str:
    return json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3, **zero}})


def _megatron(words: str) -> str:
    return (
        "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 4 --hidden-size 512 "
        "--num-attention-heads 8 --vocab-size 512 --seq-length 128 --max-position-embeddings 128 "
        "--train-iters 9 --lr 1e-4 --bf16 " + words
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_deepspeed(offload_optimizer={"device": "cpu", "ratio": 0.3}), SHARE),
        (_deepspeed(offload_optimizer={"device": "cpu", "ratio": 1}), {**SHARE, RATIO: 1.0}),
        (
            _deepspeed(offload_optimizer={"device": "cpu", "ratio": 0}),
            {"strategy.data.offload": "none"},
        ),
        (_deepspeed(offload_optimizer={"device": "nvme"}, offload_param={"device": "nvme"}), DISK),
        (
            _megatron(
                "--use-distributed-optimizer --optimizer-cpu-offload "
                "--optimizer-offload-fraction 0.3"
            ),
            SHARE,
        ),
        (
            _megatron("--ds-sequence-parallel-size 4 --deepspeed --zero-stage 1"),
            {"strategy.context.size": 4, "strategy.context.algorithm": "ulysses"},
        ),
        (_megatron("--fp8-format e4m3 --fp8-recipe mxfp8"), {"strategy.precision": "mxfp8"}),
        (_megatron("--fp4-format e2m1"), {"strategy.precision": "nvfp4"}),
        (_megatron("--fp8-hybrid"), {"strategy.precision": "fp8"}),
        (TITAN + '[model]\nconverters = ["mx"]\n', {"strategy.precision": "mxfp8"}),
        (TITAN + '[model]\nconverters = ["quantize.linear.mx"]\n', {"strategy.precision": "mxfp8"}),
        (TITAN + '[model]\nconverters = ["float8"]\n', {"strategy.precision": "fp8"}),
    ],
)
def test_what_a_plan_can_say_is_read_and_written(text: str, said: dict[str, Any]) -> None:
    text = text.replace('[model]\nflavor = "8B"\n', "") if "converters" in text else text
    megatron = "pretrain_gpt" in text
    found = interop.read(text, model=None if megatron else "llama-3-8b", gpu="b200", gpus=16)
    full = found.plan.resolve()
    values = {path: reduce(getattr, path.split("."), full) for path in said}
    assert values == said
    assert not [
        n for n in found.untranslated if re.search("ratio|device|offload|converters", n.field)
    ]
    assert estimate(found.plan)
    _, lost = interop.write(found.plan, found.format)
    assert not {note.field for note in lost} & set(said)
