"""How a framework routes tokens to the experts of an MoE layer and runs them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertBehavior:
    """Decides kernels, exchanges and saved tensors of routed experts."""

    grouped_gemm: bool = True
    """Whether the GEMMs of all experts are one kernel; else one call an expert."""
    workspace_mib: float = 0.0
    """MiB of the GEMM workspaces that grouped GEMMs of experts have besides."""
    dispatches_from_host: bool = False
    """Whether the host waits for the counts of routed tokens and sorts them by operators of its own
    in every MoE layer.
    """
    overlap_dispatch: bool = False
    """Whether the experts' all-to-all runs beside compute."""
    routed_copies: float = 2.0
    """Tensors of routed tokens that an MoE layer saves: the experts' input, and their output where
    the router's weights multiply that.
    """
    adds_biases: bool = False
    """Whether the biases of experts' outputs are added one expert after another, weighted by the
    router; else a GEMM adds them.
    """
    fp32_router: bool = False
    """Whether the router's GEMM runs in fp32 whatever the plan's precision."""

    @property
    def weights_outputs(self) -> bool:
        """Whether the router's weights multiply the experts' outputs; else their activations,
        before the last GEMM.
        """
        return self.routed_copies > 1
