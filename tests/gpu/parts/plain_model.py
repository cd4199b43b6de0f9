"""A Llama-style model and its step in plain PyTorch, beside which the engine's is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.plan.resolved_plan import ResolvedPlan


class PlainBlock(nn.Module):
    """One layer: RMSNorm, rotary positions, grouped attention, SwiGLU."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        kv_width = kv_heads * self.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        h = self.attention_norm(x_BTD)
        q, k, v = (
            project(h).view(*h.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = _rotated(q, cos_TK, sin_TK), _rotated(k, cos_TK, sin_TK)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTD = x_BTD + self.o(attended.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x_BTD)
        x_BTD = x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))
        return x_BTD


def _rotated(x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


def plain_step(plan: ResolvedPlan, device: torch.device) -> Callable[[int], object]:
    """A step of the plan's shape: forward, backward, clipping and AdamW, in bf16 throughout."""
    shape, t = plan.shape, plan.training
    with device:
        blocks = nn.ModuleList(
            PlainBlock(shape.hidden, shape.heads, shape.kv_heads, shape.ffn)
            for _ in range(shape.layers)
        )
        embedding, head = (
            nn.Embedding(shape.vocab, shape.hidden),
            nn.Linear(shape.hidden, shape.vocab),
        )
        model = nn.ModuleList([embedding, blocks, nn.RMSNorm(shape.hidden), head]).bfloat16()
        tokens = torch.randint(shape.vocab, (t.micro_batch, t.sequence_length))
        cos, sin = (
            torch.ones(t.sequence_length, shape.hidden // shape.heads, dtype=torch.bfloat16)
            for _ in range(2)
        )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(index: int) -> object:
        for _ in range(plan.num_microbatches):
            x = model[0](tokens)
            for block in blocks:
                x = block(x, cos, sin)
            logits = model[3](model[2](x)).flatten(0, 1)
            F.cross_entropy(logits.float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return None

    return step
