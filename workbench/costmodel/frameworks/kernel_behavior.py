"""Which kernels a framework runs, and what launches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.plan.schema import FrameworkAttention

Graphs = Literal[
    "none",
    "attn",
    "attn mlp",
    "attn moe_router moe_preprocess",
    "moe_router moe_preprocess",
    "mlp",
    "full_iteration",
]
"""Parts as Megatron-core's --cuda-graph-modules names them; full_iteration is all of a step."""


@dataclass(frozen=True)
class KernelBehavior:
    """Decides rates, launches and temporaries of attention, GEMMs and memory-bound operators."""

    attention: FrameworkAttention = "flash-2"
    """Generation of its fused attention, of `attention_kernels` in `data/planner.yaml`; unfused:
    scores pass through memory, and are saved. A plan's own `strategy.attention` replaces it.
    """
    fused_qkv: bool = False
    """Whether query, key and value are one GEMM, and gate and up another."""
    single_norm: bool = False
    """Whether eager RMSNorm is one kernel, not a chain of elementwise ones."""
    host: Literal["python", "cpp"] = "python"
    """What launches kernels: python (eager or compiled PyTorch) or cpp."""
    graphs: Graphs = "none"
    """Parts of a layer whose kernels replayed CUDA graphs launch, without the host."""
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scaling of its fp8 GEMMs."""
    fused_quantization: bool = False
    """Whether norms write their output in 8 bits themselves, as far as the recipe lets them."""
    fp8_cast_bytes: float = 0.0
    """Bytes of temporaries for each entry that is cast to fp8 before a GEMM."""
    reduces_fp8_scales: bool = False
    """Whether fp8 scales are those of whole tensors, over the ranks that hold parts of them."""
    pads_values: bool = False
    """Whether attention's kernels take latent attention's values padded to the width of its keys,
    and every tensor rank has the projections onto its latents.
    """
    counts_operators: bool = False
    """Whether its operators are known one by one: what each moves on a GPU
    (`compute/engine_traffic/engine_operators.py`), takes on a CPU (`workbench calibrate`) and
    allocates in attention's backward; else they are textbook counts.
    """
    fused_seams: bool = False
    """Whether the plan's `kernels` choose fused or compiled seams whose memory is counted and whose
    cost is benchmarked (`data/benchmarks`); else they are part of the textbook counts.
    """

    @property
    def fused_attention(self) -> bool:
        """True where attention is one kernel."""
        return self.attention != "unfused"

    def runs_fused_seams(self, kernels: str) -> bool:
        """Whether counted and benchmarked seams run under the plan's `kernels`."""
        return self.fused_seams and kernels != "eager"
