"""Data parallelism and ZeRO of Megatron-LM's arguments, and of Megatron-DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.deepspeed.read_deepspeed import stage_of
from workbench.interop.foreign_keys import ForeignKeys

MIB = 2**20
BUCKET, DEEPSPEED_BUCKET = 40_000_000, 500_000_000
"""Elements of a gradient bucket where nobody says: Megatron's smallest, and DeepSpeed's."""
DEEPSPEED = "DeepSpeed's default; the file of --deepspeed-config may say otherwise"
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_data(
    keys: ForeignKeys, replicas: int, kept: Mapping[str, str], stages: int
) -> dict[str, Any]:
    """The section `data` of the strategy; `replicas` ranks share the gradients, which are `kept` in
    a precision, and of pipeline `stages` are reduced once a step.
    """
    torch = keys.flag("use-torch-fsdp2")
    zero = 3 if torch else max(_stage(keys), keys.integer("zero-stage", 0, 3) or 0)
    overlap = _overlap(keys, zero)
    found: dict[str, Any] = {
        "zero": _sharded(keys, zero, kept),
        "overlap": overlap,
        "reduce": "microbatch" if zero >= 2 and stages == 1 else "step",
        **_offload(keys, zero),
        **_bucket(keys, replicas, overlap, 4 if kept["gradient_dtype"] == "fp32" else 2),
    }
    if torch and keys.flag("torch-fsdp2-no-reshard-after-forward"):
        found["keep_gathered"] = True
    instances = keys.integer("num-distributed-optimizer-instances")
    if instances is not None and instances > 1:
        if replicas % instances:
            raise refuse(
                "--num-distributed-optimizer-instances",
                f"is {instances}, which data x context = {replicas} does not divide",
            )
        found["shard"] = replicas // instances
    return found


def _stage(keys: ForeignKeys) -> int:
    """The stage of ZeRO that Megatron-LM's own switches mean."""
    kind = keys.choice("data-parallel-sharding-strategy", _SHARDING)
    fsdp = keys.flag("use-megatron-fsdp") or keys.flag("use-custom-fsdp")
    sharded = keys.flag("use-distributed-optimizer")
    if fsdp:
        return 0 if kind is None else int(kind)
    if kind is not None:
        keys.mark_untranslated(
            "data-parallel-sharding-strategy", "read only with --use-megatron-fsdp"
        )
    return 1 if sharded else 0


def _sharded(keys: ForeignKeys, zero: int, kept: Mapping[str, str]) -> int:
    """The stage of ZeRO that runs, where DeepSpeed is on."""
    if not keys.has_key("deepspeed"):
        return zero
    found = stage_of(keys, zero, kept)
    if not (found or keys.has_key("zero-stage")):
        keys.assume("strategy.data.zero", 0, DEEPSPEED)
    return found


def _overlap(keys: ForeignKeys, zero: int) -> bool:
    """Whether communication of gradients is hidden, by Megatron-LM's switches, or as DeepSpeed does
    it by itself.
    """
    reduced, gathered = (
        bool(keys.flag("overlap-grad-reduce")),
        bool(keys.flag("overlap-param-gather")),
    )
    if reduced and zero and not gathered:
        keys.assume(
            "strategy.data.overlap",
            True,
            "--overlap-grad-reduce alone: gathering parameters is not hidden",
        )
    if not (reduced or gathered) and keys.has_key("deepspeed"):
        return bool(keys.assume("strategy.data.overlap", zero == 3, DEEPSPEED))
    return reduced or gathered


def _bucket(keys: ForeignKeys, replicas: int, overlap: bool, wide: int) -> dict[str, float]:
    """The gradient bucket, of elements of `wide` bytes; nothing where Megatron-LM makes none."""
    elements, why = keys.integer("ddp-bucket-size"), ""
    if elements is None and keys.has_key("deepspeed"):
        elements = keys.integer("zero-reduce-bucket-size")
    if elements is None and keys.has_key("deepspeed"):
        elements, why = DEEPSPEED_BUCKET, DEEPSPEED
    elif elements is None and overlap:
        elements, why = (
            max(BUCKET, 1_000_000 * replicas),
            ("Megatron's default: 4e7 elements, or 1e6 a rank"),
        )
    if elements is None:
        return {}
    size = elements * wide / MIB
    if why:
        keys.assume("strategy.data.bucket_mib", size, why)
    return {"bucket_mib": size}


def _offload(keys: ForeignKeys, zero: int) -> dict[str, Any]:
    """Fields of where the optimizer's states live, and their share, by Megatron's own switch or
    Megatron-DeepSpeed's.
    """
    share = keys.number("optimizer-offload-fraction", 0, 1)
    said = [key for key in ("optimizer-cpu-offload", "cpu-optimizer") if keys.flag(key)]
    if not said or share == 0:
        return {"offload": "none"}
    if zero == 0:
        for key in said:
            keys.mark_untranslated(
                key, "a plan offloads only a sharded optimizer; it stays on the GPU"
            )
        return {"offload": "none"}
    return {"offload": "optimizer"} | ({"offload_ratio": share} if share not in (None, 1) else {})
