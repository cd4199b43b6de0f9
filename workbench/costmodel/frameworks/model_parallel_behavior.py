"""How tensor, context and pipeline ranks of a framework exchange activations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelParallelBehavior:
    """Decides what exchanged activations take in memory, and what their exchange runs beside."""

    overlap_tensor: bool = False
    """Whether GEMMs are split so that tensor-parallel collectives overlap them."""
    overlap_backward: bool = False
    """Whether a column-parallel layer's backward reduces the input's gradient beside the GEMM of
    the weight's, and all-gathers a sequence-parallel input beside that of the input's.
    """
    regathers_inputs: bool = False
    """Whether column-parallel layers all-gather sequence shards into temporaries, in backward once
    more; else what they gather is in `gathered_buffers`.
    """
    gathered_buffers: float = 0.0
    """Buffers of an all-gathered hidden activation that tensor parallelism keeps."""
    recorded_sequences: float = 0.0
    """Full-sequence activations of a layer, in forward as in backward, that NCCL's stream may still
    use when they are freed.
    """
    keeps_exchanged_output: bool = True
    """Whether Ulysses saves attention's output both before and after its all-to-all."""
    overlap_sends: bool = False
    """Whether sends between stages run beside compute in interleaved schedules."""
    blocking_sends: bool = False
    """Whether a stage waits for what it sends before it goes on, and not only for what it
    receives.
    """
    scatter_gather: bool = False
    """Whether what crosses a stage boundary is scattered over tensor ranks (2104.04473, 4.1)."""
    keeps_sent_outputs: bool = False
    """Whether a pipeline stage keeps what it sent until that microbatch's backward."""
    ordered_transfers: bool = False
    """Whether transfers of a custom schedule progress as the plan's backend lets them, in the order
    in which stages post them; else they arrive as soon as they are sent.
    """
