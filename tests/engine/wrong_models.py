"""Models as users write them wrongly; measuring their layers names what is wrong."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


class Broken(nn.Module):
    """An embedding, a layer and a head; `fault` is what its forward does wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(260, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 260)
        self.fault = fault

    def forward(self, tokens: Tensor) -> Any:
        if self.fault == "raises":
            raise RuntimeError("boom")
        if self.fault == "exits":
            sys.exit(0)
        x = self.layer(self.tokens(tokens))
        if self.fault == "hidden":
            return x
        logits = self.head(x.detach() if self.fault == "detaches" else x)
        if self.fault == "backward":
            logits = Fails.apply(logits)
        return {"tuple": (logits, x), "none": None}.get(self.fault, logits)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


class Batched(nn.Module):
    """A loss for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(260, 8), nn.Linear(8, 260)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = self.head(self.tokens(tokens)).sum((1, 2))
        return losses


def build(fault: str) -> nn.Module:
    return Batched() if fault == "losses" else Broken(fault)
