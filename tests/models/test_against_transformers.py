"""Mistral's window and BLOOM's ALiBi give the logits of transformers, on small random models."""

from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.models import Transformer
from workbench.plan.model.model_shape import Shape

transformers = pytest.importorskip("transformers", minversion="5.0")

BATCH, TIME, VOCAB = 2, 37, 97


def logits_of(model: Transformer, tokens: Tensor) -> Tensor:
    """[B, T, V]; the head is asked for its input."""
    seen: list[Tensor] = []
    assert model.head is not None
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens, torch.zeros_like(tokens))
    return seen[0] @ model.head.weight.T


def assert_equal_logits(shape: dict[str, Any], theirs: Any, names: dict[str, str]) -> None:
    """Copy `theirs`' weights into our model, by the patterns `names`, and compare in fp32."""
    model = Transformer(Shape.model_validate(shape))
    state = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_named(name, state, names, int(shape["heads"])))
    tokens = torch.randint(VOCAB, (BATCH, TIME), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, logits_of(model, tokens)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def weight_named(name: str, state: dict[str, Tensor], names: dict[str, str], heads: int) -> Tensor:
    for ours, other in names.items():
        name = name.replace(ours, other)
    if "query_key_value." not in name:
        return state[name]
    whole, kind = name.split(":")  # BLOOM: of each head its query, key and value
    fused = state[whole].unflatten(0, (heads, 3, -1))
    selected: Tensor = fused[:, "qkv".index(kind)].flatten(0, 1)
    return selected


def randomised(model: Any) -> Any:
    """With large weights, so that attention is far from uniform; evaluated eagerly."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 + (parameter.ndim == 1))
    return model.eval()


@pytest.mark.parametrize("window", [1, 8, 64])
def test_mistral(window: int) -> None:
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theta = float(config.rope_parameters["rope_theta"])
    shape = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB}
    names = {
        **{"blocks.": "model.layers.", "attention_norm": "input_layernorm"},
        **{"mlp_norm": "post_attention_layernorm", "final_norm": "model.norm"},
        **{"embedding.tokens": "model.embed_tokens", "head.weight": "lm_head.weight"},
        **{f".attention.{x}.": f".self_attn.{x}_proj." for x in "qkvo"},
        **{f".mlp.{x}.": f".mlp.{x}_proj." for x in ("gate", "up", "down")},
    }
    theirs = randomised(transformers.MistralForCausalLM(config))
    assert_equal_logits({**shape, "window": window, "rope_theta": theta}, theirs, names)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom(heads: int) -> None:
    config = transformers.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=8 * heads,
        n_layer=3,
        n_head=heads,
        attn_implementation="eager",
    )
    shape = {
        **{"layers": 3, "hidden": 8 * heads, "heads": heads, "ffn": 32 * heads, "vocab": VOCAB},
        **{"norm": "layernorm", "mlp": "gelu", "positions": "alibi", "biases": "all"},
        **{"embedding_norm": True, "tied": True},
    }
    names = {
        **{"blocks.": "transformer.h.", "attention_norm": "input_layernorm"},
        **{"mlp_norm": "post_attention_layernorm", "final_norm": "transformer.ln_f"},
        "embedding.tokens": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        **{
            f".attention.{x}.{kind}": f".self_attention.query_key_value.{kind}:{x}"
            for x in "qkv"
            for kind in ("weight", "bias")
        },
        **{".attention.o.": ".self_attention.dense.", ".mlp.up.": ".mlp.dense_h_to_4h."},
        ".mlp.down.": ".mlp.dense_4h_to_h.",
    }
    assert_equal_logits(shape, randomised(transformers.BloomForCausalLM(config)), names)
