"""How a framework reduces gradients, shards states over data-parallel ranks (ZeRO, FSDP) and
offloads them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataParallelBehavior:
    """Decides which collectives of data parallelism run, beside what, and which buffers they have.

    How much of a collective an overlap hides is a constant of the hardware.
    """

    overlap_reduction: bool = False
    """Whether gradients are reduced while the last backward runs."""
    overlap_pipeline_reduction: bool = False
    """The same under a pipeline."""
    single_late_reduce: bool = False
    """Whether ZeRO-1 all-reduces all gradients in one call after the last backward."""
    reduces_whole: bool = False
    """Whether ZeRO-1 all-reduces buckets of gradients in place of scattering their sums."""
    broadcasts_parameters: bool = False
    """Whether ZeRO-1 and 2 give every tensor to one rank, which broadcasts it after its step."""
    overlap_parameters: bool = False
    """Whether exchanges of updated parameters (ZeRO-1) run beside the first forward."""
    overlap_gather: bool = False
    """Whether ZeRO-3 all-gathers ahead of the layer that computes."""
    reduces_units: bool = False
    """Whether ZeRO-2 reduces the gradients of a layer in one call, as ZeRO-3 does, not in buckets.
    """
    fp8_gathers: bool = False
    """Whether ZeRO-3 all-gathers weights in fp8 for fp8 GEMMs."""
    gathers_tensors: bool = False
    """True where ZeRO-3 all-gathers each tensor in a call of its own, not a layer's in one."""
    gathered_parameters: float = float("inf")
    """Most parameters that ZeRO-3 all-gathers at once, where it does so weight by weight."""
    gathered_root: bool = False
    """Whether ZeRO-3 keeps embedding and head unsharded throughout the step (FSDP's root unit)."""
    ends_are_units: bool = False
    """Whether position tables and norms at the model's ends are all-gathered in one unit with
    embedding and head.
    """
    frees_buffers: bool = False
    """Whether gathered parameters and gradients to reduce are allocated for the phase of a step
    that needs them; else the most of them is taken to stay allocated.
    """
    packs_buckets: bool = False
    """Whether buckets are packed as `runtime_facts/bucket_packing.py` packs tensors; else they are
    taken to be equally large.
    """
    fp16_buckets_mib: float = 0.0
    """Communication buckets of a sharded fp16 optimizer, MiB."""
    offload_gradients: bool = False
    """Whether gradients are offloaded with the optimizer states."""
    stages_offload: bool = False
    """Whether shards of gradients leave the GPU once a microbatch has reduced them, and weights
    return through two buffers of bounded size.
    """
    overlap_offload: bool = False
    """Whether transfers to the host have a stream and two buffers of their own."""

    def reduces_late(self, zero: int) -> bool:
        """Whether ZeRO stage `zero` reduces all gradients in one call after the last backward."""
        return zero == 1 and self.single_late_reduce

    def gathers_fp8(self, precision: str) -> bool:
        """Whether ZeRO-3 all-gathers weights in 8 bits in runs of `precision`: with one scale for a
        tensor; those in blocks travel in 16 bits (torchtitan docs/mxfp8.md, Composability).
        """
        return precision == "fp8" and self.fp8_gathers

    def bucket_bytes(self, precision: str, zero: int) -> float:
        """Bytes of communication buckets beside the reduced gradients."""
        return self.fp16_buckets_mib * 2**20 * (precision == "fp16" and zero >= 1)
