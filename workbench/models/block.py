"""One layer of a transformer, and what it is made of: attention, feed-forward layer and norms."""

from __future__ import annotations

from torch import Tensor, nn

from workbench.models.attention.latent_attention import LatentAttention
from workbench.models.attention.score_rule import ScoreRule
from workbench.models.counter_dropout import Dropout, TokenRows, rows_of_tokens
from workbench.models.moe import MoE
from workbench.models.seams import Activate, AddNorm, Attend, NoRope, PartialRope, Positions, Rope
from workbench.models.weight_init import seed_of
from workbench.plan.model.model_shape import Shape


class Attention(nn.Module):
    """Causal self-attention, with grouped key-value heads (GQA) where the shape has fewer.

    Head counts follow from the width of the projections, so that narrower ones are a rank's heads.
    """

    def __init__(self, shape: Shape, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = int(shape.head_dim or 0)
        qkv_bias = shape.biases in ("qkv", "all")
        self.q = nn.Linear(shape.hidden, shape.q_width, bias=qkv_bias)
        self.k = nn.Linear(shape.hidden, shape.kv_width, bias=qkv_bias)
        self.v = nn.Linear(shape.hidden, shape.kv_width, bias=qkv_bias)
        self.o = nn.Linear(shape.q_width, shape.hidden, bias=shape.biases == "all")
        self.norms_width = shape.qk_norm == "width"
        self.q_norm, self.k_norm = (_qk_norm(shape, x) for x in (shape.q_width, shape.kv_width))
        self.rope = _rope(shape)
        rule = ScoreRule.of_layer(shape, layer)
        self.rotates_by_window = rule.window is not None
        self.attend = Attend(rule)

    def forward(self, x_BTD: Tensor, positions: Positions) -> Tensor:
        """Attention branch [B, T, D]."""
        q, k, v = (project(x_BTD) for project in (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if self.rotates_by_window and positions.window is not None:
            cos, sin = positions.window
            positions = positions._replace(cos=cos, sin=sin)
        q, k = self.rope(q, k, positions)
        output: Tensor = self.o(self.attend(q, k, v, positions).flatten(-2))
        return output

    def _normed(self, norm: AddNorm | None, x_BTHK: Tensor) -> Tensor:
        """Queries or keys under their norm: each head's, or all of a token's together."""
        if norm is None:
            return x_BTHK
        x = x_BTHK.flatten(-2) if self.norms_width else x_BTHK
        normed: Tensor = norm(x, None)[0]
        return normed.view_as(x_BTHK)


AnyAttention = Attention | LatentAttention


class Mlp(nn.Module):
    """The feed-forward layer, gated or not."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        bias = shape.biases == "all"
        self.gate = nn.Linear(shape.hidden, width, bias=bias) if shape.gated else None
        self.up = nn.Linear(shape.hidden, width, bias=bias)
        self.down = nn.Linear(width, shape.hidden, bias=bias)
        self.activate = Activate(shape.mlp)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Feed-forward branch [B, T, D]."""
        up = self.up(x_BTD)
        output: Tensor = self.down(
            self.activate(up, None) if self.gate is None else self.activate(self.gate(x_BTD), up)
        )
        return output


class Block(nn.Module):
    """One layer, with dropout of both branches (GPT-2's `resid_pdrop`, as in Megatron-LM).

    Norms are at the input of branches (pre-norm), at their output, or at both (`branch_norms`).

    The branches follow each other, or with `parallel_residual` both read the layer's input (GPT-J,
    Wang and Komatsuzaki 2021), through one norm or one each. It carries the residual stream as a
    pair (branch not yet added, residual), so that the addition can be fused with the next norm.
    """

    def __init__(self, shape: Shape, index: int, rate: float, seed: int) -> None:
        super().__init__()
        begins, ends = shape.norms_inputs, shape.norms_outputs
        self.attention_norm = residual_norm(shape) if begins else None
        kind = Attention if shape.mla is None else LatentAttention
        self.attention = kind(shape, index)
        self.attention_output_norm = residual_norm(shape) if ends else None
        self.is_parallel = shape.parallel_residual is not None
        shares = shape.parallel_residual == "one_norm"
        self.mlp_norm = residual_norm(shape) if begins and not shares else None
        self.mlp = _feed_forward(shape, index)
        self.mlp_output_norm = residual_norm(shape) if ends else None
        self.attention_dropout = counter_dropout(f"blocks.{index}.attention", rate, seed)
        self.mlp_dropout = counter_dropout(f"blocks.{index}.mlp", rate, seed)

    def forward(
        self, x_BTD: Tensor, residual_BTD: Tensor | None, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(branch not yet added, residual stream), both [B, T, D], and the aux loss of an MoE
        layer.
        """
        with rows_of_tokens(TokenRows(positions.rows, positions.region_rows)):
            return self._forward(x_BTD, residual_BTD, positions)

    def _forward(
        self, x_BTD: Tensor, residual_BTD: Tensor | None, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        h, residual = _enter(self.attention_norm, x_BTD, residual_BTD)
        attended = _leave(self.attention_output_norm, self.attention(h, positions))
        attended = self.attention_dropout(attended, positions.rows)
        if self.is_parallel:
            h = h if self.mlp_norm is None else self.mlp_norm(residual, None)[0]
        else:
            h, residual = _enter(self.mlp_norm, attended, residual)
        aux_loss: Tensor | None = None
        if isinstance(self.mlp, MoE):
            branch, aux_loss = self.mlp(h)
        else:
            branch = self.mlp(h)
        branch = self.mlp_dropout(_leave(self.mlp_output_norm, branch), positions.rows)
        return attended + branch if self.is_parallel else branch, residual, aux_loss


def _enter(
    norm: AddNorm | None, x_BTD: Tensor, residual_BTD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(a branch's input, residual stream) of a branch not yet added and the residual stream."""
    if norm is not None:
        entered: tuple[Tensor, Tensor] = norm(x_BTD, residual_BTD)
        return entered
    total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
    return total, total


def _leave(norm: AddNorm | None, branch_BTD: Tensor) -> Tensor:
    """What a branch adds to the residual stream."""
    return branch_BTD if norm is None else norm(branch_BTD, None)[0]


def _feed_forward(shape: Shape, index: int) -> Mlp | MoE:
    moe = shape.moe
    if moe is None or index < moe.first_dense:
        return Mlp(shape, shape.ffn)
    return MoE(shape, Mlp(shape, moe.shared * moe.ffn) if moe.shared else None)


def counter_dropout(name: str, rate: float, seed: int) -> Dropout:
    """Dropout of the module `name`, whose masks are drawn by the seed."""
    return Dropout(rate, seed_of(f"{name}.dropout", seed))


def residual_norm(shape: Shape) -> AddNorm:
    """A norm of the residual stream."""
    return _norm(shape.norm, shape.hidden, shape)


def _rope(shape: Shape) -> nn.Module:
    if shape.positions != "rope":
        return NoRope()
    return Rope() if shape.rotary_dim is None else PartialRope()


def _qk_norm(shape: Shape, width: int) -> AddNorm | None:
    """A norm of each head of queries or keys, whose weight all heads share, or of all of them."""
    if shape.qk_norm is None:
        return None
    return _norm("rmsnorm", width if shape.qk_norm == "width" else int(shape.head_dim or 0), shape)


def _norm(kind: str, width: int, shape: Shape) -> AddNorm:
    zero_centered = shape.zero_centered_norms is True
    return AddNorm(kind, width, shape.norm_epsilon, kind == "layernorm", zero_centered)
