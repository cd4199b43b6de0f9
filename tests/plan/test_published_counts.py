"""Public configurations have exactly the parameters that their repositories publish.

Of each: the repository on the Hugging Face hub, whose safetensors metadata (or model card) says the
number, and the keys of its config.json that decide it. A tied head counts once.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.parameter_count import parameters

Config = dict[str, Any]


def llama(
    layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, **more: Any
) -> Config:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


def family(name: str, *sizes: int, **more: Any) -> Config:
    return llama(*sizes, **more) | {"model_type": name}


def gemma2(*sizes: int, **more: Any) -> Config:
    return family("gemma2", *sizes, 256_000, **{"head_dim": 256, **more})


def gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": 50257,
        "n_positions": 1024,
    }


def opt(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


def bloom(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "bloom",
        "n_layer": layers,
        "hidden_size": hidden,
        "n_head": heads,
        "vocab_size": 250880,
    }


def deepseek(name: str, *sizes: int, **more: Any) -> Config:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    return family(name, *sizes, **latent, v_head_dim=128, **more)


def neox(
    layers: int, hidden: int, heads: int, vocab: int = 50304, ffn: int | None = None
) -> Config:
    return {
        "model_type": "gpt_neox",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn or 4 * hidden,
        "vocab_size": vocab,
    }


def falcon(layers: int, hidden: int, heads: int, vocab: int = 65024, **more: Any) -> Config:
    return {
        "model_type": "falcon",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **more,
    }


PUBLISHED: dict[str, tuple[Config, int]] = {
    "deepseek-ai/DeepSeek-V2-Lite": (
        deepseek(
            "deepseek_v2",
            *(27, 2048, 10944, 16, 16, 102400),
            **{"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
            **{"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
        ),
        15_706_484_224,
    ),
    "deepseek-ai/DeepSeek-V2": (
        deepseek(
            "deepseek_v2",
            *(60, 5120, 12288, 128, 128, 102400),
            **{"n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536},
            **{"n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 1536},
        ),
        235_741_434_880,
    ),
    "meta-llama/Llama-2-7b-hf": (llama(32, 4096, 11008, 32, 32, 32000), 6_738_415_616),
    "meta-llama/Llama-2-13b-hf": (llama(40, 5120, 13824, 40, 40, 32000), 13_015_864_320),
    "meta-llama/Llama-2-70b-hf": (llama(80, 8192, 28672, 64, 8, 32000), 68_976_648_192),
    "meta-llama/Llama-3.1-8B": (llama(32, 4096, 14336, 32, 8, 128256), 8_030_261_248),
    "meta-llama/Llama-3.1-70B": (llama(80, 8192, 28672, 64, 8, 128256), 70_553_706_496),
    "meta-llama/Llama-3.1-405B": (llama(126, 16384, 53248, 128, 8, 128256), 405_853_388_800),
    "meta-llama/Llama-3.2-1B": (
        llama(16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "meta-llama/Llama-3.2-3B": (
        llama(28, 3072, 8192, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
        3_212_749_824,
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (llama(22, 2048, 5632, 32, 4, 32000), 1_100_048_384),
    "HuggingFaceTB/SmolLM2-135M": (
        llama(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
        134_515_008,
    ),
    "HuggingFaceTB/SmolLM2-360M": (
        llama(32, 960, 2560, 15, 5, 49152, tie_word_embeddings=True),
        361_821_120,
    ),
    "HuggingFaceTB/SmolLM2-1.7B": (
        llama(24, 2048, 8192, 32, 32, 49152, tie_word_embeddings=True),
        1_711_376_384,
    ),
    "mistralai/Mistral-7B-v0.1": (
        family("mistral", 32, 4096, 14336, 32, 8, 32000, sliding_window=4096),
        7_241_732_096,
    ),
    "mistralai/Mistral-7B-v0.3": (
        family("mistral", 32, 4096, 14336, 32, 8, 32768, sliding_window=None),
        7_248_023_552,
    ),
    "mistralai/Mistral-Nemo-Base-2407": (
        family("mistral", 40, 5120, 14336, 32, 8, 131072, head_dim=128, sliding_window=None),
        12_247_782_400,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        family("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8),
        46_702_792_704,
    ),
    "mistralai/Mixtral-8x22B-v0.1": (
        family("mixtral", 56, 6144, 16384, 48, 8, 32000, num_local_experts=8),
        140_620_634_112,
    ),
    "Qwen/Qwen2.5-0.5B": (
        family("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen/Qwen2.5-1.5B": (
        family("qwen2", 28, 1536, 8960, 12, 2, 151936, tie_word_embeddings=True),
        1_543_714_304,
    ),
    "Qwen/Qwen2.5-3B": (
        family("qwen2", 36, 2048, 11008, 16, 2, 151936, tie_word_embeddings=True),
        3_085_938_688,
    ),
    "Qwen/Qwen2.5-7B": (family("qwen2", 28, 3584, 18944, 28, 4, 152064), 7_615_616_512),
    "Qwen/Qwen2.5-14B": (family("qwen2", 48, 5120, 13824, 40, 8, 152064), 14_770_033_664),
    "Qwen/Qwen2.5-32B": (family("qwen2", 64, 5120, 27648, 40, 8, 152064), 32_763_876_352),
    "Qwen/Qwen2.5-72B": (family("qwen2", 80, 8192, 29568, 64, 8, 152064), 72_706_203_648),
    "Qwen/Qwen3-0.6B": (
        family("qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen/Qwen3-8B": (family("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128), 8_190_735_360),
    "Qwen/Qwen3-14B": (
        family("qwen3", 40, 5120, 17408, 40, 8, 151936, head_dim=128),
        14_768_307_200,
    ),
    "Qwen/Qwen3-32B": (
        family("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
        32_762_123_264,
    ),
    "Qwen/Qwen3-30B-A3B": (
        family("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128),
        30_532_122_624,
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        family("phi3", 32, 3072, 8192, 32, 32, 32064),
        3_821_079_552,
    ),
    "microsoft/Phi-3-medium-4k-instruct": (
        family("phi3", 40, 5120, 17920, 40, 10, 32064),
        13_960_238_080,
    ),
    "microsoft/Phi-4-mini-instruct": (
        family(
            *("phi3", 32, 3072, 8192, 24, 8, 200064),
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
        ),
        3_836_021_760,
    ),
    "microsoft/phi-4": (family("phi3", 40, 5120, 17920, 40, 10, 100352), 14_659_507_200),
    "allenai/OLMo-2-0425-1B": (family("olmo2", 16, 2048, 8192, 16, 16, 100_352), 1_484_916_736),
    "allenai/OLMo-2-1124-7B": (family("olmo2", 32, 4096, 11008, 32, 32, 100_352), 7_298_617_344),
    "allenai/OLMo-2-1124-13B": (family("olmo2", 40, 5120, 13824, 40, 40, 100_352), 13_716_198_400),
    "google/gemma-3-1b-it": (
        family(
            "gemma3_text", 26, 1152, 6912, 4, 1, 262_144, head_dim=256, tie_word_embeddings=True
        ),
        999_885_952,
    ),
    "google/gemma-2-2b": (gemma2(26, 2304, 9216, 8, 4), 2_614_341_888),
    "google/gemma-2-9b": (gemma2(42, 3584, 14336, 16, 8), 9_241_705_984),
    "google/gemma-2-27b": (
        gemma2(46, 4608, 36864, 32, 16, head_dim=128, query_pre_attn_scalar=144),
        27_227_128_320,
    ),
    "openai-community/gpt2": (gpt2(12, 768, 12), 124_439_808),
    "openai-community/gpt2-medium": (gpt2(24, 1024, 16), 354_823_168),
    "openai-community/gpt2-large": (gpt2(36, 1280, 20), 774_030_080),
    "openai-community/gpt2-xl": (gpt2(48, 1600, 25), 1_557_611_200),
    "facebook/opt-125m": (opt(12, 768, 12), 125_239_296),
    "facebook/opt-1.3b": (opt(24, 2048, 32), 1_315_758_080),
    "facebook/opt-6.7b": (opt(32, 4096, 32), 6_658_473_984),
    "bigscience/bloom-560m": (bloom(24, 1024, 16), 559_214_592),
    "bigscience/bloom-7b1": (bloom(30, 4096, 32), 7_069_016_064),
    "bigscience/bloom": (bloom(70, 14336, 112), 176_247_271_424),
    "EleutherAI/pythia-160m": (neox(12, 768, 12), 162_322_944),
    "EleutherAI/pythia-1.4b": (neox(24, 2048, 16), 1_414_647_808),
    "EleutherAI/pythia-6.9b": (neox(32, 4096, 32, 50432), 6_857_302_016),
    "EleutherAI/pythia-12b": (neox(36, 5120, 40, 50688), 11_846_072_320),
    "EleutherAI/gpt-neox-20b": (neox(44, 6144, 64, 50432), 20_554_567_680),
    "tiiuae/falcon-7b": (falcon(32, 4544, 71), 7_217_189_760),
}
HEAD_TWICE = {"tiiuae/falcon-7b"}
"""Repositories whose files hold a tied head beside the embedding."""
OPT_ROWS = 2
"""Rows of OPT's position table that no token reads; a model here has none of them."""


@pytest.mark.parametrize("repository", PUBLISHED)
def test_parameters_are_those_published(repository: str) -> None:
    config, published = PUBLISHED[repository]
    shape = shape_of(config)
    rows = OPT_ROWS * shape.hidden if config["model_type"] == "opt" else 0
    again = shape.vocab * shape.hidden if repository in HEAD_TWICE else 0
    assert parameters(shape).total + rows + again == published
