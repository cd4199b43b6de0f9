"""Rotary frequencies, stretched as a shape's `rope_scaling` says; as transformers computes them,
here in fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.plan.model.model_shape import Shape
from workbench.plan.model.rope_scaling import RopeScaling


def scaled_frequencies(exponent_K: Tensor, shape: Shape, length: Tensor) -> Tensor:
    """Radians a token of each pair [head_dim / 2], of a shape with `rope_scaling`.

    Args:
        exponent_K: Share of the head before each pair, in fp64.
        shape: The model.
        length: Tokens of the sequence, a scalar: dynamic scaling depends on them.
    """
    scaling, theta = shape.rope_scaling, shape.rope_theta
    assert scaling is not None
    original = scaling.original_positions or shape.max_positions
    if scaling.type == "dynamic":
        return _dynamic(exponent_K, theta, scaling, length.to(torch.float64) / original)
    plain_K: Tensor = theta**-exponent_K
    if scaling.type == "linear":
        return plain_K / scaling.factor
    if scaling.type == "llama3":
        return _llama3(plain_K, scaling, original)
    return _yarn(plain_K, theta, scaling, original)


def _dynamic(exponent_K: Tensor, theta: float, scaling: RopeScaling, longer: Tensor) -> Tensor:
    """NTK-aware: the base grows so that the lowest frequency turns as if divided by the stretch."""
    dim = 2 * len(exponent_K)
    stretch = (scaling.factor * longer - (scaling.factor - 1)).clamp(min=1.0)
    base = theta * stretch ** (dim / (dim - 2))
    frequencies_K: Tensor = base**-exponent_K
    return frequencies_K


def _llama3(plain_K: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Grattafiori et al. 2024 (arXiv 2407.21783): divided by the factor below one number of
    rotations, as they are above another, interpolated between.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert low is not None and high is not None
    rotations_K = original * plain_K / (2 * math.pi)
    stays_K = ((rotations_K - low) / (high - low)).clamp(0, 1)
    return plain_K * (stays_K + (1 - stays_K) / scaling.factor)


def _yarn(plain_K: Tensor, theta: float, scaling: RopeScaling, original: int) -> Tensor:
    """Peng et al. 2023 (arXiv 2309.00071): a ramp over the index of the pair."""

    def pair(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return len(plain_K) * math.log(turns) / math.log(theta)

    first, last = pair(scaling.fast), pair(scaling.slow)
    if scaling.truncate is None:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain_K) - 1)
    index_K = torch.arange(len(plain_K), device=plain_K.device, dtype=plain_K.dtype)
    divided_K = ((index_K - first) / (last - first or 0.001)).clamp(0, 1)
    return plain_K * (1 - divided_K + divided_K / scaling.factor)
