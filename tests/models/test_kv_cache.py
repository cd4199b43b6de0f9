"""Calls through a key-value cache give what one call gives, whatever attention does to scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.small import LLAMA
from workbench.models import Transformer
from workbench.models.attention.kv_cache import KvCache
from workbench.models.seams import Attend
from workbench.plan.model.model_shape import Shape

RULES: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"positions": "alibi"},
    {"attention_softcap": 2.0},
    {"attention_scale": 0.1},
    {"parallel_residual": "one_norm", "rotary_dim": 2},
    {"branch_norms": "output", "qk_norm": "width"},
    {"branch_norms": "both", "zero_centered_norms": True, "embedding_scale": 3.0},
    {"mla": {"kv_rank": 12, "rope_dim": 4, "nope_dim": 8, "value_dim": 6}},
]


class Hidden(torch.nn.Module):
    """The head as what it is given."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return x


def model(more: dict[str, Any]) -> Transformer:
    made = Transformer(Shape.model_validate({**LLAMA, "layers": 2, **more})).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    for block in made.blocks.values():
        block.attention.attend.kernel = "blockwise" if "attention_softcap" in more else "flash"
    made.head = Hidden()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("more", RULES, ids=str)
def test_calls_with_a_cache_are_one_call(more: dict[str, Any]) -> None:
    tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(more)(tokens, tokens)
        cached = model(more)
        cache = KvCache(cached, 12)
        found = []
        for part in tokens.split([6, 1, 3, 1, 1], dim=1):
            found.append(cached(part, part))
            cache.advance(part.shape[1])
        assert torch.allclose(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="13 tokens are more than the key-value cache's 12"):
            cached(tokens[:, :1], tokens[:, :1])


def test_replaced_attention_is_refused() -> None:
    class Other(Attend):
        pass

    made = model({})
    made.blocks["1"].attention.attend = Other()
    with pytest.raises(ValueError, match="Other has no key-value cache"):
        KvCache(made, 8)
