"""A model's shape as Megatron-LM's arguments, and back."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from workbench.errors import Problem, refuse
from workbench.fields.frozen import Frozen
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.megatron.expert_arguments import read_experts, write_experts
from workbench.interop.megatron.megatron_keys import VOCABULARIES
from workbench.interop.translation import STAND_IN, ImportOptions, MissingField, catalogued, lacks
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolution import model_shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import build_plan
from workbench.untrusted_text import shown

USUAL_MULTIPLE = 128
"""Divisor of a tensor rank's rows of the vocabulary, where nobody says."""
REQUIRED = ("num-layers", "hidden-size", "num-attention-heads")
_POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rope",
    "yarn": "rope",
    "alibi": "alibi",
    "absolute": "learned",
    "rotary": "rope",
}


def read_model(keys: ForeignKeys, given: ImportOptions) -> tuple[str | dict[str, Any], Shape]:
    """The plan's `model` (a catalog name where one has this shape), and its shape.

    A model that is given wins; arguments that say otherwise are reported as not translated. Raises
    `PlanError` naming the arguments that are missing.
    """
    if given.model is None and (missing := [key for key in REQUIRED if key not in keys]):
        raise MissingField(
            [Problem(f"--{key}", "is missing; give it, or model (--model)") for key in missing],
            [STAND_IN],
        )
    if given.model is not None:
        return _given(keys, given)
    shape = _shape(_read(keys, given=given))
    return catalogued(shape) or shape.model_dump(exclude_unset=True), shape


def _given(keys: ForeignKeys, given: ImportOptions) -> tuple[str | dict[str, Any], Shape]:
    model = given.the_model("")
    shape = given.model if isinstance(given.model, Shape) else model_shape(str(given.model))
    for key in _FLAGS.values():
        if keys.is_undecided(key):
            keys.skip(key, "open in the file; the model given stands")
    before = set(keys.translated)
    found = _read(keys, required=False)
    if "layers" in found:  # apart from those that predict further tokens
        found["layers"] += shape.mtp_layers - found.get("mtp_layers", 0)
    silent = {note.field for note in keys.assumed}
    for field, value in found.items():
        ours: Any = getattr(shape, field)
        ours = ours.model_dump() if isinstance(ours, Frozen) else ours
        if isinstance(value, dict):
            value = {
                key: said for key, said in value.items() if f"model.{field}.{key}" not in silent
            }
        if (
            not _agrees(value, ours)
            and f"--{_FLAGS.get(field, field)}" in set(keys.translated) - before
        ):
            keys.mark_untranslated(_FLAGS[field], f"the model given has {shown(ours)}")
    keys.assumed[:] = [note for note in keys.assumed if not note.field.startswith("model.")]
    return model, shape


def _agrees(said: Any, ours: Any) -> bool:
    """Whether a field of the shape given is what the arguments say; of a section, what they say of
    it.
    """
    if isinstance(said, dict) and isinstance(ours, dict):
        return all(ours.get(key) == value for key, value in said.items())
    return bool(said == ours)


_COMPUTED = (
    "qk-layernorm",
    "qk-l2-norm",
    "rotary-interleaved",
    "apply-residual-connection-post-layernorm",
    "squared-relu",
    "quick-geglu",
    "moe-shared-expert-gate",
    "is-hybrid-model",
    "enable-gpt-oss",
    "attention-output-gate",
    "mtp-use-repeated-layer",
)
"""Switches that change what the model computes, and that no field of a shape holds."""
_CHOSEN: dict[str, tuple[object, ...]] = {
    "softmax-type": ("vanilla",),
    "hybrid-override-pattern": (),
    "hybrid-layer-pattern": (),
    "mtp-hybrid-override-pattern": (),
    "moe-latent-size": (),
    "activation-func-clamp-value": (),
    "hybrid-attention-ratio": (0,),
    "hybrid-mlp-ratio": (0,),
    "linear-attention-freq": (),
    "experimental-attention-variant": (),
    "heterogeneous-layers-config-path": (),
    "no-rope-freq": (),
}
"""Argument that changes what the model computes, and that no field of a shape holds -> values that
change nothing.
"""
_NEAREST = {
    "squared-relu": "a plan's model has relu, not its square; relu was taken",
    "quick-geglu": "a plan's geglu takes the exact GELU; geglu was taken",
    "rotary-scaling-factor": "model.rope_scaling has YaRN, but not by Megatron's two mscales",
    "glu-activation": "a plan's gated layers are swiglu or geglu; geglu was taken",
}
"""Switch -> what a shape has in its place."""
_LLAMA3 = {
    "type": "llama3",
    "original_positions": 8192,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
}
"""What --use-rope-scaling computes beside its factor (Megatron-core's rotary_pos_embedding.py)."""
_FLAGS = {
    "layers": "num-layers",
    "mtp_layers": "mtp-num-layers",
    "hidden": "hidden-size",
    "heads": "num-attention-heads",
    "kv_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "ffn": "ffn-hidden-size",
    "vocab": "vocab-size",
    "max_positions": "max-position-embeddings",
    "positions": "position-embedding-type",
    "norm": "normalization",
    "norm_epsilon": "norm-epsilon",
    "mlp": "swiglu",
    "biases": "disable-bias-linear",
    "tied": "untie-embeddings-and-output-weights",
    "window": "window-size",
    "rope_theta": "rotary-base",
    "rope_scaling": "use-rope-scaling",
    "qk_norm": "qk-layernorm",
    "moe": "num-experts",
    "mla": "multi-latent-attention",
}
"""Field of a shape -> the argument that says it."""


def _shape(fields: dict[str, Any]) -> Shape:
    plan = build_plan({"model": fields, "cluster": {"gpu": "local", "gpus": 1}})
    assert isinstance(plan.model, Shape)
    return plan.model


def _read(
    keys: ForeignKeys, required: bool = True, given: ImportOptions | None = None
) -> dict[str, Any]:
    layers, hidden, heads = (keys.integer(key) for key in REQUIRED)
    further = keys.integer("mtp-num-layers", 0)
    unit = keys.choice(
        "glu-activation", {"swiglu": "swiglu", "geglu": "geglu", "liglu": "", "reglu": ""}
    )
    computed = [key for key in _COMPUTED if keys.flag(key)] + ["glu-activation"] * (unit == "")
    norm = keys.choice("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"})
    # Megatron norms heads as it norms the residual stream.
    heads_normed = norm == "rmsnorm" and "qk-layernorm" in computed
    heads_normed = heads_normed and not keys.has_key("multi-latent-attention")
    if heads_normed:
        computed.remove("qk-layernorm")
    centred = keys.flag("apply-layernorm-1p") or None
    if centred and norm != "rmsnorm":
        computed.append("apply-layernorm-1p")
        centred = None
    gated, positions = bool(keys.flag("swiglu")) or unit is not None, _positions(keys)
    ffn = keys.integer("ffn-hidden-size")
    if ffn is None and hidden:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        keys.assume("model.ffn", ffn, "Megatron's default from --hidden-size")
    found: dict[str, Any] = {
        "layers": layers + (further or 0) if layers else None,
        "mtp_layers": further or None,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "kv_heads": _kv_heads(keys, heads),
        "head_dim": keys.integer("kv-channels"),
        "vocab": _vocabulary(keys, required, given or ImportOptions()),
        "max_positions": keys.integer("max-position-embeddings")
        or keys.integer("max-absolute-position-embeddings"),
        "positions": positions,
        "mlp": _mlp(computed, gated, unit),
        "biases": _biases(keys),
        "norm": norm or "layernorm",
        "norm_epsilon": keys.number("norm-epsilon", 0) or keys.number("layernorm-epsilon", 0),
        "tied": not keys.flag("untie-embeddings-and-output-weights"),
        "window": _window(keys),
        "full_attention_every": keys.integer("window-attn-skip-freq"),
        "rope_theta": keys.number("rotary-base", 1e-9),
        "rope_scaling": _rope_scaling(keys),
        "qk_norm": "head" if heads_normed else None,
        "embedding_norm": keys.flag("embed-layernorm"),
        "zero_centered_norms": centred,
        "moe": read_experts(keys, layers, ffn),
        "mla": _mla(keys),
        "unmodelled": "; ".join(_beyond(keys, computed, required)) or None,
    }
    share = keys.number("rotary-percent", 0, 1)
    if positions == "rope":
        found["rotary_dim"] = rotated_entries(share, found["head_dim"], hidden, heads)
    return {key: value for key, value in found.items() if value is not None}


def rotated_entries(
    share: float | None, head: int | None, hidden: int | None, heads: int | None
) -> int | None:
    """Leading entries of a head that are rotated where a share of them is; None for all."""
    width = head or (hidden // heads if hidden and heads else 0)
    return int(share * width) or None if share not in (None, 1) and share and width else None


def _beyond(keys: ForeignKeys, computed: Collection[str], required: bool) -> list[str]:
    """What the model computes that the fields of a shape do not say: the switches `computed`, and
    other values.
    """
    found = [f"--{key}" for key in computed]
    found += [
        f"--{key} {shown(value)}"
        for key, same in _CHOSEN.items()
        if (value := keys.take(key)) is not None and value not in same
    ]
    found += _stretched(keys)
    stands = "the model given stands"
    if required:
        stands = "named in model.unmodelled: estimated without, refused where it would run"
    for key in [note.split()[0][2:] for note in found]:
        keys.mark_untranslated(
            key, _NEAREST.get(key, "no field of a plan's model says it") + f"; {stands}"
        )
    return found


def _rope_scaling(keys: ForeignKeys) -> dict[str, Any] | None:
    """Llama 3's stretch, whose other numbers Megatron-core fixes, or linear interpolation."""
    stretch = keys.number("rope-scaling-factor", 1)
    if keys.flag("use-rope-scaling"):
        return {**_LLAMA3, "factor": stretch or 8.0}
    factor = keys.number("rotary-seq-len-interpolation-factor", 1)
    return None if factor in (None, 1) else {"type": "linear", "factor": factor}


def _stretched(keys: ForeignKeys) -> list[str]:
    """Rotary positions that latent attention stretches by YaRN, unless --rope-type says that it
    does not.
    """
    if not keys.has_key("multi-latent-attention") or keys.take("rope-type") == "rope":
        return []
    factor = keys.number("rotary-scaling-factor", 0)
    return [] if factor in (None, 1) else [f"--rotary-scaling-factor {factor:g}"]


def _kv_heads(keys: ForeignKeys, heads: int | None) -> int | None:
    if keys.flag("group-query-attention"):
        return keys.integer("num-query-groups") or 1
    keys.skip("num-query-groups", "Megatron reads it only with --group-query-attention")
    return keys.integer("num-key-value-heads") or heads


def _vocabulary(keys: ForeignKeys, required: bool, given: ImportOptions) -> int | None:
    vocab = keys.integer("vocab-size")
    wanted = given.vocab_size or given.sets.get("model.vocab")
    if vocab is None and wanted is not None:
        keys.skip("tokenizer-type", "a plan names its text in `corpus`")
        return int(keys.assume("model.vocab", wanted, "given"))
    if given.vocab_size not in (None, vocab):
        raise refuse(
            "vocab_size",
            f"is {given.vocab_size}, but the file says {vocab} (--vocab-size); legal: {vocab}, "
            "or leave it out",
        )
    tokenizer = keys.skip("tokenizer-type", "a plan names its text in `corpus`")
    if vocab is None and (padded := keys.integer("pad-vocab-size-to")) is not None:
        return int(keys.assume("model.vocab", padded, "what --pad-vocab-size-to pads it to"))
    if vocab is None and str(tokenizer) in VOCABULARIES:
        return int(
            keys.assume(
                "model.vocab",
                VOCABULARIES[str(tokenizer)],
                f"what --tokenizer-type {tokenizer} has",
            )
        )
    words = _file(keys.skip("vocab-file", "a plan names its text in `corpus`"))
    if vocab is None and words in VOCABULARIES:
        return int(
            keys.assume(
                "model.vocab", VOCABULARIES[words], f"what the public {words} has (--vocab-file)"
            )
        )
    if vocab is None and required:
        raise lacks(
            "--vocab-size",
            "is missing, and the vocabulary decides the embedding's size; "
            "give it (--vocab-size), or model (--model)",
            {"vocab_size": 32000},
        )
    return vocab


def note_padding(keys: ForeignKeys, key: str, shape: Shape, ranks: int) -> None:
    """Tell the rows by which Megatron and gpt-neox lengthen embedding and head, to a multiple of
    `key` for each of the tensor ranks; a plan has as many as its ranks need.
    """
    each = keys.integer(key)
    more = -shape.vocab % ((each or USUAL_MULTIPLE) * ranks)
    entries = more * shape.hidden * (1 if shape.tied else 2)
    why = f"the vocabulary is padded to {shape.vocab + more:,} rows, + {entries:,} parameters"
    if each is not None:
        keys.mark_untranslated(key, f"{why}; a plan pads it as its tensor ranks need")
    elif more:
        keys.assume(keys.name(key), USUAL_MULTIPLE, f"the default: {why}")


def _file(path: object) -> str:
    """The name of a file whose folder may be a variable, named with its line; empty where there is
    none.
    """
    return re.sub(r" \(line \d+\)$", "", str(path or "")).rpartition("/")[2]


def _positions(keys: ForeignKeys) -> str:
    kind = keys.choice("position-embedding-type", _POSITIONS)
    if keys.flag("use-rotary-position-embeddings"):
        return "rope"
    if kind is None and "rotary-base" in keys:
        return str(keys.assume("model.positions", "rope", "--rotary-base is given"))
    return kind or "learned"


def _mlp(computed: Collection[str], gated: bool, unit: str | None) -> str:
    if unit is not None:
        return unit or "geglu"
    if "squared-relu" in computed:
        return "relu"
    if "quick-geglu" in computed:
        return "geglu"
    return "swiglu" if gated else "gelu"


def _biases(keys: ForeignKeys) -> str:
    none, attention = keys.flag("disable-bias-linear"), keys.flag("add-qkv-bias")
    return "all" if not none else "qkv" if attention else "none"


def _window(keys: ForeignKeys) -> int | None:
    """Keys that a query sees, its own included: Megatron and Transformer Engine count those before
    it ([i - left, i]).
    """
    value = keys.take("window-size")
    if value is None:
        return None
    numbers = [int(n) for n in re.findall(r"-?\d{1,9}", str(value))]
    if not numbers or numbers[0] < -1:
        raise refuse(
            "--window-size",
            f"is {shown(value)}; legal: a pair such as 4095,0, the keys before a query's own and "
            "behind it, -1 for all",
        )
    return None if numbers[0] == -1 else numbers[0] + 1


def _mla(keys: ForeignKeys) -> dict[str, Any] | None:
    if not keys.flag("multi-latent-attention"):
        return None
    defaults = {
        "kv_rank": ("kv-lora-rank", 32),
        "rope_dim": ("qk-pos-emb-head-dim", 64),
        "nope_dim": ("qk-head-dim", 128),
        "value_dim": ("v-head-dim", 128),
    }
    found = {field: keys.integer(key) or default for field, (key, default) in defaults.items()}
    return found | {"q_rank": keys.integer("q-lora-rank")}


def write_model(plan: ResolvedPlan) -> dict[str, Any]:
    """The arguments of a complete plan's shape."""
    s = plan.shape
    longest = max(
        s.max_positions, plan.training.sequence_length
    )  # Megatron asserts that it holds the sequence
    found: dict[str, Any] = {
        "num-layers": s.layers - s.mtp_layers,
        "hidden-size": s.hidden,
        "num-attention-heads": s.heads,
        "ffn-hidden-size": s.ffn,
        "vocab-size": s.vocab,
        "max-position-embeddings": longest,
        "position-embedding-type": "rope" if s.positions == "rope" else "learned_absolute",
        "normalization": "RMSNorm" if s.norm == "rmsnorm" else "LayerNorm",
        "norm-epsilon": s.norm_epsilon,
    }
    if s.mla is None:
        found["kv-channels"] = s.head_dim
        if s.kv_heads != s.heads:
            found |= {"group-query-attention": True, "num-query-groups": s.kv_heads}
    if s.positions == "rope":
        found["rotary-base"] = int(s.rope_theta) if s.rope_theta.is_integer() else s.rope_theta
    if s.rotary_dim is not None and s.head_dim:
        found["rotary-percent"] = s.rotary_dim / s.head_dim
    if s.rope_scaling is not None:
        said = s.rope_scaling.model_dump()
        factor = said.pop("factor")
        if said == _LLAMA3:
            found |= {"use-rope-scaling": True, "rope-scaling-factor": factor}
        elif said == {"type": "linear"}:
            found["rotary-seq-len-interpolation-factor"] = factor
    if s.biases != "all":
        found["disable-bias-linear"] = True
    flags = {
        "swiglu": s.mlp == "swiglu",
        "qk-layernorm": s.qk_norm == "head",
        "add-qkv-bias": s.biases == "qkv",
        "untie-embeddings-and-output-weights": not s.tied,
        "apply-layernorm-1p": bool(s.zero_centered_norms),
    }
    found |= {key: True for key, on in flags.items() if on}
    if s.mtp_layers:
        found["mtp-num-layers"] = s.mtp_layers
    if s.window is not None:
        found["window-size"] = f"{s.window - 1},0"
    if s.full_attention_every is not None:
        found["window-attn-skip-freq"] = s.full_attention_every
    return found | write_experts(s) | _written_mla(s)


def _written_mla(s: Shape) -> dict[str, Any]:
    if s.mla is None:
        return {}
    found: dict[str, Any] = {
        "multi-latent-attention": True,
        "kv-lora-rank": s.mla.kv_rank,
        "qk-pos-emb-head-dim": s.mla.rope_dim,
        "qk-head-dim": s.mla.nope_dim,
        "v-head-dim": s.mla.value_dim,
    }
    return found | ({"q-lora-rank": s.mla.q_rank} if s.mla.q_rank else {})
