"""The parameter tensors of one rank, in the order in which the engine's modules hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.inputs.adapted_layers import EXPERTS, ONTO_LATENTS, linear_widths
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_shapes import RankShapes
from workbench.plan.model.block_linears import ROW_PARALLEL
from workbench.plan.model.model_shape import Mla

TABLE, EMBEDDING_NORM = "embedding.tokens.weight", "embedding.norm"


@dataclass(frozen=True)
class ParameterTensor:
    """One tensor, of a rank or of many candidates' ranks."""

    elements: Number
    role: str
    """matrix | hidden (a vector of hidden size, or what else 1-D tensor ranks hold alike) | vector
    (of another) | partial: with a gradient that is a partial sum over the tensor ranks | complete:
    of an MoE layer, with one that is not.
    """
    experts: bool = False
    """Whether it belongs to experts that other ranks do not hold."""
    is_tile: bool = False
    """Whether it is a tile of a linear, which ZeRO-3 gathers by itself."""
    name: str = ""
    """Of what is in front of the layers."""
    is_linear: bool = False
    """Whether it is the weight of a linear layer of a block."""


def norm_tensors(w: RankShapes) -> Iterator[ParameterTensor]:
    """Weight and bias of a norm."""
    for _ in range(2 if w.shape.norm == "layernorm" else 1):
        yield ParameterTensor(w.shape.hidden * w.tiling.vector_share, "hidden")


def first_tensors(w: RankShapes) -> Iterator[ParameterTensor]:
    """The embedding table, and what follows it in front of the layers."""
    yield ParameterTensor(w.table_params, "matrix", name=TABLE)
    if w.shape.positions == "learned":
        positions = w.shape.max_positions * w.shape.hidden * w.tiling.vector_share
        yield ParameterTensor(positions, "hidden")
    if w.shape.embedding_norm:
        yield from (replace(each, name=EMBEDDING_NORM) for each in norm_tensors(w))


def layer_tensors(w: RankShapes, is_moe: bool) -> Iterator[ParameterTensor]:
    """Tensors of one layer, tiles of linears one by one."""
    tiles = w.fixed.tile_factor
    for tensor in _untiled_tensors(w, is_moe):
        if tiles > 1 and tensor.role == "matrix":
            each = replace(tensor, elements=tensor.elements / tiles, is_tile=True)
            yield from [each] * tiles
        else:
            yield tensor


def num_tiles(w: RankShapes) -> int:
    """Tiles of a layer's linears; 0 where they are not tiled."""
    if w.fixed.tile_factor == 1:
        return 0
    return sum(tensor.is_tile for tensor in layer_tensors(w, is_moe=False))


def num_stage_tensors(w: RankShapes) -> Number:
    """Parameter tensors of a stage; where a framework fuses projections, those of one input are a
    matrix, and have a bias if any.
    """
    fused = 0
    if w.fixed.framework.kernels.fused_qkv:
        fused = 2 * (w.shape.mla is None) * (1 + (w.shape.biases != "none"))
        fused += w.shape.gated * (1 + (w.shape.biases == "all"))
    found: Number = w.has_embedding * len([*first_tensors(w)])
    found = found + w.has_head * (1 + len([*norm_tensors(w)]))
    sparse = w.layers - w.dense_layers
    for is_moe, layers in ((False, w.dense_layers), (w.shape.moe is not None, sparse)):
        found = found + layers * (len([*layer_tensors(w, is_moe)]) - fused)
    return found


def tile_elements(w: RankShapes) -> tuple[Number, Number]:
    """Elements of (all tiles of a layer, the largest); 0 where they are not tiled."""
    if w.fixed.tile_factor == 1:
        return 0.0, 0.0
    sizes = [t.elements for t in layer_tensors(w, is_moe=False) if t.is_tile]
    largest: Number = 0.0
    for size in sizes:
        largest = np.maximum(largest, size)
    return sum(sizes, start=0.0), largest


def _untiled_tensors(w: RankShapes, is_moe: bool) -> Iterator[ParameterTensor]:
    shape = w.shape
    outputs = list(norm_tensors(w)) if shape.norms_outputs else []
    yield from norm_tensors(w) if shape.norms_inputs else ()
    yield from _attention_tensors(w)
    yield from outputs
    if shape.norms_inputs and shape.parallel_residual != "one_norm":
        yield from norm_tensors(w)
    yield from _moe_tensors(w) if is_moe else _mlp_tensors(w, w.ffn)
    yield from outputs


def _attention_tensors(w: RankShapes) -> Iterator[ParameterTensor]:
    if w.shape.mla is not None:
        yield from _latent_tensors(w, w.shape.mla)
        return
    h, biases = w.weight_in_dim, w.shape.biases
    for width in (w.q_width, w.k_width, w.v_width):
        yield ParameterTensor(h * width, "matrix", is_linear=True)
        if biases in ("qkv", "all"):
            yield ParameterTensor(width, "vector")
    yield ParameterTensor(h * w.o_width, "matrix", is_linear=True)
    if biases == "all":
        yield ParameterTensor(w.hidden_per_rank, "hidden")
    if w.shape.qk_norm == "width":
        yield ParameterTensor(w.q_width, "vector")
        yield ParameterTensor(w.k_width, "vector")
    elif w.shape.qk_norm:
        for _ in range(2):
            yield ParameterTensor(int(w.shape.head_dim or 0), "partial")


def _latent_tensors(w: RankShapes, mla: Mla) -> Iterator[ParameterTensor]:
    """Tensors of latent attention: every tensor rank has the projections down to its latents and
    their norms, and sees its tokens alone under sequence parallelism.
    """
    h, heads = w.weight_in_dim, w.heads
    inner = h
    if mla.q_rank is not None:
        yield ParameterTensor(h * mla.q_rank, "hidden", is_linear=True)
        yield from _latent_norm(w, mla.q_rank)
        inner = mla.q_rank
    yield ParameterTensor(inner * w.q_width, "matrix", is_linear=True)
    yield ParameterTensor(h * (mla.kv_rank + mla.rope_dim), "hidden", is_linear=True)
    yield from _latent_norm(w, mla.kv_rank)
    yield ParameterTensor(
        mla.kv_rank * heads * (mla.nope_dim + mla.value_dim), "matrix", is_linear=True
    )
    yield ParameterTensor(h * w.o_width, "matrix", is_linear=True)


def _latent_norm(w: RankShapes, width: int) -> Iterator[ParameterTensor]:
    for _ in range(2 if w.shape.norm == "layernorm" else 1):
        yield ParameterTensor(width, "hidden")


def _mlp_tensors(
    w: RankShapes, width: Number, roles: tuple[str, str, str] = ("matrix", "vector", "hidden")
) -> Iterator[ParameterTensor]:
    """Tensors of a feed-forward whose width on this rank is `width`.

    Args:
        w: Problem sizes of the rank.
        width: Its width there.
        roles: Of its matrices, of its biases of `width`, of its output's bias.
    """
    bias, (matrix, inner, output) = w.shape.biases == "all", roles
    for _ in range(2 if w.shape.gated else 1):
        yield ParameterTensor(w.weight_in_dim * width, matrix, is_linear=True)
        if bias:
            yield ParameterTensor(width, inner)
    yield ParameterTensor(w.weight_in_dim * width, matrix, is_linear=True)
    if bias:
        yield ParameterTensor(w.hidden_per_rank, output)


def _moe_tensors(w: RankShapes) -> Iterator[ParameterTensor]:
    """Tensors of router, experts and shared experts; gradients of the router and of output biases
    are partial sums over tensor ranks.
    """
    moe, roles = w.shape.moe, ("complete", "complete", "partial")
    assert moe is not None
    yield ParameterTensor(w.weight_in_dim * moe.experts, "partial")
    if moe.score_bias:
        yield ParameterTensor(moe.experts, "hidden")
    own = moe.experts / w.searched.expert
    for tensor in _mlp_tensors(w, w.expert_ffn, roles):
        yield replace(tensor, elements=tensor.elements * own, experts=True)
    if moe.shared:
        yield from _mlp_tensors(w, w.shared_ffn, roles)


def adapter_tensors(w: RankShapes, names: Iterable[str]) -> Iterator[ParameterTensor]:
    """A and B of the adapters of some linears of a block (LoRA, 2106.09685).

    Of a linear that is sharded by outputs every tensor rank has all of A, with a partial gradient;
    of one that is sharded by inputs, all of B; of one onto latents, both.
    """
    for name in names:
        inputs, outputs, experts = linear_widths(w, name)
        roles, last = ["partial", "complete"], name.rpartition(".")[2]
        if last in ROW_PARALLEL:
            roles.reverse()
        elif last in ONTO_LATENTS:
            roles = ["hidden", "hidden"]
        for role, width in zip(roles, (inputs, outputs)):
            elements = experts * w.fixed.adapter_rank * width
            yield ParameterTensor(elements, role, name.startswith(EXPERTS))
