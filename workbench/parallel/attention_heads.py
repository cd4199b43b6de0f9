"""ALiBi on several ranks: each rank's attention has the slopes of its own query heads."""

from __future__ import annotations

from torch import nn

from workbench.models import Transformer
from workbench.models.block import AnyAttention
from workbench.models.seams import Attend
from workbench.parallel.context.ring_attention import RingAttend
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.mesh import Mesh
from workbench.plan.model.head_split import head_shard


def apply_head_rules(model: Transformer, mesh: Mesh) -> None:
    """Narrow the score rules of a stage to this rank's heads, in place.

    Tensor parallelism shards heads, padded where uneven; of those Ulysses gives each of its ranks
    an equal run.

    Args:
        model: A stage, whose attention context parallelism has replaced already.
        mesh: This rank's mesh.
    """
    tensor, shape = mesh["tensor"], model.shape
    if shape.positions != "alibi":
        return
    shard = head_shard(shape, tensor.size, tensor.index)
    for module in model.modules():
        if not isinstance(module, AnyAttention):
            continue
        attend: nn.Module = module.attend
        first, count = 0, shard.num_q_heads
        if isinstance(attend, UlyssesAttend):
            count //= attend.axis.size
            first, attend = attend.axis.index * count, attend.attend
        assert isinstance(attend, Attend | RingAttend)
        own = attend.rule.for_heads(*shard.query, shard.num_q_heads)
        attend.rule = own.for_heads(first, first + count, count)
