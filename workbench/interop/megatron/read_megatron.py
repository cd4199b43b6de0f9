"""Megatron-LM's arguments, by megatron/training/arguments.py: what they say of a plan, and a plan
as arguments.

They hold the model's shape too, and in front of the script torchrun's words for how many GPUs
there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.foreign_text import Parsed
from workbench.interop.megatron import megatron_keys as known
from workbench.interop.megatron.argument_words import arguments, command
from workbench.interop.megatron.data_parallel_arguments import read_data
from workbench.interop.megatron.expert_arguments import read_spread
from workbench.interop.megatron.model_arguments import note_padding, read_model
from workbench.interop.megatron.overrides import decided, variables
from workbench.interop.megatron.training_arguments import read_training
from workbench.interop.megatron.write_megatron import launch_variables, launcher, written
from workbench.interop.translation import (
    FRAMEWORK_PROFILES,
    Imported,
    ImportOptions,
    KeyNote,
    MissingField,
    Translation,
    imported,
)
from workbench.interop.translation_loss import lost, nearest
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Plan
from workbench.untrusted_text import shown

ABOVE = " (--set cluster.gpus=N stands above the file)"
_RINGS = {"p2p": "ring", "allgather": "ring", "a2a": "ulysses", "a2a+p2p": "ring"}


def read(
    source: str | Parsed, given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of Megatron-LM arguments: a shell command or script, a list of words, or a mapping
    of arguments.

    Raises `PlanError` naming the argument and what is legal.
    """
    given = given or ImportOptions()
    named = variables(given, source)
    given, keys = decided(arguments(source, named), given, named)
    try:
        plan = _plan(keys, given)
    except MissingField as error:
        raise MissingField([*keys.problems, *error.problems], error.stand_ins) from None
    except PlanError:
        if keys.problems:
            raise MissingField(keys.problems, ()) from None
        raise
    if keys.problems:
        raise MissingField(keys.problems, ())
    whys = known.WHYS if keys.has_key("num-experts") else known.WITHOUT_EXPERTS
    keys.finish(known.KNOWN, whys, (), lenient)
    return imported("megatron", plan, keys, given)


_ENCODER = "a plan's model is a decoder, without an encoder before it (T5, images)"
_NO_TRAINING = {
    "decoder-num-layers": _ENCODER,
    "decoder-seq-length": _ENCODER,
    "perform-rl-step": "a plan trains on text, not on what the model generates",
    "freeze-all-layers": "a plan trains every layer, or adapters (finetune.lora)",
    "logits-load-dir": "a plan learns from tokens, not from a teacher's logits",
}
"""Argument that changes what is trained -> why no plan says it."""


def _plan(keys: ForeignKeys, given: ImportOptions) -> dict[str, Any]:
    for key, why in _NO_TRAINING.items():
        if keys.take(key):
            raise refuse(f"--{key}", f"is given; legal: leave it out, for {why}")
    model, shape = read_model(keys, given)
    cluster = _cluster(keys, given)
    axes = {axis: keys.renamed_integer(key, older) or 1 for axis, (key, older) in _AXES.items()}
    world, others = int(cluster["gpus"]), math.prod(axes.values())
    if world % others:
        raise refuse(
            "gpus",
            f"is {world}, which tensor x pipeline x context = {others} does not divide; legal: a "
            f"multiple of {others}" + ABOVE,
        )
    if not keys.has_key("pad-vocab-size-to"):
        note_padding(keys, "make-vocab-size-divisible-by", shape, axes["tensor"])
    training = read_training(keys, world // others)
    pipeline = _pipeline(keys, axes["pipeline"], shape)
    precision, gradients = _precision(keys)
    kept = {"precision": precision, "gradient_dtype": gradients}
    strategy = {
        "stack": FRAMEWORK_PROFILES["megatron"],
        "data": read_data(keys, world // others * axes["context"], kept, axes["pipeline"]),
        "tensor": {
            "size": axes["tensor"],
            "sequence": bool(keys.flag("sequence-parallel")) and axes["tensor"] > 1,
        },
        "pipeline": pipeline,
        "context": _context(keys, axes["context"]),
        "expert": read_spread(keys, axes["tensor"], shape.moe is not None),
        "recompute": _recompute(keys, shape, pipeline),
        **kept,
        "placement": _placement(keys),
        "kernels": _kernels(keys),
        **_attention(keys),
        **_loss(keys),
    }
    return {"model": model, "cluster": cluster, "strategy": strategy, **training}


_AXES = {
    "tensor": ("tensor-model-parallel-size", "model-parallel-size"),
    "pipeline": ("pipeline-model-parallel-size", ""),
    "context": ("context-parallel-size", "ds-sequence-parallel-size"),
}
"""Axis -> the argument that says its ranks, and its name of 2019 and 2020, or of
Megatron-DeepSpeed, whose sequence parallelism is Ulysses.
"""


def _cluster(keys: ForeignKeys, given: ImportOptions) -> dict[str, Any]:
    """The cluster, from torchrun's words where they are numbers."""
    for key in known.LAUNCHER[:2]:
        if keys.is_undecided(key):
            keys.skip(key, "not a number of its own; gpus was taken as given")
    found = {key: keys.take(key) for key in known.LAUNCHER[:2]}
    for key, value in found.items():
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            keys.mark_untranslated(key, "not a number of its own; gpus was taken as given")
            found[key] = None
    per_node, nodes = found["nproc-per-node"], found["nnodes"]
    if per_node is None:
        return _over(given, given.world(None, "torchrun --nproc-per-node x --nnodes"), nodes)
    has_nodes_note = "--nnodes" in {note.field for note in keys.untranslated}
    world = given.world(
        None if has_nodes_note else per_node * (nodes or 1), "--nproc-per-node x --nnodes"
    )
    nodes = nodes or max(1, world // per_node)
    return given.cluster(world, gpus_per_node=per_node, nodes=nodes)


def _over(given: ImportOptions, world: int, nodes: int | None) -> dict[str, Any]:
    """The cluster of a launcher that says nodes at most; each starts the same number of ranks."""
    if nodes is None:
        return given.cluster(world)
    if world % nodes:
        raise refuse(
            "gpus",
            f"is {world}, which --nnodes {nodes} does not divide; legal: a multiple of {nodes}",
        )
    return given.cluster(world, nodes=nodes)


def _pipeline(keys: ForeignKeys, size: int, shape: Shape) -> dict[str, Any]:
    virtual, stages, ends = keys.integer("num-layers-per-virtual-pipeline-stage"), None, _ends(keys)
    chunks = keys.integer("num-virtual-stages-per-pipeline-rank") or 1
    layers = shape.layers - shape.mtp_layers
    if virtual is not None:
        chunks, left = divmod(layers + sum(ends), size * virtual)
        if left or not chunks:
            raise refuse(
                "--num-layers-per-virtual-pipeline-stage",
                f"is {virtual}, but {layers} layers are no multiple of {size} ranks x {virtual}",
            )
    stages = _layout(keys, layers, shape.mtp_layers)
    if stages is not None:
        if len(stages) % size:
            raise refuse(
                "--pipeline-model-parallel-layout",
                f"has {len(stages)} stages; legal: a multiple of {size}",
            )
        chunks = len(stages) // size
    stages = stages or _uneven(keys, size, chunks, layers) or _with_embedding(keys, size, layers)
    stages = stages or _with_ends(ends, size * chunks, layers)
    if shape.mtp_layers and size * chunks > 1:
        stages = stages or _even(layers, size * chunks)
        stages = [*stages[:-1], stages[-1] + shape.mtp_layers]
    found: dict[str, Any] = {
        "size": size,
        "chunks": chunks,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
    }
    return found | {"partition": stages or "uniform"}


def _with_embedding(keys: ForeignKeys, size: int, layers: int) -> list[int] | None:
    """Layers of each stage where DeepSpeed counts the two embeddings as layers: the outer stages
    have one less.
    """
    method = keys.text("pp-partition-method")
    if method is None:
        return None
    each, left = divmod(layers + 2, size)
    if "embedding" not in method or left or size < 2 or each < 2:
        keys.mark_untranslated("pp-partition-method", "a plan counts layers; uniform was taken")
        return None
    return [each - 1, *[each] * (size - 2), each - 1]


def _even(layers: int, stages: int) -> list[int]:
    """Layers of each of as many stages, alike, before the layers that predict further tokens, which
    Megatron adds to the last.
    """
    if layers % stages:
        raise refuse(
            "--num-layers",
            f"is {layers}, which {stages} pipeline stages do not divide; legal: a multiple of "
            f"{stages}, or --pipeline-model-parallel-layout",
        )
    return [layers // stages] * stages


def _layout(keys: ForeignKeys, layers: int, further: int) -> list[int] | None:
    """Layers of each stage that a layout such as `Ettt|tttt|ttmL` says, without those that predict
    a further token: E embedding, t layer, m further token, L loss.
    """
    text = keys.text("pipeline-model-parallel-layout")
    if text is None:
        return None
    plain = text.replace(",", "")
    for _ in range(8):  # groups may hold groups
        plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
        plain = re.sub(r"([A-Za-z|])\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
    counts = [stage.count("t") for stage in plain.split("|")]
    last = plain.rpartition("|")[2].count("m")
    if (
        not re.fullmatch(r"[EtmL|]+", plain)
        or (sum(counts), last, plain.count("m")) != (layers, further, further)
        or min(counts) < 1
    ):
        also = f", and {further} m in the last" if further else ""
        raise refuse(
            "--pipeline-model-parallel-layout",
            f"is {shown(text)}; legal: stages such as Ett|tt|ttL with "
            f"{layers} layers t in all, and one or more in each{also}",
        )
    return counts


def _uneven(keys: ForeignKeys, size: int, chunks: int, layers: int) -> list[int] | None:
    """Layers of each stage where the first or last rank has its own number, spread over its
    `chunks` like the rest.
    """
    first, last = (keys.integer(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first is None and last is None:
        return None
    middle = size - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    key = f"--decoder-{'first' if first is not None else 'last'}-pipeline-num-layers"
    if size < 2 or (rest % middle if middle else rest) or rest < middle:
        raise refuse(key, f"leaves {rest} layers to {middle} stages, which do not divide them")
    ranks = [
        *([first] if first else []),
        *[rest // max(1, middle)] * middle,
        *([last] if last else []),
    ]
    if uneven := [held for held in ranks if held % chunks]:
        raise refuse(
            key,
            f"leaves {uneven[0]} layers to a rank, which its {chunks} virtual stages do not divide",
        )
    return [held // chunks for held in ranks] * chunks


def _ends(keys: ForeignKeys) -> tuple[bool, bool]:
    """Whether Megatron counts the embedding, and the loss, as a layer of the outer stages."""
    embedding, loss = (
        bool(keys.flag(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")
    )
    return embedding, loss


def _with_ends(ends: tuple[bool, bool], stages: int, layers: int) -> list[int] | None:
    """Layers of each stage where the embedding or the loss (`ends`) takes the place of one."""
    if not any(ends) or stages < 2:
        return None
    each, left = divmod(layers + sum(ends), stages)
    if left or each < 2:
        key = "embedding" if ends[0] else "loss"
        raise refuse(
            f"--account-for-{key}-in-pipeline-split",
            f"makes {layers + sum(ends)} of {layers} layers, which {stages} stages do not divide",
        )
    return [each - ends[0], *[each] * (stages - 2), each - ends[1]]


def _context(keys: ForeignKeys, size: int) -> dict[str, Any]:
    kinds, usual = keys.take("cp-comm-type"), "p2p"
    if keys.has_key("ds-sequence-parallel-size"):
        usual = "a2a"
    words = {str(word) for word in (kinds if isinstance(kinds, list) else [kinds or usual])}
    if not words <= set(_RINGS):
        raise refuse("--cp-comm-type", f"is {shown(kinds)}; legal: {', '.join(_RINGS)}")
    if words == {"a2a+p2p"}:
        ulysses = _ulysses_size(keys, size)
        return {"size": size, "algorithm": "usp", "ulysses_size": ulysses}
    if len(words) > 1 or words & {"allgather", "a2a+p2p"}:
        keys.mark_untranslated(
            "cp-comm-type", "a plan's context parallelism is the same for every layer; ring taken"
        )
    return {"size": size, "algorithm": "ulysses" if words == {"a2a"} else "ring"}


def _ulysses_size(keys: ForeignKeys, size: int) -> int:
    """Ranks of an all-to-all group: the first of the two levels of `a2a+p2p`."""
    name = "hierarchical-context-parallel-sizes"
    levels = keys.take(name)
    words = levels if isinstance(levels, list) else str(levels or "").split()
    sizes = [int(word) for word in words if str(word).isdigit()]
    if len(sizes) != 2 or len(words) != 2 or sizes[0] * sizes[1] != size:
        raise refuse(
            f"--{name}",
            f"is {shown(levels)}; --cp-comm-type a2a+p2p needs two sizes whose product is "
            f"--context-parallel-size = {size}: all-to-all, ring",
        )
    return sizes[0]


def _recompute(keys: ForeignKeys, shape: Shape, pipeline: Mapping[str, Any]) -> str | list[int]:
    kind = keys.choice("recompute-granularity", {"full": "full", "selective": "selective"})
    if keys.flag("recompute-activations"):
        kind = "selective"
    older = keys.choice("activations-checkpoint-method", {"uniform": "uniform", "block": "block"})
    if older or any(
        [keys.flag("checkpoint-activations"), keys.flag("deepspeed-activation-checkpointing")]
    ):
        kind = "full"
    method = keys.choice("recompute-method", {"uniform": "uniform", "block": "block"}) or older
    layers = keys.integer("recompute-num-layers") or keys.integer(
        "activations-checkpoint-num-layers"
    )
    if kind == "full" and method == "block" and layers is not None:
        return first_layers(_stages(shape, pipeline), layers)
    if kind == "full" and layers not in (None, 1):
        keys.mark_untranslated(
            "recompute-num-layers", "a plan keeps the input of every layer, not of groups of layers"
        )
    return kind or "none"


def first_layers(stages: list[int], layers: int) -> list[int]:
    """The first `layers` layers of each stage, numbered through the model."""
    starts = [sum(stages[:stage]) for stage in range(len(stages))]
    return [
        start + k
        for start, held in zip(starts, stages, strict=True)
        for k in range(min(layers, held))
    ]


def _stages(shape: Shape, pipeline: Mapping[str, Any]) -> list[int]:
    if isinstance(pipeline["partition"], list):
        return pipeline["partition"]
    count = pipeline["size"] * pipeline["chunks"]
    return [shape.layers // count] * count


def _precision(keys: ForeignKeys) -> tuple[str, str]:
    """(precision, dtype of gradients); bf16's are fp32 unless --grad-reduce-in-bf16."""
    bf16, fp16 = keys.flag("bf16"), keys.flag("fp16")
    if bf16 and fp16:
        raise refuse("--fp16", "is given beside --bf16; legal: one of them")
    fp8 = _fp8(keys)
    wide, narrow = keys.flag("accumulate-allreduce-grads-in-fp32"), keys.flag("grad-reduce-in-bf16")
    main = _main_gradients(keys, bool(bf16 or fp8), bool(wide))
    narrow = narrow or main == "bf16"
    if fp8 and not bf16:
        keys.mark_untranslated(
            next(key for key in _NARROW if keys.has_key(key)),
            f"without --bf16 Megatron keeps fp32 parameters; a plan's {fp8} has bf16 ones",
        )
    if bf16 or fp8:
        gradients = "bf16" if narrow and not wide else "fp32"
    else:
        gradients = "fp16" if fp16 and not wide else "fp32"
    return fp8 if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32", gradients


_NARROW = ("fp8-format", "fp4-format", "fp8-hybrid", "fp8-e4m3")
"""Arguments that make GEMMs narrower than 16 bits."""


def _fp8(keys: ForeignKeys) -> str:
    """The precision of GEMMs in 8 bits or fewer, empty where they are not: fp8, which a plan scales
    tensor-wise, output gradients in e5m2, or blocks with a scale each.
    """
    form, recipe = keys.take("fp8-format"), keys.take("fp8-recipe")
    older = [keys.flag(key) for key in ("fp8-hybrid", "fp8-e4m3")]
    form = form or ("hybrid" if older[0] else "e4m3" if older[1] else None)
    if keys.take("fp4-format"):
        return "nvfp4"
    if form and recipe == "mxfp8":
        return "mxfp8"
    why = "a plan scales each tensor by its own largest entry"
    if recipe not in (None, "tensorwise"):
        keys.mark_untranslated("fp8-recipe", why)
    if form and recipe is None:
        keys.assume("strategy.precision", "fp8", f"Megatron's recipe is delayed scaling; {why}")
    if form == "e4m3":
        key = "fp8-e4m3" if older[1] else "fp8-format"
        keys.mark_untranslated(key, "a plan's output gradients are e5m2, as in hybrid")
    return "fp8" if form else ""


def _main_gradients(keys: ForeignKeys, bf16: bool, wide: bool) -> str | None:
    """Dtype of the gradients that the optimizer reads: with bf16 ones Megatron does not raise them
    to fp32.
    """
    main = keys.choice("main-grads-dtype", {"fp32": "fp32", "bf16": "bf16"})
    if main == "bf16" and wide:
        raise refuse(
            "--main-grads-dtype",
            "is bf16 beside --accumulate-allreduce-grads-in-fp32; legal: one of them",
        )
    if main == "bf16" and not bf16:
        keys.mark_untranslated("main-grads-dtype", "without --bf16 a plan's gradients are not bf16")
    return None if main is None else str(main)


def _placement(keys: ForeignKeys) -> list[str]:
    inner = ["tensor", "context"]
    return (
        [*inner, "pipeline", "data"]
        if keys.flag("use-tp-pp-dp-mapping")
        else [*inner, "data", "pipeline"]
    )


def _kernels(keys: ForeignKeys) -> str:
    return str(
        keys.choice("transformer-impl", {"local": "eager", "transformer_engine": "fused"})
        or "fused"
    )


_BACKENDS = {
    "flash": "flash-2",
    "fused": "cudnn-9",
    "unfused": "unfused",
    "local": "unfused",
    "auto": None,
}
"""Word of --attention-backend -> `strategy.attention`; null: the framework profile's."""
_FLASH = {"use-flash-attn-v1": "flash-1", "use-flash-attn-v2": "flash-2"}
"""Switches of Megatron-DeepSpeed; --use-flash-attn is the first or the second by the package."""


def _attention(keys: ForeignKeys) -> dict[str, str]:
    """`attention` of the strategy, where the arguments say it."""
    said = None
    if not keys.is_undecided("attention-backend"):
        said = keys.choice("attention-backend", _BACKENDS)
    flash = "flash-2" if keys.flag("use-flash-attn") else None
    for switch, generation in _FLASH.items():
        flash = generation if keys.flag(switch) else flash
    return {"attention": kernel} if (kernel := said or flash) else {}


def _loss(keys: ForeignKeys) -> dict[str, str]:
    """`loss` of the strategy, where head and loss are one operator."""
    key = "cross-entropy-fusion-impl"
    kinds = {"native": "", "te": "", "linear": "fused_linear"}
    kind = "" if keys.is_undecided(key) else keys.choice(key, kinds)
    return {"loss": kind} if kind and keys.flag("cross-entropy-loss-fusion") else {}


def write(plan: Plan) -> Translation:
    """The plan as a torchrun command with Megatron's arguments, and the fields that it does not
    say.
    """
    full = plan.resolve()
    text = command(launch_variables(full), launcher(full), written(full))
    with nearest("megatron"):
        back = read(text, ImportOptions(None, full.gpu, None, full.fabric))
    found = lost(plan, full, back, known.LOST, ("cluster.gpu",))
    if not any(note.field.startswith("corpus") for note in found):
        found.append(KeyNote("corpus.source", full.corpus.source, known.LOST["corpus"]))
    return Translation(text, found)
