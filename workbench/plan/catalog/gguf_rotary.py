"""Stretched rotary frequencies in GGUF files.

Linear and YaRN are metadata. Llama 3's are a tensor, rope_freqs.weight: what each frequency is
divided by, as llama.cpp's converter computes it (`LlamaModel.generate_extra_tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.plan.model.model_shape import Shape
from workbench.untrusted_text import shown

DIVISORS = "rope_freqs.weight"
PUBLISHED: dict[str, Any] = {
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 8192,
}
"""Of every Llama 3; a tensor of few frequencies does not determine them."""
RELATIVE = 2e-6
"""Most that a divisor may differ from the formula's, in fp32."""


def llama3_divisors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """What llama3 divides each of the head's rotary frequencies by, head_dim / 2 numbers.

    Args:
        scaling: factor, low_frequency_factor, high_frequency_factor and original_positions.
        theta: The base frequency.
        head_dim: Width of a head.
    """
    low, high = scaling["low_frequency_factor"], scaling["high_frequency_factor"]
    found = []
    for turns in _turns(theta, head_dim):
        share = (scaling["original_positions"] * turns - low) / (high - low)
        share = min(1.0, max(0.0, share))
        found.append(1.0 / ((1.0 - share) / scaling["factor"] + share))
    return found


def read_llama3(divisors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling whose divisors these are, with a low_frequency_factor of 1.

    The divisors determine the other fields only up to that one; Llama 3's is 1.

    Returns:
        Fields of the scaling; None where no llama3 scaling has these divisors.
    """
    factor = float(f"{max(divisors, default=0.0):.6g}")
    if len(divisors) != head_dim // 2 or not 1 < factor < math.inf:
        return None
    for fields in (PUBLISHED, _fitted(divisors, factor, _turns(theta, head_dim))):
        scaling = {"type": "llama3", "factor": factor, **fields}
        if fields and all(
            math.isclose(a, b, rel_tol=RELATIVE)
            for a, b in zip(llama3_divisors(scaling, theta, head_dim), divisors)
        ):
            return scaling
    return None


def _fitted(divisors: Sequence[float], factor: float, turns: Sequence[float]) -> dict[str, Any]:
    """The line through the shares of the outermost frequencies between both bounds, as fields."""
    shares = [
        (turn, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for turn, divisor in zip(turns, divisors)
        if 1 + RELATIVE < divisor < factor * (1 - RELATIVE)
    ]
    if len({turn for turn, _ in shares}) < 2:
        return {}
    (x, share), (x_last, share_last) = shares[0], shares[-1]
    slope = (share_last - share) / (x_last - x)
    offset = share - slope * x
    if not offset < 0 < slope:
        return {}
    high = round((offset - 1) / offset, 3)
    return {
        "low_frequency_factor": 1.0,
        "high_frequency_factor": high,
        "original_positions": round(slope * (high - 1)),
    }


def _turns(theta: float, head_dim: int) -> list[float]:
    """Rotations of each pair of entries over one token."""
    return [theta ** (-at / head_dim) / (2 * math.pi) for at in range(0, head_dim, 2)]


def read_scaling(of: Callable[..., Any]) -> tuple[dict[str, Any] | None, str | None]:
    """(scaling, what no field says) from metadata; `of` gives the value of a key of the model."""
    kind, factor = of("rope.scaling.type"), of("rope.scaling.factor")
    factor = of("rope.scale_linear") if factor is None else factor
    # llama.cpp takes a factor without type for linear.
    kind = kind or ("linear" if factor not in (None, 0, 1) else "none")
    attention = of("rope.scaling.yarn_attn_factor", of("rope.scaling.attn_factor", 1.0))
    if attention != 1:
        return None, f"rope.scaling.type {shown(kind)}, attention factor {shown(attention)}"
    if kind == "none":
        return None, None
    if kind not in ("linear", "yarn"):
        return None, f"rope.scaling.type {shown(kind)}"
    scaling = {"type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_positions": of("rope.scaling.original_context_length"),
            "beta_fast": of("rope.scaling.yarn_beta_fast"),
            "beta_slow": of("rope.scaling.yarn_beta_slow"),
        }
    return scaling, None


def write_scaling(shape: Shape) -> dict[str, Any]:
    """Metadata of the shape's scaling; the inverse of `read_scaling`."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.type == "llama3":
        return {}
    fields = {
        "rope.scaling.type": scaling.type,
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.original_positions,
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
    }
    return {key: value for key, value in fields.items() if value is not None}


def divisors_of(shape: Shape) -> list[float] | None:
    """Content of rope_freqs.weight; None where a file has none."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.type != "llama3":
        return None
    fields = {"original_positions": shape.max_positions, **scaling.model_dump()}
    return llama3_divisors(fields, shape.rope_theta, int(shape.head_dim or 0))
