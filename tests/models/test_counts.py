"""A model built from a shape has exactly the parameters that the closed form counts."""

from typing import Any

import pytest
import torch

from workbench.models import Transformer
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Mla, Moe, Shape
from workbench.plan.model.parameter_count import parameters

SHAPE: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 257,
}
MOE = Moe(experts=4, top_k=2, ffn=16, shared=2, first_dense=1)
LATENT = {
    "mla": Mla(kv_rank=8, q_rank=12, rope_dim=4, nope_dim=8, value_dim=8),
    "moe": Moe(experts=4, top_k=2, ffn=16, shared=2, first_dense=1, score_bias=True),
}


def count(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(shape).parameters())


@pytest.mark.parametrize("name", catalog.models())
def test_catalog_models_have_the_counted_and_the_published_parameters(name: str) -> None:
    entry = catalog.models()[name]
    built = count(entry.shape)
    assert built == parameters(entry.shape).total
    assert built == pytest.approx(entry.parameters, rel=0.01)


@pytest.mark.parametrize("mlp", ["gelu", "relu", "swiglu", "geglu"])
@pytest.mark.parametrize("biases", ["none", "qkv", "all"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    "more",
    [{}, {"tied": True}, {"embedding_norm": True}, {"positions": "learned"}, {"moe": MOE}, LATENT],
    ids=str,
)
def test_every_kind_of_shape_is_counted(
    mlp: str, biases: str, norm: str, more: dict[str, Any]
) -> None:
    shape = Shape.model_validate({**SHAPE, "mlp": mlp, "biases": biases, "norm": norm, **more})
    assert count(shape) == parameters(shape).total


def test_an_embedding_norm_is_built_and_counts() -> None:
    plain, normed = (Shape.model_validate({**SHAPE, "embedding_norm": on}) for on in (False, True))
    assert count(normed) == count(plain) + plain.hidden
