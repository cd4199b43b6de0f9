"""Framework profiles of `data/frameworks/`: what Megatron-LM, DeepSpeed, FSDP2 and others do
differently.

Where a profile says nothing, the framework is taken to behave as this engine does.
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
"""Name of this project's own framework profile."""


@dataclass(frozen=True)
class FrameworkProfile:
    """What a framework keeps in memory and how it computes.

    A negative number means: as the plan says, or as this engine's modules do. Switches are 0 or 1.
    """

    unfused: bool
    """Whether attention saves its scores."""
    parameters: float = -1.0
    """Bytes per stored parameter."""
    gradients: float = -1.0
    """Bytes per stored gradient."""
    accumulator: float = 0.0
    """Bytes per parameter of a second, unsharded gradient buffer."""
    bf16_accumulator: float = 0.0
    """The same in bf16 runs only."""
    upcast_gradients: float = 0.0
    """Bytes per gradient upcast for the step, sharded with the optimizer states, in fp16 runs
    only.
    """
    optimizer: float = -1.0
    """Bytes of optimizer states (moments and master weights) per parameter."""
    optimizer_temporary: float = 0.0
    """Bytes per parameter that the optimizer allocates during its step, sharded with its states."""
    upcasts_whole_shard: float = 0.0
    """1 where the optimizer upcasts all gradients of its shard before its step."""
    grouped_workspace_mib: float = 0.0
    """MiB of the GEMM workspaces that grouped GEMMs of experts have besides."""
    gated_saved_tensors: float = 4.0
    """Tensors of feed-forward width that a gated layer saves."""
    dropout: float = 0.0
    """1 where dropout saves masks and moves bytes."""
    keeps_sent_outputs: float = 0.0
    """1 where a pipeline stage keeps what it sent until that microbatch's backward."""
    recompute_full_layer: float = 0.0
    """1 where full recompute runs a layer to its end, its last all-reduce included."""
    selective_saved_share: float = -1.0
    """Share of a layer's activations that selective recompute saves."""
    recompute_alternate_ops: float = 0.0
    """1 where selective recompute saves attention and every second GEMM's result, in place of a
    share.
    """
    selective_recompute_share: float = -1.0
    """Share of a layer's forward that selective recompute repeats; negative: attention alone."""
    fused_qkv: float = 0.0
    """1 where query, key and value are one GEMM, and gate and up another."""
    logit_bytes: float = -1.0
    """Bytes per logit at the loss's peak."""
    compiled_logit_bytes: float = -1.0
    """The same where a compiler fuses the loss; negative: as without."""
    fp8_saved_inputs: float = 0.0
    """1 where fp8 GEMMs save their inputs in 8 bits."""
    fp8_weight_copies: float = 0.0
    """8-bit tensors of each weight of fp8 GEMMs."""
    fp8_parameters: float = 0.0
    """1 where these replace the stored parameter."""
    routed_copies: float = 2.0
    """Tensors of routed tokens that an MoE layer saves: the experts' input, and their output where
    the router's weights multiply that.
    """
    keeps_exchanged_output: float = 1.0
    """1 where Ulysses saves attention's output both before and after its all-to-all."""
    gathered_buffers: float = 0.0
    """Buffers of an all-gathered hidden activation that tensor parallelism keeps."""
    recorded_sequences: float = 0.0
    """Full-sequence activations of a layer, in forward as in backward, that NCCL's stream may still
    use when they are freed.
    """
    gathered_parameters: float = float("inf")
    """Most parameters that ZeRO-3 all-gathers at once, where it does so weight by weight."""
    root_gathered: float = 0.0
    """1 where ZeRO-3 keeps embedding and head unsharded throughout the step (FSDP's root unit)."""
    bucket_mib: float = 0.0
    """Communication buckets of a sharded fp16 optimizer, MiB."""
    gradients_freed_after_step: float = 0.0
    """1 where gradients are freed after the step, so that the forward of a single microbatch finds
    none.
    """
    offload_checkpoints: float = 0.0
    """1 where inputs of recomputed layers are offloaded to host memory."""
    single_late_reduce: float = 0.0
    """1 where ZeRO-1 all-reduces all gradients in one call after the last backward."""
    offload_gradients: float = 0.0
    """1 where gradients are offloaded with the optimizer states."""


@dataclass(frozen=True)
class FrameworkBehavior:
    """How a framework computes and communicates, as its documentation or source says.

    Switches are 0 or 1. How much a switch is worth is a constant of the hardware.
    """

    attention_kernel: str = "flash-2"
    """Generation of its fused attention: a name in `attention_kernels` of `data/planner.yaml`."""
    host: str = "python"
    """What launches kernels: python (eager or compiled PyTorch) or cpp."""
    narrow_gemm: str = "tensorwise"
    """Scaling of its fp8 GEMMs: tensorwise or rowwise."""
    overlap_reduction: float = 0.0
    """1 where gradients are reduced while the last backward runs."""
    overlap_pipeline_reduction: float = 0.0
    """The same under a pipeline."""
    overlap_parameters: float = 0.0
    """1 where all-gathers of updated parameters (ZeRO-1) run beside the first forward."""
    overlap_gather: float = 0.0
    """1 where ZeRO-3 all-gathers ahead of the layer that computes."""
    narrow_gathers: float = 0.0
    """1 where ZeRO-3 all-gathers weights in fp8 for fp8 GEMMs."""
    overlap_tensor: float = 0.0
    """1 where GEMMs are split so that tensor-parallel collectives overlap them."""
    overlap_dispatch: float = 0.0
    """1 where the experts' all-to-all runs beside compute."""
    overlap_offload: float = 0.0
    """1 where transfers to the host have a stream and two buffers of their own."""
    overlap_boundary: float = 0.0
    """1 where sends between stages run beside compute in interleaved schedules."""
    single_norm: float = 0.0
    """1 where eager RMSNorm is one kernel, not a chain of elementwise ones."""
    fused_quantization: float = 0.0
    """1 where norms and activations write their output in fp8 themselves."""
    fused_accumulation: float = 0.0
    """1 where weight gradients are added to the accumulated ones inside the GEMM."""
    dummy_weight_gradients: float = 0.0
    """1 where such a GEMM leaves a placeholder of its weight's shape, one of each shape."""
    scatter_gather_boundary: float = 0.0
    """1 where what crosses a stage boundary is scattered over tensor ranks (2104.04473, 4.1)."""
    grouped_kernel: float = 1.0
    """1 where the GEMMs of all experts are one kernel; 0: one call an expert."""
    dispatches_from_host: float = 0.0
    """1 where the host waits for the counts of routed tokens and sorts them by operators of its own
    in every MoE layer.
    """
    loss_passes: float = 7.0
    """Passes of the loss over its fp32 logits, forward and backward."""


INHERITED = ("memory", "behavior", "recipes")
"""Parts of a profile's file; `recipes` are behavior by GPU."""


@lru_cache(maxsize=1)
def framework_table() -> Mapping[str, Mapping[str, Any]]:
    """Every file of `data/frameworks/` and the versions in it, by profile name."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, entry in data_files.read_data_folder("data/frameworks").items():
        found[name] = entry
        found |= entry.get("versions", {})
    return found


@lru_cache(maxsize=64)
def framework_profile(name: str) -> FrameworkProfile:
    """Framework profile by name.

    Raises:
        PlanError: There is no profile of this name.
    """
    entry = _entry(name)
    known = {field.name for field in fields(FrameworkProfile)} - {"unfused"}
    values = {
        key: float(said["value"])
        for key, said in (entry["memory"] | entry["behavior"]).items()
        if key in known
    }
    return FrameworkProfile(unfused=entry["attention"] == "unfused", **values)


@lru_cache(maxsize=256)
def framework_behavior(name: str, gpu: str = "") -> FrameworkBehavior:
    """Documented behavior of the framework profile `name`, on a GPU that it has recipes for.

    Raises:
        PlanError: There is no profile of this name.
    """
    known = {field.name for field in fields(FrameworkBehavior)}
    entry = _entry(name)
    stated = entry["behavior"] | entry["recipes"].get(gpu, {})
    return FrameworkBehavior(**{key: one["value"] for key, one in stated.items() if key in known})


@lru_cache(maxsize=64)
def framework_buffers(name: str) -> Mapping[str, float]:
    """Memory constants of `data/planner.yaml` that the framework profile `name` states itself."""
    profile_fields = {field.name for field in fields(FrameworkProfile)}
    return {
        key: float(said["value"])
        for key, said in _entry(name)["memory"].items()
        if key not in profile_fields
    }


def _entry(name: str) -> dict[str, Any]:
    """A profile's entry, with what it inherits by `like` filled in."""
    table = framework_table()
    if name not in table:
        raise refuse("strategy.stack", f"is '{name}'; legal: {', '.join(table)}")
    entry = table[name]
    base: dict[str, Any] = {"attention": "flash", "memory": {}, "behavior": {}, "recipes": {}}
    if "like" in entry:
        base = _entry(entry["like"])
    merged = {part: {**base[part], **entry.get(part, {})} for part in INHERITED}
    return {**merged, "attention": entry.get("attention", base["attention"])}
