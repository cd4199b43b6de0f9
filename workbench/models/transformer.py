"""A decoder-only transformer built from its shape: Llama style, GPT style and variants between.

A plain single-device model that knows no mesh. A pipeline stage is this model with some parts None,
a tensor-parallel rank this model with narrower layers. Attention has as many key-value heads as the
shape says (MHA, GQA, MQA).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbench.models.block import Block, counter_dropout, residual_norm
from workbench.models.counter_dropout import Dropout, SampleIndices
from workbench.models.rotary.rotary_frequencies import scaled_frequencies
from workbench.models.seams import (
    AddNorm,
    HeadLoss,
    Positions,
    rotary_exponent,
    rotary_positions,
    rotary_tables,
)
from workbench.plan.model.model_shape import Shape


class Embedding(nn.Module):
    """Token embedding, with a factor, learned positions and a norm where the shape has them, and
    dropout.
    """

    def __init__(self, shape: Shape, dropout: Dropout) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.scale = shape.embedding_scale
        learned = shape.positions == "learned"
        self.positions = nn.Embedding(shape.max_positions, shape.hidden) if learned else None
        self.norm = residual_norm(shape) if shape.embedding_norm else None
        self.dropout = dropout

    def forward(self, tokens_BT: Tensor, positions: Positions) -> Tensor:
        """Embedded tokens [B, T, D]."""
        x = self.tokens(tokens_BT)
        if self.scale is not None:  # rounded as the weights are, as transformers does
            x = x * torch.tensor(self.scale, dtype=x.dtype).item()
        if self.positions is not None:
            x = x + self.positions(positions.indices)
        x = x if self.norm is None else self.norm(x, None)[0]
        output: Tensor = self.dropout(x, positions.rows)
        return output


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head; parts that another pipeline stage has are None.

    Args:
        shape: Of the whole model.
        dropout: Rate after the embedding and of both branches of every block.
        seed: Of the dropout masks, which are drawn for the sample indices in `samples`.
        layers: Blocks to build, of a pipeline stage; None: all.

    Attributes, which parallel strategies replace:
        indices: Input of a stage -> the positions in the sequence [T] of its tokens.
        length: Tokens of the sequence, where `indices` are some of them; None: up to the last.
        local_part_of: [B, T] of all tokens -> of those in this rank's residual stream.
        attach_aux_loss: Takes the output and the aux loss of a stage without the head.
    """

    def __init__(
        self, shape: Shape, dropout: float = 0.0, seed: int = 0, layers: range | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.dropout, self.samples = dropout, SampleIndices()
        self.indices: Callable[[Tensor], Tensor] = whole_sequence
        self.length: int | None = None
        self.local_part_of: Callable[[Tensor], Tensor] = _all_tokens
        self.drops_in_layers = False
        """Whether something within a layer drops elements: adapters' dropout."""
        self.attach_aux_loss: Callable[[Tensor, Tensor], Tensor] = _needs_head
        dropped = counter_dropout("embedding", dropout, seed)
        self.embedding: Embedding | None = Embedding(shape, dropped)
        own = range(shape.layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(i): Block(shape, i, dropout, seed) for i in own})
        self.final_norm: AddNorm | None = residual_norm(shape)
        self.head: HeadLoss | None = HeadLoss(shape.hidden, shape.vocab, shape.logit_softcap)
        if shape.tied:
            self.head.weight = self.embedding.tokens.weight  # type: ignore[assignment]

    def forward(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Run the stage.

        Args:
            x: Tokens [B, T], or the previous stage's output [B, T, D].
            targets_BT: [B, T], where the stage has the head.

        Returns:
            The loss summed over valid tokens, or over pairs, aux losses of MoE layers added; or
            without the head this stage's output [B, T, D], to which `attach_aux_loss` has attached
            its aux loss.
        """
        positions = self.positions(x)
        residual: Tensor | None = None
        if self.embedding is not None:
            x = self.embedding(x, positions)
        aux_losses: list[Tensor] = []
        for block in self.blocks.values():
            x, residual, aux_loss = block(x, residual, positions)
            aux_losses += [] if aux_loss is None else [aux_loss]
        if self.head is None or self.final_norm is None:
            x = x if residual is None else x + residual
            return self.attach_aux_loss(x, torch.stack(aux_losses).sum()) if aux_losses else x
        x, _ = self.final_norm(x, residual)
        assert targets_BT is not None, "the stage that holds the head needs targets"
        if self.samples.preference is not None:
            loss = self.samples.pair_loss(self.head(x, targets_BT, "none"))
        else:
            loss = self.head(x, targets_BT)
        self.samples.record_loss(loss)
        return torch.stack([loss, *aux_losses]).sum() if aux_losses else loss

    def positions(self, x: Tensor) -> Positions:
        """Indices and rotary tables of the tokens that attention sees, and their ids for
        dropout.
        """
        # A frozen weight in 4 bits is bytes.
        dtype = next(p.dtype for p in self.parameters() if p.is_floating_point())
        indices = self.indices(x)
        positions = self._rotary_positions(indices, dtype)
        if (starts := self.samples.document_starts) is not None:
            positions = positions._replace(document_starts=starts)
            # Rotary tables go on: only differences of positions within a document count.
            if self.shape.positions == "learned":
                positions = positions._replace(indices=indices - starts[:, indices])
        if not (self.dropout or self.drops_in_layers) or not self.training:
            return positions
        rows = self.samples.rows(x.shape[0], indices)
        return positions._replace(rows=self.local_part_of(rows), region_rows=rows)

    def _rotary_positions(self, indices: Tensor, dtype: torch.dtype) -> Positions:
        shape = self.shape
        rope_dim = shape.rotated_width if shape.positions == "rope" else 0
        positions = self._rotary_tables(indices, rope_dim, dtype)
        if shape.window_rope_theta is None:
            return positions
        other = rotary_positions(indices, rope_dim, shape.window_rope_theta, dtype)
        return positions._replace(window=(other.cos, other.sin))

    def _rotary_tables(self, indices: Tensor, rope_dim: int, dtype: torch.dtype) -> Positions:
        shape = self.shape
        if shape.rope_scaling is None:
            return rotary_positions(indices, rope_dim, shape.rope_theta, dtype)
        length = indices.max() + 1 if self.length is None else indices.new_full((), self.length)
        exponent = rotary_exponent(rope_dim, indices.device)
        scaled = scaled_frequencies(exponent, shape, length)
        return rotary_tables(indices, scaled, dtype, shape.rope_scaling.table_factor)


def _needs_head(x_BTD: Tensor, aux_loss: Tensor) -> Tensor:
    raise AssertionError("a stage without the head needs attach_aux_loss to be replaced")


def whole_sequence(x: Tensor) -> Tensor:
    """Positions [T] of the tokens of `x` [B, T, ...], which has whole sequences."""
    return torch.arange(x.shape[1], device=x.device)


def _all_tokens(x_BT: Tensor) -> Tensor:
    return x_BT
