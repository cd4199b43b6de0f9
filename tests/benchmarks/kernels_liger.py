"""liger-kernel's operators, a peer where it is installed (`pip install liger-kernel==0.8.5`, BSD
2-Clause).

It is no dependency: without it, or where it has no such operator, its place in the benchmark is
empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.kernels_timing import Outputs, Prepare


def version() -> str | None:
    """What is installed."""
    try:
        from importlib.metadata import version

        return version("liger-kernel")
    except ImportError:
        return None


def peers(kernel: str, case: str, device: torch.device) -> dict[str, Prepare]:
    """{"liger": its operator}, or nothing. Its kernels are Triton's alone."""
    made = PEERS.get((kernel, case))
    if made is None or version() is None or device.type != "cuda":
        return {}
    return {"liger": lambda *inputs: partial(made, *inputs)}


def _ops() -> Any:
    import liger_kernel.ops as ops

    return ops


def _rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, _: None) -> Outputs:
    outputs: Outputs = _ops().LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-5)
    return outputs


def _layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    total = x + residual  # it has no such norm of a sum
    return _ops().LigerLayerNormFunction.apply(total, weight, bias, 1e-5), total


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    heads_first = q.transpose(1, 2), k.transpose(1, 2)
    turned = _ops().LigerRopeFunction.apply(*heads_first, cos, sin, None, 1, q.shape[-1])
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def _swiglu(gate: Tensor, up: Tensor) -> Outputs:
    return (_ops().LigerSiLUMulFunction.apply(gate, up),)


def _geglu(gate: Tensor, up: Tensor) -> Outputs:
    return (_ops().LigerGELUMulFunction.apply(gate, up),)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Outputs:
    found = _ops().LigerCrossEntropyFunction.apply(
        logits, targets, None, -100, 0.0, 0.0, "sum", None, False, False, False
    )
    return (found[0],)


def linear_cross_entropy() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """(x [N, D], weight [V, D], targets [N]) -> the summed loss."""
    if version() is None:
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return partial(liger_fused_linear_cross_entropy, reduction="sum")


PEERS: dict[tuple[str, str], Callable[..., Outputs]] = {
    ("add_norm", "rmsnorm"): _rmsnorm,
    ("add_norm", "layernorm"): _layernorm,
    ("rope", ""): _rope,
    ("activation", "swiglu"): _swiglu,
    ("activation", "geglu"): _geglu,
    ("cross_entropy", ""): _cross_entropy,
}
"""(kernel, case) -> its operator."""
DIRECT = frozenset({("cross_entropy", "")})
"""Those that wait for the card, and so cannot be captured."""
