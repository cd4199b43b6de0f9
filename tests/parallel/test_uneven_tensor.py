"""Heads and widths that the tensor ranks do not divide equal one device: what a rank has room for
beyond is padding.
"""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.parallel.tensor import shard_range
from workbench.parallel.tensor.row_parallel import RowParallelLinear
from workbench.parallel.tensor.tensor_collectives import reduce_from_tensor_region
from workbench.plan.model.head_split import HeadShard, head_shard, padded_heads_per_rank
from workbench.plan.model.model_shape import Shape

ALONE: dict[str, tuple[int, dict[str, Any]]] = {
    "three heads on two": (2, {"heads": 3, "kv_heads": 3, "ffn": 47}),
    "five heads on three, tied": (3, {"heads": 5, "kv_heads": 5, "ffn": 46, "tied": True}),
    "six heads on four, a rank without any": (4, {"heads": 6, "kv_heads": 6, "ffn": 45}),
    "two groups of three heads on three": (3, {"heads": 6, "kv_heads": 2, "ffn": 46}),
    "three groups of two heads on four": (
        4,
        {"heads": 6, "kv_heads": 3, "ffn": 46, "biases": "qkv"},
    ),
    "three groups of two heads on two": (2, {"heads": 6, "kv_heads": 3, "ffn": 45}),
    "two groups of three heads on four": (4, {"heads": 6, "kv_heads": 2, "ffn": 45, "tied": True}),
    "one group of five heads on four": (4, {"heads": 5, "kv_heads": 1, "ffn": 47, "biases": "all"}),
    "one group of three heads on two": (2, {"heads": 3, "kv_heads": 1, "ffn": 49}),
}
SEQUENCE = {"strategy.tensor.sequence": True}
ZB = {"strategy.pipeline.schedule": "zb-h1"}
MOE = {"experts": 4, "top_k": 2, "ffn": 33, "shared": 1}
MLA = {"kv_rank": 12, "q_rank": 10, "rope_dim": 4, "nope_dim": 8, "value_dim": 6}
BESIDE: dict[str, tuple[dict[str, Any], tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "sequence": (GPT, (4, 1, 1), {"heads": 5, "kv_heads": 1, "tied": True}, SEQUENCE),
    "sequence, latents": (LLAMA, (2, 1, 1), {"heads": 3, "kv_heads": 3, "mla": MLA}, SEQUENCE),
    "split backward, latents": (LLAMA, (2, 2, 1), {"heads": 5, "kv_heads": 5, "mla": MLA}, ZB),
    "zero 1": (LLAMA, (2, 1, 2), {"heads": 5, "kv_heads": 5}, {"strategy.data.zero": 1}),
    "zero 3, sequence": (
        LLAMA,
        (2, 1, 2),
        {"heads": 3, "kv_heads": 1, "tied": True},
        {"strategy.data.zero": 3, **SEQUENCE},
    ),
    "zero 3": (
        GPT,
        (2, 1, 2),
        {"heads": 3, "kv_heads": 3, "tied": True},
        {"strategy.data.zero": 3},
    ),
    "pipeline": (
        GPT,
        (2, 2, 1),
        {"heads": 3, "kv_heads": 3, "tied": True},
        {"strategy.recompute": "full"},
    ),
    "split backward": (LLAMA, (2, 2, 1), {"heads": 5, "kv_heads": 1}, ZB),
    "split backward, sequence": (
        GPT,
        (2, 2, 1),
        {"heads": 3, "kv_heads": 3, "tied": True},
        {**ZB, **SEQUENCE},
    ),
    "ring": (LLAMA, (2, 1, 2), {"heads": 3, "kv_heads": 1}, {"strategy.context": {"size": 2}}),
    "ulysses": (
        LLAMA,
        (2, 1, 2),
        {"heads": 6, "kv_heads": 3},
        {"strategy.context": {"size": 2, "algorithm": "ulysses"}},
    ),
    "experts": (
        GPT,
        (2, 1, 2),
        {"heads": 3, "kv_heads": 3, "moe": MOE},
        {"strategy.expert.size": 2},
    ),
}


def proof(
    mesh: tuple[int, int, int], shape: dict[str, Any], more: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    sizes = {"layers": 2, "head_dim": 6, "ffn": 46} | more
    return verify(plan(*mesh, shape=shape, changes=changes, microbatches=2, **sizes), "fp64")


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_tensor_ranks(case: str, shape: dict[str, Any]) -> None:
    size, more = ALONE[case]
    answer = proof((size, 1, 1), shape, more)
    assert answer["passed"], answer


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", BESIDE)
def test_beside_other_axes(case: str) -> None:
    shape, mesh, more, changes = BESIDE[case]
    answer = proof(mesh, shape, more, **changes)
    assert answer["passed"], answer


def test_a_key_value_head_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_turns(shape: Shape, ranks: int, index: int) -> HeadShard:
        head = index % 2
        return head_shard(shape, ranks, index)._replace(kv=(head, head + 1), kv_shard=head)

    monkeypatch.setattr(shard_range, "head_shard", by_turns)
    answer = proof((4, 1, 1), LLAMA, {"heads": 6, "kv_heads": 2})
    assert not answer["passed"] and "attention" in answer["worst"]["tensor"]


def test_padding_counted_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded query attends to real keys: what it brings must not reach the gradient of the
    projection behind it.
    """

    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return reduce_from_tensor_region(F.linear(x, self.weight), self.axis)

    monkeypatch.setattr(RowParallelLinear, "forward", forward)
    clipped = {"training.optimizer.name": "sgd", "training.optimizer.clip": 0.05}
    answer = proof((2, 1, 1), LLAMA, {"heads": 3, "kv_heads": 1}, **clipped)
    assert not answer["passed"] and answer["worst"]["kind"] == "weights"
    assert answer["max_relative_diff"]["gradients"] <= answer["tolerance"]


@pytest.mark.parametrize("kv", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("ranks", range(1, 8))
def test_every_query_head_is_assigned_once_with_its_key_value_head(kv: int, ranks: int) -> None:
    for group in (1, 2, 3):
        shape = Shape(
            layers=1, hidden=8, heads=kv * group, kv_heads=kv, head_dim=2, ffn=8, vocab=257
        )
        deals = [head_shard(shape, ranks, index) for index in range(ranks)]
        assert [head for deal in deals for head in range(*deal.query)] == list(range(shape.heads))
        assert (
            max(deal.query[1] - deal.query[0] for deal in deals)
            == padded_heads_per_rank(shape, ranks)[0]
        )
        for deal in deals:
            assert all(deal.kv[0] <= head // group < deal.kv[1] for head in range(*deal.query))
            assert (
                deal.num_q_heads == padded_heads_per_rank(shape, ranks)[0]
                and deal.num_q_heads % deal.num_kv_heads == 0
            )
