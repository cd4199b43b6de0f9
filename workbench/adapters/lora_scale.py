"""The scale of low-rank adapters, and what it follows from."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSettings:
    """Rank, alpha and dropout of adapters; `rslora`: rank-stabilised scale."""

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return lora_scale(self.alpha, self.rank, self.rslora)


def lora_scale(alpha: float, rank: int, rslora: bool) -> float:
    """alpha / rank (2106.09685), rank-stabilised alpha / sqrt(rank) (2312.03732)."""
    return alpha / (math.sqrt(rank) if rslora else rank)
