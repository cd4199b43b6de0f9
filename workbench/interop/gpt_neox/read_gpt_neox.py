"""gpt-neox's YAML (Megatron-DeepSpeed): DeepSpeed's keys beside those of the model, its parallel
sizes and training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import Problem, refuse
from workbench.interop import translation
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.deepspeed.deepspeed_keys import MAPPINGS
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.foreign_text import from_braces, mapping
from workbench.interop.gpt_neox import gpt_neox_keys as known
from workbench.interop.megatron.model_arguments import note_padding, rotated_entries
from workbench.interop.translation import (
    PIPED,
    STAND_IN,
    Imported,
    ImportOptions,
    MissingField,
    catalogued,
    imported,
    lacks,
)
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import build_plan

O = "training.optimizer."  # noqa: E741
OWN = {f"{O}clip", f"{O}weight_decay", f"{O}learning_rate"}
"""Fields of the optimizer whose default is gpt-neox's, not DeepSpeed's."""
DEFAULT = "gpt-neox's default of 2024 on; before, it was {}"
"""Why a value is assumed whose default has changed (neox_arguments/neox_args.py)."""
STEPS = 100
"""Steps of a plan that does not say them."""
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


class Spelled(ForeignKeys):
    """Keys by their underscored names, reported as the file spells them."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._as: dict[str, str] = {}
        super().__init__(self._underscored(data))

    def _underscored(
        self, data: Mapping[str, Any], above: tuple[str, str] = ("", "")
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in data.items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if name in found:
                raise refuse(
                    f"{above[1]}{key}",
                    "is written twice, with hyphens and underscores; keep one of them",
                )
            if isinstance(name, str):
                self._as[above[0] + name] = above[1] + key
            inner = (f"{above[0]}{name}.", f"{above[1]}{key}.")
            found[name] = self._underscored(value, inner) if isinstance(value, Mapping) else value
        return found

    def name(self, key: str) -> str:
        """The key as the file spells it."""
        return self._as.get(key, key)


def read(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of a gpt-neox YAML, as text or already parsed. Raises `PlanError` naming key and
    legal values.
    """
    given = given or ImportOptions()
    data = mapping(from_braces(text, "file") if isinstance(text, str) else text, "file")
    for name in ("deepspeed_extra_args", "deepspeed-extra-args"):  # DeepSpeed's own, put over them
        data |= mapping(data.pop(name, {}), name)
    keys = Spelled(data)
    keys.sections(*MAPPINGS)
    axes = {
        axis: keys.integer(f"{key}_parallel_size", 0) or 1
        for axis, key in (("tensor", "model"), ("pipeline", "pipe"), ("context", "context"))
    }
    sequence = bool(keys.flag("sequence_parallel")) and axes["tensor"] > 1
    zero = keys.integer("zero_optimization.stage", 0, 3) or 0
    precision = _precision(keys, zero)
    world, batch = read_deepspeed.batch_of(
        keys, _gpus(keys, given), math.prod(axes.values()), set()
    )
    kinds = str(keys.take("attention_config") or "")
    model = _model(keys, given, kinds, axes["tensor"])
    training = _training(keys, batch)
    strategy: dict[str, Any] = {
        "stack": PIPED,
        **precision,
        "tensor": {"size": axes["tensor"], "sequence": sequence},
        "data": read_deepspeed.data_of(
            keys, zero, read_deepspeed.gradient_bytes(precision, given), set()
        ),
        "pipeline": {"size": axes["pipeline"]},
        "context": {"size": axes["context"]},
        "recompute": _recompute(keys),
        "expert": {"size": keys.integer("moe_expert_parallel_size") or 1},
        # "global" is batched GEMMs around a softmax, as is a profile without a word.
        "attention": "flash-2" if "flash" in kinds and "global" not in kinds else "auto",
    }
    strategy["data"]["zero"] = read_deepspeed.stage_of(keys, zero, precision)
    plan = {"model": model, "cluster": given.cluster(world), "strategy": strategy, **training}
    keys.finish(known.KNOWN, known.WHYS, known.SECTIONS, lenient)
    return imported("gpt-neox", plan, keys, given)


def _gpus(keys: ForeignKeys, given: ImportOptions) -> ImportOptions:
    """With how many GPUs the file names, where it does."""
    each, nodes = keys.integer("num_gpus"), keys.integer("num_nodes")
    return (
        given if each is None else replace(given, gpus=given.world(each * (nodes or 1), "num_gpus"))
    )


def _precision(keys: ForeignKeys, zero: int) -> dict[str, str]:
    """Precision by `precision`, `bf16` or `fp16` (whose `type` may be bfloat16), and what gradients
    add up in.
    """
    kinds = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
    word, kind = keys.choice("precision", kinds), keys.choice("fp16.type", kinds)
    keys.flag("fp16.fp16")
    said = [kind or name if name == "fp16" else name for name in _enabled(keys)]
    found = list(dict.fromkeys([*said, *([word] if word else [])]))
    if len(found) > 1:
        raise refuse(
            keys.name("precision"), f"is {found[-1]}, and {found[0]} is enabled; keep one of them"
        )
    precision = found[0] if found else "fp32"
    if not found and not any(keys.has_key(f"{name}.enabled") for name in ("bf16", "fp16")):
        keys.assume("strategy.precision", precision, "gpt-neox's default")
    legal = {name: name for name in dict.fromkeys(("fp32", precision))}
    gradients = keys.choice("data_types.grad_accum_dtype", legal)
    if gradients is None:
        gradients = read_deepspeed.gradients_of(keys, precision, zero)
    return {"precision": precision, "gradient_dtype": gradients}


def _enabled(keys: ForeignKeys) -> list[str]:
    """16-bit precisions that are turned on; one that says auto counts where no other is said, as
    gpt-neox has it.
    """
    left = [name for name in ("bf16", "fp16") if f"{name}.enabled" in keys.auto_keys()]
    said = [name for name in ("bf16", "fp16") if name not in left and keys.flag(f"{name}.enabled")]
    taken = said or left[:1]
    for name in left:
        keys.skip(f"{name}.enabled", f"auto: neither on nor off; {taken[0]} was taken")
    if taken and not said:
        keys.assume("strategy.precision", taken[0], "the file says auto of it")
    return taken


def _recompute(keys: ForeignKeys) -> str:
    every = keys.integer("checkpoint_num_layers")
    if not keys.flag("checkpoint_activations"):
        return "none"
    if every is not None and every > 1:
        keys.mark_untranslated(
            "checkpoint_num_layers", "a plan recomputes layer by layer; full taken"
        )
    return "full"


def _model(keys: ForeignKeys, given: ImportOptions, kinds: str, ranks: int) -> str | dict[str, Any]:
    if given.model is not None:
        for key in known.SHAPE:
            keys.skip(key, "the model given says the shape")
        return given.the_model("")
    if missing := [key for key in REQUIRED if key not in keys]:
        raise MissingField(
            [Problem(key, "is missing; give it, or model (--model)") for key in missing], [STAND_IN]
        )
    for key in ("num_experts", "moe_num_experts"):
        if (experts := keys.integer(key)) not in (None, 1):
            raise refuse(
                keys.name(key),
                f"is {experts}: experts in every other layer, which a plan's model cannot "
                "say; legal: 1, or give model (--model)",
            )
    fields = {key: value for key, value in _fields(keys, given, kinds).items() if value is not None}
    shape = build_plan(
        {"model": {"name": "gpt-neox", **fields}, "cluster": {"gpu": "local", "gpus": 1}}
    ).model
    assert isinstance(shape, Shape)
    if not keys.has_key("padded_vocab_size"):
        note_padding(keys, "make_vocab_size_divisible_by", shape, ranks)
    return catalogued(shape) or shape.model_dump(exclude_unset=True)


def _fields(keys: ForeignKeys, given: ImportOptions, kinds: str) -> dict[str, Any]:
    layers, hidden, heads = (keys.integer(key) for key in REQUIRED)
    llama = keys.choice("mlp_type", {"regular": False, "llama": True}) or False
    activation = keys.choice(
        "activation", known.ACTIVATIONS | ({"silu": "swiglu", "swish": "swiglu"} if llama else {})
    )
    mlp = "swiglu" if llama else activation or "gelu"
    norm = keys.choice("norm", {name: name for name in ("layernorm", "rmsnorm")}) or "layernorm"
    epsilons = {
        "layernorm": keys.number("layernorm_epsilon", 1e-30),
        "rmsnorm": keys.number("rms_norm_epsilon", 1e-30),
    }
    bias, inner = keys.flag("use_bias_in_attn_linear"), keys.flag("use_bias_in_mlp")
    tied = not keys.flag("no_weight_tying")
    positions = keys.choice("pos_emb", known.POSITIONS) or "learned"
    share = keys.number("rotary_pct", 0, 1)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.integer("num_kv_heads"),
        "mlp": mlp,
        "ffn": _width(keys, int(hidden or 0), llama, mlp in ("swiglu", "geglu")),
        "vocab": _vocabulary(keys, given),
        "max_positions": keys.integer("max_position_embeddings"),
        "norm": norm,
        "positions": positions,
        "norm_epsilon": epsilons[norm] or {"layernorm": 1e-5, "rmsnorm": 1e-8}[norm],
        "biases": "none" if bias is False else "all",
        "tied": tied,
        # gpt-neox masks what lies further back than that: a query's own key comes on top.
        "window": None if (back := keys.integer("sliding_window_width", 0)) is None else back + 1,
        "rope_theta": keys.number("rotary_emb_base", 1e-9),
        "rotary_dim": rotated_entries(share, None, hidden, heads) if positions == "rope" else None,
        "parallel_residual": _parallel(keys),
        "unmodelled": "; ".join(
            _beyond(keys, kinds, layers, bias is not False, not llama and inner is not False)
        )
        or None,
    }


def _parallel(keys: ForeignKeys) -> str | None:
    """Norms of branches that read a layer's input side by side; None where they run in turn."""
    parallel, one = keys.flag("gpt_j_residual"), keys.flag("gpt_j_tied")
    return None if not parallel else "one_norm" if one else "two_norms"


def _width(keys: ForeignKeys, hidden: int, llama: bool, gated: bool) -> int:
    """Width of the feed-forward layer; gated ones take two thirds of the size given, half of it for
    each product, but for LLaMA's (`LLaMAParallelMLP`), which takes a size as it is.
    """
    sizes = (keys.integer("intermediate_size"), keys.integer("feedforward_size"))
    times, multiple = (
        keys.number("expansion_factor", 1e-9),
        keys.integer("mlp_multiple_of") or (256 if llama else 1),
    )
    size = next((size for size in (*sizes, times and int(times * hidden)) if size), None)
    if llama and sizes[0]:
        return sizes[0]
    if size is None:
        size = int(
            keys.assume("model.ffn", 4 * hidden, "gpt-neox's default, four times hidden_size")
        )
    if not gated:
        return -(-size // multiple) * multiple
    wide = int(size * 2 / 3)
    wide = wide if llama else wide // 2
    found = -(-wide // multiple) * multiple
    for note in [note for note in keys.assumed if note.field == "model.ffn"]:
        keys.assumed.remove(note)
        keys.assume("model.ffn", found, "gpt-neox's default for a gated layer, from hidden_size")
    return found


def _vocabulary(keys: ForeignKeys, given: ImportOptions) -> int:
    vocab, wanted = (
        keys.integer("padded_vocab_size"),
        given.vocab_size or given.sets.get("model.vocab"),
    )
    tokenizer = keys.skip("tokenizer_type", "a plan names its text in `corpus`")
    if vocab is None and wanted is not None:
        return int(keys.assume("model.vocab", wanted, "given"))
    if vocab is None and isinstance(tokenizer, str) and tokenizer in known.VOCABULARIES:
        return int(
            keys.assume(
                "model.vocab", known.VOCABULARIES[tokenizer], f"what tokenizer_type {tokenizer} has"
            )
        )
    if vocab is None:
        raise lacks(
            "padded_vocab_size",
            "is missing, and the vocabulary decides the embedding's size; give it "
            "(--vocab-size), or model (--model)",
            {"vocab_size": 32000},
        )
    return vocab


def _beyond(
    keys: ForeignKeys, kinds: str, layers: int | None, attention_bias: bool, mlp_bias: bool
) -> list[str]:
    """What the model computes that the fields of a shape do not say."""
    found = {"use_qk_layernorm": "use_qk_layernorm true"} if keys.flag("use_qk_layernorm") else {}
    if (unique := keys.integer("num_unique_layers")) not in (None, layers):
        found["num_unique_layers"] = f"num_unique_layers {unique}: layers share weights"
    if any(
        word in kinds
        for word in ("local", "sparse", "bigbird", "longformer", "mlp", "mamba", "rwkv")
    ):
        found["attention_config"] = f"attention_config {kinds[:60]}"
    for key in found:
        keys.mark_untranslated(
            key, "named in model.unmodelled: estimated without, refused where it would run"
        )
    biases = ["biases in attention or in the feed-forward layers only"] * (
        attention_bias != mlp_bias
    )
    return [*found.values(), *biases]


def _training(keys: ForeignKeys, batch: dict[str, int]) -> dict[str, Any]:
    steps, length = keys.integer("train_iters"), keys.integer("seq_length")
    if steps is None:
        keys.assume("training.steps", STEPS, "the file has no train_iters; the plan's default")
    if length is None:
        keys.assume(
            "training.sequence_length", "default", "the file has no seq_length; the plan's default"
        )
    optimizer, _ = read_deepspeed.optimizer_of(keys, OWN)
    optimizer = {**_defaults(keys, optimizer), **optimizer, **_decays(keys, optimizer)}
    optimizer |= _schedule(keys, optimizer["learning_rate"], steps or STEPS)
    saved = [keys.integer(key, 0) for key in ("checkpoint_factor", "save_interval")]
    kept, trackers = keys.integer("keep_last_n_checkpoints"), _trackers(keys)
    said: dict[str, Any] = {
        **batch,
        "steps": steps,
        "sequence_length": length,
        "optimizer": optimizer,
        "dropout": _dropout(keys),
        "seed": _seed(keys),
        "evaluation": _evaluation(keys),
    }
    checkpoint = {
        "every": next((n for n in saved if n is not None), 0),
        **({"keep": kept} if kept else {}),
    }
    if checkpoint["every"]:
        if not kept:
            keys.assume("checkpoint.keep", translation.DEFAULT, translation.KEEPS_ALL)
        checkpoint["asynchronous"] = False  # DeepSpeed's engine writes while the steps wait
    return {
        "training": {key: value for key, value in said.items() if value is not None},
        "checkpoint": checkpoint,
        "telemetry": {"trackers": trackers},
    }


def _dropout(keys: ForeignKeys) -> float:
    """Dropout of the residual stream; that of attention's probabilities is noted, as a plan has
    none.
    """
    attention, dropout = (
        keys.number("attention_dropout", 0, 1),
        keys.number("hidden_dropout", 0, 0.99),
    )
    if attention is None:
        keys.assume("attention_dropout", 0.0, DEFAULT.format(0.1))
    elif attention:
        keys.mark_untranslated(
            "attention_dropout",
            "a plan drops entries of the residual branches, not of attention's scores",
        )
    return (
        float(keys.assume("training.dropout", 0.0, DEFAULT.format(0.1)))
        if dropout is None
        else dropout
    )


def _seed(keys: ForeignKeys) -> int:
    seed = keys.integer("seed", 0)
    return int(keys.assume("training.seed", 1234, "gpt-neox's default")) if seed is None else seed


def _evaluation(keys: ForeignKeys) -> dict[str, int]:
    every, batches = keys.integer("eval_interval", 0), keys.integer("eval_iters", 0)
    if every is None:
        every = int(keys.assume("training.evaluation.every", 1000, "gpt-neox's default"))
    if batches is None and every:
        batches = int(keys.assume("training.evaluation.batches", 100, "gpt-neox's default"))
    return {"every": every, "batches": batches} if every and batches else {"every": 0}


def _trackers(keys: ForeignKeys) -> list[str]:
    on = {
        "tensorboard": keys.text("tensorboard_dir") is not None
        or bool(keys.flag("tensorboard.enabled")),
        "wandb": bool(keys.flag("use_wandb")) or bool(keys.flag("wandb.enabled")),
    }
    return [name for name, wanted in on.items() if wanted]


def _defaults(keys: ForeignKeys, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """gpt-neox's default of what neither the file nor the optimizer that it names says."""
    wanted = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    if optimizer["name"] == "sgd":
        wanted = {"learning_rate": 1e-3}
    return {
        field: keys.assume(f"{O}{field}", value, "gpt-neox's default")
        for field, value in wanted.items()
        if field not in optimizer
    }


def _decays(keys: ForeignKeys, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Weight decay and clipping, which stand beside the optimizer, and gpt-neox's defaults of
    both.
    """
    decay, found = keys.number("weight_decay", 0), {}
    if "clip" not in optimizer:
        found["clip"] = keys.assume(f"{O}clip", 1.0, "gpt-neox's default")
    if "weight_decay" not in optimizer:
        found["weight_decay"] = (
            keys.assume(f"{O}weight_decay", 0.1, DEFAULT.format(0.01)) if decay is None else decay
        )
    return found


def _schedule(keys: ForeignKeys, rate: float, steps: int) -> dict[str, Any]:
    kinds = {
        "constant": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "exponential": "exponential",
    }
    decay = keys.choice("lr_decay_style", kinds) or keys.assume(
        f"{O}decay", "linear", "gpt-neox's default"
    )
    if decay == "exponential":
        keys.mark_untranslated(
            "lr_decay_style", "a plan decays constantly, linearly or by a cosine; cosine was taken"
        )
        decay = "cosine"
    over, least = keys.integer("lr_decay_iters"), keys.number("min_lr", 0)
    if over not in (None, steps):
        keys.mark_untranslated("lr_decay_iters", "a plan decays until its last step")
    found = {"decay": decay, "warmup_steps": _warmup(keys, steps, over or steps)}
    if least is not None and least > rate:
        raise refuse(keys.name("min_lr"), f"is {least:g}, above optimizer.params.lr {rate:g}")
    if rate and (least is not None or decay != "constant"):
        found["final_ratio"] = (least or 0.0) / rate
    return found


def _warmup(keys: ForeignKeys, steps: int, over: int) -> int:
    """Steps of the warm-up, a share of those that the rate decays over, and within the run."""
    share = keys.number("warmup", 0, 1)
    if share is None:
        return int(
            keys.assume(
                f"{O}warmup_steps", min(steps, round(0.01 * over)), "gpt-neox's default, 1 percent"
            )
        )
    found = round(share * over)
    if found > steps:
        keys.mark_untranslated(
            "warmup", f"a plan warms up within its steps; {steps} were taken, of {found}"
        )
    return min(found, steps)
