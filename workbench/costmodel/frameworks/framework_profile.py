"""What a software stack keeps and how it computes, from `data/stacks.yaml`; where it says nothing,
as ours does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from workbench import data_files
from workbench.errors import refuse
from workbench.plan.schema import Strategy

WORKBENCH = Strategy().stack
"""The stack that this project is."""


@dataclass(frozen=True)
class FrameworkProfile:
    """What a stack keeps in memory; a negative number means: as the plan says, or as our own
    modules do.
    """

    unfused: bool
    """Whether attention keeps its scores."""
    parameters: float = -1.0
    """Bytes a parameter is stored in."""
    gradients: float = -1.0
    """Bytes a gradient is stored in."""
    accumulator: float = 0.0
    """Bytes of a second gradient, whole on every rank."""
    bf16_accumulator: float = 0.0
    """The same with bf16 only."""
    upcast_gradients: float = 0.0
    """Bytes of a gradient widened for the step, sharded with the optimizer, with fp16 only."""
    optimizer: float = -1.0
    """Bytes of moments and master weights a parameter."""
    optimizer_temporary: float = 0.0
    """Bytes a parameter that the optimizer makes and frees while it steps, sharded with its states.
    """
    gated_saved_tensors: float = 4.0
    """Feed-forward-wide tensors that a gated layer keeps."""
    dropout: float = 0.0
    """1 where dropout keeps masks and moves bytes."""
    keeps_sent_outputs: float = 0.0
    """1 where a pipeline stage keeps what it sent until that microbatch's backward."""
    recompute_full_layer: float = 0.0
    """1 where full recomputation runs a layer to its end, its last sum too."""
    selective_saved_share: float = -1.0
    """Share of a layer's activations that selective recomputation keeps."""
    recompute_alternate_ops: float = 0.0
    """1 where selective recomputation keeps what every second product and attention make, in place
    of a share.
    """
    selective_recompute_share: float = -1.0
    """Share of a layer's forward that selective recomputation repeats; negative: attention alone.
    """
    fused_qkv: float = 0.0
    """1 where query, key and value are one product, and gate and up another."""
    logit_bytes: float = -1.0
    """Bytes a logit takes at the loss's peak."""
    compiled_logit_bytes: float = -1.0
    """The same where a compiler fuses the loss; negative: as without."""
    stale_logit_bytes: float = 0.0
    """Bytes a logit of the microbatch before still takes then."""
    fp8_saved_inputs: float = 0.0
    """1 where fp8 products keep their inputs, and a gate its, in 8 bits."""
    gathered_buffers: float = 0.0
    """Whole hidden-wide tensors that gathers of the sequence hold at once where no pipeline makes
    the host wait.
    """
    gathered_ahead: float = 0.0
    """The same under a pipeline, for every microbatch in flight beyond the second, at most as many
    as without one.
    """
    host_run_ahead: float = 0.0
    """Share by which blocks that another stream still holds add to activations, where tensor ranks
    gather sequences.
    """
    gathered_parameters: float = float("inf")
    """Parameters that ZeRO-3 gathers at once, at most, where it does so weight by weight."""
    root_gathered: float = 0.0
    """1 where ZeRO-3 gathers embedding and head for the whole step, beside the layer at hand and
    the next.
    """
    table_bytes: float = 0.0
    """More bytes of every weight of an embedding or head."""
    bucket_mib: float = 0.0
    """Communication buckets of a sharded fp16 optimizer, MiB."""
    gradients_freed_after_step: float = 0.0
    """1 where gradients are freed after the step, so that the only microbatch's forward finds none.
    """
    offload_checkpoints: float = 0.0
    """1 where the inputs of recomputed layers wait in host memory."""
    single_late_reduce: float = 0.0
    """1 where under ZeRO-1 gradients are all-reduced whole, in one call after the last backward."""
    offload_gradients: float = 0.0
    """1 where gradients leave the card with the optimizer."""


@lru_cache(maxsize=64)
def framework_profile(name: str) -> FrameworkProfile:
    """The stack `name`. Raises `PlanError` where it is not known."""
    entry = _entry(name)
    known = {field.name for field in fields(FrameworkProfile)} - {"unfused"}
    values = {
        key: float(said["value"])
        for key, said in (entry["memory"] | entry["time"]).items()
        if key in known
    }
    return FrameworkProfile(unfused=entry["attention"] == "unfused", **values)


@lru_cache(maxsize=64)
def framework_constants(name: str) -> Mapping[str, float]:
    """Constants of `data/planner.yaml` that the stack `name` changes. Raises `PlanError` where it
    is not known.
    """
    kept = {field.name for field in fields(FrameworkProfile)}
    return {
        key: float(said["value"]) for key, said in _entry(name)["time"].items() if key not in kept
    }


@lru_cache(maxsize=64)
def step_time_interval(name: str) -> tuple[float, float]:
    """(low, high): nine of ten published steps of the stack `name` take between so many times the
    estimate.

    A stack of which nothing is published has the textbook's, the spread over all stacks.
    """
    table = data_files.read("data/stacks.yaml")
    while "interval" not in table[name]:
        name = table[name].get("like", "textbook")
    said = table[name]["interval"]
    return float(said["low"]), float(said["high"])


def _entry(name: str) -> dict[str, Any]:
    """A stack's entry with what it inherits filled in."""
    table = data_files.read("data/stacks.yaml")
    if name not in table:
        raise refuse("strategy.stack", f"is '{name}'; legal: {', '.join(table)}")
    entry = table[name]
    base: dict[str, Any] = {"attention": "flash", "memory": {}, "time": {}}
    if "like" in entry:
        base = _entry(entry["like"])
    merged = {part: {**base[part], **entry.get(part, {})} for part in ("memory", "time")}
    return {**merged, "attention": entry.get("attention", base["attention"])}
