"""A mixture of experts as Megatron-LM's arguments, and back; Megatron-DeepSpeed names and defaults
some otherwise.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import ForeignKeys
from workbench.plan.model.model_shape import Shape
from workbench.untrusted_text import shown

_RUN = re.compile(r"\[([01](?:,[01]){0,9999})\](?:\*(\d{1,4}))?")
_FORK = (
    "deepspeed",
    "topk",
    "expert-interval",
    "moe-loss-coeff",
    "moe-train-capacity-factor",
    "moe-expert-parallel-size",
    "disable-moe-token-dropping",
)
"""Arguments that only Megatron-DeepSpeed has."""
_EVERY = "a plan's model has experts in every layer behind the dense ones; every layer was taken"


def read_experts(keys: ForeignKeys, layers: int | None, ffn: int | None) -> dict[str, Any] | None:
    """The section `moe` of a shape; None for a dense model."""
    experts = keys.integer("num-experts")
    if experts in (None, 1):  # Megatron-DeepSpeed says 1 where nothing is split into experts
        return None
    fork = any(keys.has_key(key) for key in _FORK)
    width = keys.integer("moe-ffn-hidden-size") or ffn
    shared, left = divmod(keys.integer("moe-shared-expert-intermediate-size", 0) or 0, width or 1)
    if left:
        keys.mark_untranslated(
            "moe-shared-expert-intermediate-size",
            f"a plan's shared experts are as wide as the others, {width}; {shared} were taken",
        )
    found = {"experts": experts, "top_k": _chosen(keys, fork), "ffn": width, "shared": shared}
    if fork:
        _interval(keys)
    balancing, router = _balancing(keys), _router(keys)
    score = str(router.get("scores", "softmax"))
    return {
        **found,
        **router,
        "first_dense": _first_dense(keys, layers),
        **_gates(keys, balancing, score),
        "auxiliary_loss": _auxiliary_loss(keys, fork, balancing),
        **_capacity(keys, fork),
    }


def read_spread(keys: ForeignKeys, tensor: int, has_experts: bool) -> dict[str, int]:
    """The section `expert` of the strategy beside `tensor` ranks; Megatron-DeepSpeed splits an
    expert only where it is asked to.
    """
    own, size = (
        keys.integer("expert-tensor-parallel-size"),
        keys.integer("expert-model-parallel-size") or keys.integer("moe-expert-parallel-size"),
    )
    asked = keys.flag("enable-expert-tensor-parallelism")
    if own is not None and not has_experts:
        keys.mark_untranslated("expert-tensor-parallel-size", "the model has no experts")
        own = None
    unsplit = has_experts and tensor > 1 and not asked
    if own is None and unsplit and any(keys.has_key(key) for key in _FORK):
        own = int(keys.assume("strategy.expert.tensor", 1, "Megatron-DeepSpeed's default"))
    return {"size": size or 1} | ({} if own is None else {"tensor": own})


def _chosen(keys: ForeignKeys, fork: bool) -> int:
    """Experts that a token visits."""
    found = keys.integer("moe-router-topk") or keys.integer("topk")
    if found is not None:
        return found
    return int(
        keys.assume(
            "model.moe.top_k",
            1 if fork else 2,
            "Megatron-DeepSpeed's default" if fork else "Megatron's default",
        )
    )


def _router(keys: ForeignKeys) -> dict[str, Any]:
    """Fields of how experts are chosen beyond the largest of a softmax, where the file has any."""
    groups, top = keys.integer("moe-router-num-groups"), keys.integer("moe-router-group-topk")
    found = {
        "scores": keys.choice("moe-router-score-function", {s: s for s in ("softmax", "sigmoid")}),
        "score_bias": keys.flag("moe-router-enable-expert-bias"),
        "scale": keys.number("moe-router-topk-scaling-factor", 1e-9),
        # Megatron limits a token to groups only where --moe-router-group-topk is given.
        "groups": groups if groups != 1 and top else None,
        "top_groups": top if groups not in (None, 1) else None,
    }
    return {field: value for field, value in found.items() if value is not None}


def _interval(keys: ForeignKeys) -> None:
    """Tell experts that are in every n-th layer alone."""
    every = keys.integer("expert-interval")
    if every is None and "moe-layer-freq" not in keys:
        keys.assume("--expert-interval", 2, f"Megatron-DeepSpeed's default; {_EVERY}")
    elif every not in (None, 1):
        keys.mark_untranslated("expert-interval", _EVERY)


def _balancing(keys: ForeignKeys) -> str:
    """How experts are balanced, in Megatron's word; a list of several is noted, and reads as a
    loss.
    """
    found = keys.take("moe-router-load-balancing-type")
    if found not in (None, "seq_aux_loss", "none"):
        keys.mark_untranslated(
            "moe-router-load-balancing-type",
            "a plan balances experts by a loss over each sequence, or not",
        )
    return str(found or "aux_loss")


def _gates(keys: ForeignKeys, balancing: str, score: str) -> dict[str, bool]:
    """Whether a token's gates add up to one, where that is not as the shape's default has it.

    A softmax over all experts, before they are chosen (`--moe-router-pre-softmax`), leaves the
    gates as they are; one over the chosen experts makes them add up to one, and sigmoid gates are
    divided by their sum.
    """
    as_they_are = bool(keys.flag("moe-router-pre-softmax")) and score == "softmax"
    return {"renormalise": False} if as_they_are or balancing == "sinkhorn" else {}


def _auxiliary_loss(keys: ForeignKeys, fork: bool, balancing: str) -> float:
    """The coefficient of the load-balancing loss."""
    said = _coefficient(keys)
    if balancing in ("none", "sinkhorn"):
        return 0.0
    if said is None and fork:
        return float(keys.assume("model.moe.auxiliary_loss", 0.1, "Megatron-DeepSpeed's default"))
    return (
        float(keys.assume("model.moe.auxiliary_loss", 0.0, "Megatron's default"))
        if said is None
        else said
    )


def _coefficient(keys: ForeignKeys) -> float | None:
    """The coefficient that is said; of several, one for each way of balancing, the first, which is
    noted.
    """
    found = keys.take("moe-aux-loss-coeff")
    if isinstance(found, list) and found:
        keys.mark_untranslated(
            "moe-aux-loss-coeff", f"a plan has one coefficient; {shown(found[0])} was taken"
        )
        found = found[0]
    if found is None:
        return keys.number("moe-loss-coeff", 0)
    if isinstance(found, bool) or not isinstance(found, int | float) or found < 0:
        raise refuse("--moe-aux-loss-coeff", f"is {shown(found)}; must be a number of at least 0")
    return float(found)


def _capacity(keys: ForeignKeys, fork: bool) -> dict[str, float]:
    """Rows that an expert takes, in even shares; nothing where no token is dropped."""
    key = (
        "moe-train-capacity-factor"
        if "moe-train-capacity-factor" in keys
        else "moe-expert-capacity-factor"
    )
    found = keys.number(key)
    if fork and keys.flag("disable-moe-token-dropping"):
        return {}
    if found is None and fork:
        found = keys.assume(
            "model.moe.capacity", 1.0, "Megatron-DeepSpeed's default of --moe-train-capacity-factor"
        )
    elif found is not None and found > 0:
        keys.mark_untranslated(
            key,
            "taken as model.moe.capacity: a plan limits an expert's tokens in each "
            "sequence, Megatron in "
            "each micro-batch",
        )
    return {"capacity": found} if found is not None and found > 0 else {}


def _first_dense(keys: ForeignKeys, layers: int | None) -> int:
    value = keys.take("moe-layer-freq")
    if value in (None, 1):
        return 0
    kinds = _pattern(str(value).replace(" ", ""))
    if kinds and kinds == sorted(kinds) and kinds[-1] and layers in (None, len(kinds)):
        return kinds.count(0)
    keys.mark_untranslated(
        "moe-layer-freq", "a plan's dense layers are the first ones; none was taken"
    )
    return 0


def _pattern(text: str) -> list[int]:
    """What `([0]*3+[1]*58)`, `[0]+[1]*15` or `[0,1,1]` says of each layer: 1 has experts; empty for
    another text.
    """
    parts = text.removeprefix("(").removesuffix(")").split("+")
    runs = [_RUN.fullmatch(part) for part in parts[:1000]]
    return (
        [int(kind) for run in runs if run for kind in run[1].split(",") * int(run[2] or 1)]
        if all(runs)
        else []
    )


def write_experts(s: Shape) -> dict[str, Any]:
    """The arguments of a shape's experts; none for a dense model."""
    if s.moe is None:
        return {}
    found: dict[str, Any] = {
        "num-experts": s.moe.experts,
        "moe-router-topk": s.moe.top_k,
        "moe-ffn-hidden-size": s.moe.ffn,
    }
    if s.moe.shared:
        found["moe-shared-expert-intermediate-size"] = s.moe.shared * s.moe.ffn
    if s.moe.first_dense:
        routed = s.layers - s.mtp_layers - s.moe.first_dense
        found["moe-layer-freq"] = f"([0]*{s.moe.first_dense}+[1]*{routed})"
    router = {
        "moe-router-score-function": s.moe.scores if s.moe.scores != "softmax" else None,
        "moe-router-enable-expert-bias": s.moe.score_bias or None,
        "moe-router-topk-scaling-factor": s.moe.scale if s.moe.scale != 1 else None,
        "moe-router-num-groups": s.moe.groups,
        "moe-router-group-topk": s.moe.top_groups,
    }
    found |= {key: value for key, value in router.items() if value is not None}
    if not s.moe.renormalise:
        found["moe-router-pre-softmax"] = True
    found["moe-router-load-balancing-type"] = "seq_aux_loss" if s.moe.auxiliary_loss else "none"
    if s.moe.auxiliary_loss:
        found["moe-aux-loss-coeff"] = s.moe.auxiliary_loss
    return found | (
        {"moe-expert-capacity-factor": s.moe.capacity} if s.moe.capacity is not None else {}
    )
