"""Small GGUF files, written by the package `gguf` as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

from workbench.plan.model.model_shape import Shape

SHAPE = Shape.model_validate(
    {
        **{"name": "sample", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96},
        **{"vocab": 259, "rope_theta": 5e5, "norm_epsilon": 1e-6, "tied": True},
    }
)
Weights = dict[str, np.ndarray]


def names(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parameter -> (GGUF's name, shape)."""
    h, f = shape.hidden, shape.ffn
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for n in range(shape.layers):
        for mine, theirs, extent in (
            ("attention_norm", "attn_norm", (h,)),
            ("attention.q", "attn_q", (shape.q_width, h)),
            ("attention.k", "attn_k", (shape.kv_width, h)),
            ("attention.v", "attn_v", (shape.kv_width, h)),
            ("attention.o", "attn_output", (h, shape.q_width)),
            ("mlp_norm", "ffn_norm", (h,)),
            ("mlp.gate", "ffn_gate", (f, h)),
            ("mlp.up", "ffn_up", (f, h)),
            ("mlp.down", "ffn_down", (h, f)),
        ):
            found[f"blocks.{n}.{mine}.weight"] = (f"blk.{n}.{theirs}.weight", extent)
    found["embedding.tokens.weight"] = ("token_embd.weight", (shape.vocab, h))
    found["final_norm.weight"] = ("output_norm.weight", (h,))
    if not shape.tied:
        found["head.weight"] = ("output.weight", (shape.vocab, h))
    return found


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_sample(
    path: Path,
    kind: Kind = Kind.Q8_0,
    shape: Shape = SHAPE,
    change: dict[str, Any] | None = None,
    without: str = "",
    misshapen: str = "",
    tokenizer: bool = False,
    beside: tuple[str, ...] = (),
) -> Weights:
    """Write a Llama; parameter -> value that a reader should find.

    Args:
        path: The file.
        kind: Of every matrix.
        shape: The model.
        change: Metadata that replace or add to the model's.
        without: Tensor to leave out.
        misshapen: Tensor to write with a row less.
        tokenizer: Whether it has one, of bytes and three control tokens.
        beside: Tensors to write beside the model's.
    """
    random, expected = np.random.default_rng(1), {}
    writer = GGUFWriter(path, "llama")
    meta = {
        "llama.block_count": shape.layers,
        "llama.context_length": shape.max_positions,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.ffn,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_epsilon,
        "llama.rope.freq_base": shape.rope_theta,
        "llama.vocab_size": shape.vocab,
        "general.name": shape.name,
        **(change or {}),
    }
    for key, value in meta.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        (add | {bool: writer.add_bool, list: writer.add_array})[type(value)](key, value)
    if tokenizer:
        letters = sorted(ByteLevel.alphabet())
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<|end|>", "<|im_start|>", "<|im_end|>", *letters])
        writer.add_token_types([3] * 3 + [1] * len(letters))
        writer.add_eos_token_id(0)
    for name, (key, extent) in names(shape).items():
        value = random.normal(0, 0.2, extent).astype(np.float32)
        here = kind if value.ndim == 2 else Kind.F32
        expected[name] = dequantize(quantize(value, here), here)
        if ".attn_q." in key or ".attn_k." in key:
            value = permuted(value, shape.heads if ".attn_q." in key else int(shape.kv_heads or 0))
        if key == misshapen:
            value = value[:-1]
        if key != without:
            writer.add_tensor(key, quantize(value, here), raw_dtype=here)
    for key in beside:
        writer.add_tensor(key, np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
