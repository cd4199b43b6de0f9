"""Language models as people write them in plain torch: none knows of this repository."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EncoderLM(nn.Module):
    """A causal language model round `nn.TransformerEncoder`, as in torch's tutorial."""

    def __init__(
        self,
        vocab: int = 260,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        longest: int = 32,
        dropout: float = 0.1,
        norm_first: bool = False,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(longest, width) * 0.02)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.places.dtype)
        x = self.drop(self.embed(tokens) + self.places[:length])
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, mask=mask)
        if not self.batch_first:
            x = x.transpose(0, 1)
        logits: Tensor = self.head(x)
        return logits


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as GPT-2 has it."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.out = out
        self.weight = nn.Parameter(torch.randn(width, out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.out)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class GPTAttention(nn.Module):
    """Causal attention with explicit scores."""

    mask: Tensor

    def __init__(self, width: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        causal = torch.tril(torch.ones(longest, longest, dtype=torch.bool))
        self.register_buffer("mask", causal.view(1, 1, longest, longest), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (
            y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for y in (q, k, v)
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(width // self.heads)
        lowest = torch.finfo(scores.dtype).min
        scores = torch.where(self.mask[:, :, :length, :length], scores, lowest)
        weights = self.attn_dropout(F.softmax(scores, dim=-1))
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, width)
        out: Tensor = self.resid_dropout(self.c_proj(mixed))
        return out


class GPTBlock(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = GPTAttention(width, heads, longest, dropout)
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        h = self.c_fc(self.ln_2(x))
        h = (
            0.5
            * h
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))
        )
        x = x + self.dropout(self.c_proj(h))
        return x


class TiedGPT(nn.Module):
    """GPT-2 in small: learned positions, Conv1D layers and a head that is the embedding."""

    def __init__(
        self,
        vocab: int = 260,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        longest: int = 32,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPTBlock(width, heads, longest, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
        x = self.drop(self.wte(tokens) + self.wpe(places))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class EinsumMoE(nn.Module):
    """Top-1 experts with a capacity, dispatched by one-hot einsum (as in Mesh TensorFlow)."""

    def __init__(self, width: int, experts: int, capacity_factor: float = 1.5) -> None:
        super().__init__()
        self.experts, self.factor = experts, capacity_factor
        self.gate = nn.Linear(width, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.w_out = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        capacity = int(self.factor * tokens / self.experts)
        probs = torch.softmax(self.gate(x), dim=-1)
        chosen = F.one_hot(probs.argmax(-1), self.experts).to(x.dtype)
        place = (torch.cumsum(chosen, dim=1) - 1.0) * chosen
        kept = chosen * (place < capacity).to(x.dtype)
        slots = F.one_hot(place.sum(-1).long(), tokens)[..., :capacity].to(x.dtype)
        dispatch = torch.einsum("bte,btc->btec", kept, slots)
        combine = dispatch * probs.unsqueeze(-1)
        inner = torch.einsum("btec,btd->becd", dispatch, x)
        inner = F.silu(torch.einsum("becd,edf->becf", inner, self.w_in))
        outer = torch.einsum("becf,efd->becd", inner, self.w_out)
        return torch.einsum("btec,becd->btd", combine, outer)


class WhereMoE(nn.Module):
    """Every expert computes every token; `torch.where` keeps those that chose it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), 2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            for k in range(2):
                mine = (chosen[..., k] == index).unsqueeze(-1)
                out = out + torch.where(mine, expert(x) * weights[..., k : k + 1], 0.0)
        return out


class MoELM(nn.Module):
    """Embedding, mixing by a causal mean, experts, head."""

    def __init__(self, moe: nn.Module, vocab: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.RMSNorm(width)
        self.moe = moe
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.moe(self.norm(x))
        logits: Tensor = self.head(x)
        return logits


class NonzeroMoE(WhereMoE):
    """Experts of the tokens that chose them: a loop over what only the values say."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = F.softmax(self.gate(flat), dim=-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows) > 0:
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return out.view_as(x)


class UnguardedMoE(WhereMoE):
    """The same without a branch, so that nothing but a shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = F.softmax(self.gate(flat), dim=-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == index).squeeze(1)
            out[rows] = expert(flat[rows]) * weights[rows, None]
        return out.view_as(x)


class RotaryBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = dropout

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., : self.size // 2], x[..., self.size // 2 :]
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        kv = self.kv(h).view(batch, length, 2, self.kv_heads, self.size)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = (
            y[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, self.heads, length, -1)
            for y in (k, v)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        out: Tensor = x + F.dropout(self.down(F.silu(gate) * up), self.dropout, self.training)
        return out


class RotaryLM(nn.Module):
    """A model of `RotaryBlock`s that scales its logits in place."""

    def __init__(
        self, vocab: int, width: int, heads: int, kv_heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            RotaryBlock(width, heads, kv_heads, dropout) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.size = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inverse = 10000.0 ** (-torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        logits: Tensor = self.head(self.norm(x))
        logits *= 0.5
        return logits


class FoldedLM(nn.Module):
    """Tokens come before sequences, whose heads `bmm` has in one dim with them, and all tokens are
    one dim to the feed-forward network.
    """

    def __init__(self, vocab: int = 260, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.heads, self.size = heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocab)

    def attend(self, x: Tensor) -> Tensor:
        length, batch, width = x.shape
        q, k, v = (
            y.contiguous().view(length, batch * self.heads, self.size).transpose(0, 1)
            for y in self.qkv(x).chunk(3, dim=-1)
        )
        seen = torch.ones(batch, 1, length, length, dtype=torch.bool).tril()
        scores = (torch.bmm(q, k.transpose(1, 2)) / self.size**0.5).view(
            batch, self.heads, length, length
        )
        weights = torch.softmax(scores.masked_fill(~seen, -1e9), dim=-1)
        mixed = torch.bmm(weights.view(-1, length, length), v)
        out: Tensor = self.o(mixed.transpose(0, 1).reshape(length, batch, width))
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(0, 1).contiguous()
        x = x + self.attend(self.norm(x))
        flat = x.transpose(0, 1).reshape(-1, x.shape[-1])
        flat = flat + self.down(F.silu(self.up(flat)))
        logits: Tensor = self.head(flat).view(*tokens.shape, -1)
        return logits


def folded_lm(**args: Any) -> nn.Module:
    """The factory of a `FoldedLM`."""
    return FoldedLM(**args)


def rotary_lm(
    vocab: int = 260,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    dropout: float = 0.1,
) -> nn.Module:
    """The factory of a `RotaryLM`."""
    return RotaryLM(vocab, width, heads, kv_heads, layers, dropout)


def encoder_lm(**args: Any) -> nn.Module:
    """The factory of an `EncoderLM`."""
    return EncoderLM(**args)


def tied_gpt(**args: Any) -> nn.Module:
    """The factory of a `TiedGPT`."""
    return TiedGPT(**args)


def einsum_moe(vocab: int = 260, width: int = 32, experts: int = 4) -> nn.Module:
    """A model with an `EinsumMoE`."""
    return MoELM(EinsumMoE(width, experts), vocab, width)


def where_moe(vocab: int = 260, width: int = 32, experts: int = 4) -> nn.Module:
    """A model with a `WhereMoE`."""
    return MoELM(WhereMoE(width, experts), vocab, width)


def nonzero_moe(vocab: int = 260, width: int = 32, experts: int = 4) -> nn.Module:
    """A model with a `NonzeroMoE`."""
    return MoELM(NonzeroMoE(width, experts), vocab, width)


def unguarded_moe(vocab: int = 260, width: int = 32, experts: int = 4) -> nn.Module:
    """A model with an `UnguardedMoE`."""
    return MoELM(UnguardedMoE(width, experts), vocab, width)
