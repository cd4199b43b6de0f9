"""Multi-head latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434).

Keys and values are projections of one narrow latent, and all heads share one rotary key; queries
may have a latent of their own. What stands here is training's form: latents are expanded to heads,
and attention runs through the same seam as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.attention.score_rule import ScoreRule
from workbench.models.seams import AddNorm, Attend, Positions, Rope
from workbench.plan.model.model_shape import Shape


class LatentAttention(nn.Module):
    """Causal self-attention through latents.

    Head counts follow from the width of the projections, so that narrower ones are a rank's heads;
    the projections down to the latents are no heads', and every tensor rank has them.

    Attributes, which parallel strategies replace:
        share_rotary_key: Takes the rotary key [B, T, 1, rope_dim] to all heads of this rank.
    """

    def __init__(self, shape: Shape, layer: int = 0) -> None:
        super().__init__()
        mla = shape.mla
        assert mla is not None
        self.mla = mla
        inner = shape.hidden if mla.q_rank is None else mla.q_rank
        self.q_down = nn.Linear(shape.hidden, inner, bias=False) if mla.q_rank else None
        self.q_down_norm = _latent_norm(shape, inner) if mla.q_rank else None
        self.q = nn.Linear(inner, shape.q_width, bias=False)
        self.kv_down = nn.Linear(shape.hidden, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_down_norm = _latent_norm(shape, mla.kv_rank)
        self.kv_up = nn.Linear(
            mla.kv_rank, shape.heads * (mla.nope_dim + mla.value_dim), bias=False
        )
        self.o = nn.Linear(shape.heads * mla.value_dim, shape.hidden, bias=False)
        self.rope = Rope()
        self.attend = Attend(ScoreRule.of_layer(shape, layer))
        self.share_rotary_key: Callable[[Tensor], Tensor] = _of_one_rank

    def forward(self, x_BTD: Tensor, positions: Positions) -> Tensor:
        """Attention branch [B, T, D]."""
        mla = self.mla
        q_latent = x_BTD
        if self.q_down is not None and self.q_down_norm is not None:
            q_latent = self.q_down_norm(self.q_down(x_BTD), None)[0]
        q_nope, q_rope = (
            self.q(q_latent)
            .unflatten(-1, (-1, mla.query_dim))
            .split([mla.nope_dim, mla.rope_dim], dim=-1)
        )
        kv_latent, k_rope = self.kv_down(x_BTD).split([mla.kv_rank, mla.rope_dim], dim=-1)
        keys_values = self.kv_up(self.kv_down_norm(kv_latent, None)[0])
        k_nope, v = keys_values.unflatten(-1, (-1, mla.nope_dim + mla.value_dim)).split(
            [mla.nope_dim, mla.value_dim], dim=-1
        )
        q_rope, k_rope = self.rope(
            pairs_apart(q_rope), pairs_apart(self.share_rotary_key(k_rope[:, :, None])), positions
        )
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        # Kernels, the ring's transfers and Ulysses' all-to-all take keys and values of one width.
        v = F.pad(v, (0, mla.query_dim - mla.value_dim))
        attended = self.attend(q, k, v, positions)[..., : mla.value_dim]
        output: Tensor = self.o(attended.flatten(-2))
        return output


def pairs_apart(x_BTHK: Tensor) -> Tensor:
    """The entries 0, 2, 4 ... and then 1, 3, 5 ... of each head: DeepSeek's weights rotate
    neighbours as a pair, the rope seam an entry and the one half a head further.
    """
    apart: Tensor = x_BTHK.unflatten(-1, (-1, 2)).mT.flatten(-2)
    return apart


def _latent_norm(shape: Shape, width: int) -> AddNorm:
    """DeepSeek's configurations say no epsilon for norms of latents, which stays RMSNorm's."""
    return AddNorm(shape.norm, width, LATENT_EPSILON, bias=shape.norm == "layernorm")


LATENT_EPSILON = 1e-6


def _of_one_rank(k_BT1K: Tensor) -> Tensor:
    return k_BT1K
