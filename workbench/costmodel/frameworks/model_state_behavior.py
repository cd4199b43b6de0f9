"""What a framework stores of parameters, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelStateBehavior:
    """Decides bytes of model states, and what accumulating gradients and stepping allocate.

    Bytes are those of a parameter in runs of 16 bits and less; in wider ones states are as wide.
    """

    parameters: float | None = None
    """Bytes per stored parameter that is trained; None: those of the plan's precision, in which a
    frozen base is.
    """
    gradients: float | None = None
    """Bytes per stored gradient; None: those it is reduced in."""
    optimizer: float | None = None
    """Bytes of fp32 moments and master weights per parameter; None: as the optimizer says."""
    precision_aware_master: float | None = None
    """Bytes of a master weight beside moments narrower than fp32 in bf16 runs, whose optimizer also
    takes 16-bit gradients as they are; None: those of other master weights, and gradients are
    upcast.
    """
    upcasts_moments: bool = False
    """Whether the step upcasts moments narrower than fp32, those of a whole group of parameters at
    once.
    """
    accumulator: float = 0.0
    """Bytes per parameter of a second, unsharded gradient buffer."""
    bf16_accumulator: float = 0.0
    """The same in bf16 runs only."""
    fp16_upcast_gradients: float = 0.0
    """Bytes per gradient upcast for the step, sharded with the optimizer states, in fp16 runs only.
    """
    fp8_weights: bool = False
    """Whether weights of fp8 GEMMs are kept in 8 bits, in every order that the GEMMs need."""
    fp8_parameters: bool = False
    """Whether these replace the stored parameter."""
    frees_gradients: bool = False
    """Whether gradients are freed after the step, so that the forward of a single microbatch finds
    none.
    """
    fused_accumulation: bool = False
    """Whether GEMMs add weight gradients to the accumulated ones themselves."""
    dummy_weight_gradients: bool = False
    """Whether such a GEMM leaves a placeholder of its weight's shape, one of each shape."""
    upcasts_in_registers: bool = False
    """Whether a GPU adds 16-bit gradients to fp32 ones without a copy of them in fp32."""
    upcasts_whole_shard: bool = False
    """Whether the optimizer upcasts all gradients of its shard before its step."""
    flattens_gradients: bool = False
    """True where ZeRO copies them into one tensor before, as wide as they are."""
    sub_group_parameters: float = float("inf")
    """Most parameters of its shard that ZeRO-3 steps at once."""
    casts_all_states: bool = False
    """Whether the step casts weights and moments that are stored narrower than it computes, beside
    the gradients.
    """
    step_traffic: float | None = None
    """Bytes that a step of two fp32 moments moves of a parameter whose optimizer states a rank
    holds, in 16-bit runs; None: every state is read and written once, the gradient read twice.
    """
    bucket_traffic: float = 0.0
    """Bytes that a step moves of a gradient on its way into a bucket and back, in 16-bit runs."""
    optimizer_temporary: float = 0.0
    """Bytes per parameter that the optimizer allocates during its step, sharded with its states."""

    def parameter_bytes(self, planned: float) -> float:
        """Bytes per stored parameter, given those of the plan's precision."""
        return planned if self.parameters is None or planned >= 4 else self.parameters

    def gradient_bytes(self, planned: float) -> float | None:
        """Bytes per stored gradient, given the bytes of the plan's precision; None: those it is
        reduced in.
        """
        return self.gradients if planned < 4 else None

    def master_bytes(
        self, planned: float, moments: int, precision_aware: bool, master: float, auto: bool
    ) -> float:
        """Bytes of a master weight.

        Args:
            planned: Bytes of a parameter in the plan's precision.
            moments: Moments of the optimizer per parameter.
            precision_aware: Whether the optimizer is, as `is_precision_aware` says.
            master: Bytes of a master weight by the plan.
            auto: Whether the plan leaves master weights to the framework.
        """
        if planned < 4 and auto and self.optimizer is not None:
            master = self.optimizer - 4 * moments
            if precision_aware and self.precision_aware_master is not None:
                master = self.precision_aware_master
        return max(0.0, master)

    def is_precision_aware(self, precision: str, narrow_moments: bool) -> bool:
        """Whether the optimizer keeps master weights itself and takes gradients as they are.

        Args:
            precision: Precision of the run. With 8-bit GEMMs whose scaling is not delayed
                Megatron-core keeps and casts both (optimizer_config.py,
                use_precision_aware_optimizer_no_fp8_or_ds_fp8); 16 bits complete a bf16 parameter
                alone.
            narrow_moments: Whether moments are narrower than fp32.
        """
        return precision == "bf16" and narrow_moments and self.precision_aware_master is not None

    def accumulator_bytes(self, precision: str) -> float:
        """Bytes per parameter of a second, unsharded gradient buffer."""
        return self.accumulator + self.bf16_accumulator * (precision == "bf16")

    def upcast_gradient_bytes(self, precision: str) -> float:
        """Bytes per gradient upcast for the step, sharded with the optimizer states."""
        return self.fp16_upcast_gradients * (precision == "fp16")

    def fp8_weight_bytes(self, parameter: float, held: float, precision: str) -> float:
        """Bytes that a weight of fp8 GEMMs takes beside its stored parameter, or in place of it.

        Args:
            parameter: Bytes of the stored parameter.
            held: Bytes of an element in 8 or 4 bits, in all orders that are kept.
            precision: Precision of the GEMMs.
        """
        if not self.fp8_weights:
            return 0.0
        # Weights in 4 bits stand beside the 16-bit ones.
        replaces = self.fp8_parameters and precision != "nvfp4"
        return held - replaces * parameter

    @property
    def separate_gradient(self) -> bool:
        """Whether a weight gradient is a tensor of its own before it is accumulated."""
        return not self.fused_accumulation

    @property
    def gradient_placeholder(self) -> bool:
        """Whether a placeholder stands for the gradient that a GEMM accumulates itself."""
        return self.fused_accumulation and self.dummy_weight_gradients
