"""What a tensor of GEMMs in 8 or 4 bits is: bytes of an element, its scales, and in how many orders
it is kept.

Facts of the recipe, not of a GPU's generation, but for one: GEMMs of fp8 with one scale for a
tensor read either order of an operand on some GPUs, and on others only the one along which they sum
(cuBLASLt's TN), so that a transposed copy is kept (Transformer Engine,
docs/features/low_precision_training, "Handling transposes" of each recipe).
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.machine.hardware import GPU

BOTH_ORDERS = 2
"""Tensors of an operand quantized along rows and along columns."""


@dataclass(frozen=True)
class QuantizedFormat:
    """One recipe's format, as Transformer Engine's recipes keep it."""

    element: float
    """Bytes of an element without its scale."""
    block: int | None = None
    """Elements along a GEMM's inner dimension that share one 8-bit scale; None: no such scale."""
    tensor_scale: bool = True
    """Whether the whole tensor has a scale, for which its largest entry is found first."""

    @property
    def element_bytes(self) -> float:
        """Bytes of an element, its share of the blocks' scales included."""
        return self.element + (0.0 if self.block is None else 1 / self.block)

    def orders(self, gpu: GPU) -> int:
        """Tensors that the GEMMs of forward and backward need of one operand.

        Blocks lie along the inner dimension, which is another one in backward: both orders are
        quantized. So are those of a single scale where GEMMs take TN alone, or the GPU's
        description does not say what they take.
        """
        return 1 if self.block is None and gpu.fp8_gemm_layouts == "all" else BOTH_ORDERS

    def quantization_bytes(self, gpu: GPU, frozen: bool = False) -> tuple[float, float]:
        """Bytes an element of quantizing 16 bits for GEMMs: (a tensor apart, a norm's output).
        Beside frozen weights one GEMM reads each, so that one order is enough (Transformer Engine,
        pytorch/module/linear.py: `set_usage` by `requires_wgrad`).

        Read once, and once more before for the largest entry of a tensor, which a norm's kernel
        finds as it writes its output; where blocks are all that has a scale, it writes 8 bits
        itself (Transformer Engine, csrc/extensions/normalization.cpp).
        """
        written = (1 if frozen else self.orders(gpu)) * self.element_bytes
        return (4 + written, 2 + written) if self.tensor_scale else (2 + written, 0.0)


FORMATS: dict[str, QuantizedFormat] = {
    "fp8": QuantizedFormat(element=1),
    "mxfp8": QuantizedFormat(element=1, block=32, tensor_scale=False),
    "nvfp4": QuantizedFormat(element=0.5, block=16),
}
"""By precision: current and delayed scaling; E8M0 scales of 32 elements (OCP Microscaling Formats
1.0); E4M3 scales of 16 and one for the tensor (2509.25149).
"""
