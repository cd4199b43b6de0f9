"""Each architecture of GGUF, against files that the package `gguf` writes under its own names."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf import GGMLQuantizationType as Kind
from gguf import (
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    RopeScalingType,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from gguf.constants import MODEL_ARCH_NAMES

from tests.checkpoint.gguf_samples import permuted
from tests.fuzz import examples
from workbench.checkpoint import read_tensors
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.gguf.gguf_tensors import gguf_source
from workbench.checkpoint.gguf.gguf_writer import gguf_architecture, write_gguf
from workbench.checkpoint.huggingface.huggingface_names import parameter_shapes, stored_parts
from workbench.errors import PlanError
from workbench.plan.catalog.families.stored_parts import stored_extents
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.catalog.gguf_config import gguf_account, metadata_of, read_gguf_config
from workbench.plan.catalog.gguf_keys import KIND
from workbench.plan.catalog.gguf_rotary import llama3_divisors, read_llama3
from workbench.plan.model.model_shape import Shape

BASE: dict[str, Any] = {
    **{"name": "sample", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96},
    **{"vocab": 67, "max_positions": 512, "norm_epsilon": 1e-6, "tied": True},
}
MOE = {"experts": 4, "top_k": 2, "ffn": 32}
GELU = {"norm": "layernorm", "mlp": "gelu", "biases": "all", "kv_heads": 4, "ffn": 256}
LLAMA3 = {
    **{"type": "llama3", "factor": 8.0, "low_frequency_factor": 1.0},
    **{"high_frequency_factor": 4.0, "original_positions": 8192},
}
YARN = {"type": "yarn", "factor": 4.0, "original_positions": 128, "beta_fast": 16.0}
SAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_theta": 5e5}),
    "llama, linear": ("llama", "llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama, yarn": ("llama", "llama", {"rope_scaling": YARN}),
    "llama 3.1": ("llama", "llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "tied": False}),
    "mixtral": ("llama", "mixtral", {"moe": {**MOE, "ffn": 96}}),
    "qwen2": ("qwen2", "qwen2", {"biases": "qkv"}),
    "qwen3": ("qwen3", "qwen3", {"qk_norm": "head", "head_dim": 32}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"qk_norm": "head", "moe": MOE}),
    "phi3": ("phi3", "phi3", {"tied": False, "window": 100}),
    "gpt2": ("gpt2", "gpt2", {**GELU, "positions": "learned"}),
    "bloom": ("bloom", "bloom", {**GELU, "positions": "alibi", "embedding_norm": True}),
}
"""Name -> (general.architecture, model_type in transformers, fields of the shape)."""


def shape_of(name: str) -> Shape:
    return Shape.model_validate(BASE | SAMPLES[name][2])


def random_values(shape: Shape) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.normal(0, 0.2, extent).astype(np.float32)
        for name, extent in parameter_shapes(shape).items()
    }


def converted(name: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp's converter makes of transformers' files, by `gguf`'s names."""
    architecture, model_type, _ = SAMPLES[name]
    shape = shape_of(name)
    by_name = {said: number for number, said in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(by_name[architecture], shape.layers)
    family = FAMILIES[model_type]
    parts = stored_parts(family, shape)
    stored = {key: np.zeros(n, np.float32) for key, n in stored_extents(parts).items()}
    for parameter, own in parts.items():
        for part in own:
            value = values[parameter][tuple(slice(*s) for s in part.ours)]
            value = value.swapaxes(-1, -2) if part.transposed else value
            theirs = stored[part.key][tuple(slice(*s) for s in part.theirs)]
            theirs[...] = value.reshape(theirs.shape)
    found: dict[str, Any] = {}
    for key, value in stored.items():
        if architecture == "gpt2" and ".h." in key and ".ln_" not in key and value.ndim == 2:
            value = value.T  # Conv1D
        if "query_key_value" in key:  # by head in transformers, one after the other in GGUF
            by_head = value.reshape(shape.heads, 3, 16, *value.shape[1:])
            value = by_head.swapaxes(0, 1).reshape(value.shape)
        if architecture == "llama" and re.search(r"self_attn\.[qk]_proj", key):
            value = permuted(value, shape.heads if "q_proj" in key else int(shape.kv_heads or 0))
        one = re.sub(r"\.experts\.\d+\.", ".experts.", key)
        one = one.removeprefix("transformer.") if architecture == "bloom" else one
        theirs_name = names.get_name(one, try_suffixes=(".weight", ".bias"))
        assert theirs_name is not None, key
        found.setdefault(theirs_name, []).append(value)
    tensors = {key: np.stack(some) if "exps" in key else some[0] for key, some in found.items()}
    if shape.rope_scaling and shape.rope_scaling.type == "llama3":
        tensors["rope_freqs.weight"] = llama31_divisors(shape)
    return tensors


def llama31_divisors(shape: Shape) -> np.ndarray:
    """As `LlamaModel.generate_extra_tensors` of convert_hf_to_gguf.py."""
    half = int(shape.head_dim or 0) // 2
    frequencies = 1.0 / (shape.rope_theta ** (torch.arange(half, dtype=torch.float32) / half))
    low, high, factor, original = 1.0, 4.0, 8.0, 8192
    found = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / float(frequency)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def write(path: Path, name: str, tensors: dict[str, np.ndarray], kind: Kind) -> None:
    """A file as `gguf`'s own writer makes it, by its own methods."""
    shape = shape_of(name)
    writer = GGUFWriter(path, SAMPLES[name][0])
    writer.add_name(shape.name)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(int(shape.kv_heads or 0))
    writer.add_vocab_size(shape.vocab)
    if shape.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(shape.norm_epsilon)
        writer.add_key_length(int(shape.head_dim or 0))
        writer.add_rope_freq_base(shape.rope_theta)
    else:
        writer.add_layer_norm_eps(shape.norm_epsilon)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if (moe := shape.moe) is not None:
        writer.add_expert_count(moe.experts)
        writer.add_expert_used_count(moe.top_k)
        writer.add_expert_feed_forward_length(moe.ffn)
    if (scaling := shape.rope_scaling) is not None and scaling.type != "llama3":
        writer.add_rope_scaling_type(RopeScalingType(scaling.type))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.type == "yarn":
            writer.add_rope_scaling_orig_ctx_len(int(scaling.original_positions or 0))
            writer.add_rope_scaling_yarn_beta_fast(scaling.fast)
    for key, value in tensors.items():
        here = kind_of(key, value, kind)
        writer.add_tensor(key, quantize(np.ascontiguousarray(value), here), raw_dtype=here)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(key: str, value: np.ndarray, kind: Kind) -> Kind:
    plain = value.ndim == 1 or "position_embd" in key or "ffn_gate_inp" in key
    return Kind.F32 if plain else kind


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", SAMPLES)
def test_files_of_gguf_are_read_and_written_alike(tmp_path: Path, name: str, kind: Kind) -> None:
    shape = shape_of(name)
    values = random_values(shape)
    tensors = converted(name, values)
    write(tmp_path / "theirs.gguf", name, tensors, kind)
    assert read_gguf_config(tmp_path / "theirs.gguf") == shape
    source = gguf_source(tmp_path / "theirs.gguf", shape)
    for parameter, value in values.items():
        some = tuple((n // 4, n - n // 3) for n in value.shape)
        extent = [stop - start for start, stop in some]
        shard = Shard(parameter, "parameter", torch.zeros(extent), value.shape, some)
        read_tensors.load_shards(source, [shard])
        here = kind_of(parameter, value, kind)
        if "positions" in parameter or "route" in parameter:
            here = Kind.F32
        expected = dequantize(quantize(value, here), here)[tuple(slice(*s) for s in some)]
        assert np.array_equal(shard.tensor.numpy(), expected), parameter
    if name == "phi3":
        return  # read only
    assert gguf_architecture(shape) == SAMPLES[name][0]
    write_gguf(tmp_path / "ours.gguf", shape, kind.name.lower(), {}, values.__getitem__)
    assert read_gguf_config(tmp_path / "ours.gguf") == shape
    theirs, ours = (
        {tensor.name: tensor for tensor in GGUFReader(tmp_path / f"{who}.gguf").tensors}
        for who in ("theirs", "ours")
    )
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert tensor.tensor_type == ours[key].tensor_type, key
        if key == "rope_freqs.weight":
            np.testing.assert_allclose(ours[key].data, tensor.data, rtol=1e-6)
        else:
            assert np.array_equal(tensor.data, ours[key].data), key


def test_llama3s_scaling_is_found_in_its_divisors() -> None:
    for low, high, original, factor in ((1, 4, 8192, 32), (1, 8, 4096, 8), (1, 2.5, 16384, 16)):
        given = {
            **{"type": "llama3", "factor": float(factor), "low_frequency_factor": float(low)},
            **{"high_frequency_factor": float(high), "original_positions": original},
        }
        divisors = llama3_divisors(given, 5e5, 128)
        assert read_llama3(divisors, 5e5, 128) == given
        divisors[20] *= 1.001
        assert read_llama3(divisors, 5e5, 128) is None


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.type: is 'dynamic'"),
        ({"moe": {**MOE, "shared": 1}}, r"moe\.shared: is 1.*GGUF's llama"),
        ({"moe": {**MOE, "renormalise": False}}, r"moe\.renormalise: is False"),
        ({**GELU, "positions": "learned", "mlp": "relu"}, r"mlp: is 'relu'.*GGUF's gpt2.*gelu"),
    ],
)
def test_what_no_architecture_expresses_is_refused_by_field(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        gguf_architecture(Shape.model_validate(BASE | fields))


def test_frequencies_of_no_known_rule_are_refused(tmp_path: Path) -> None:
    shape = shape_of("llama 3.1")
    tensors = converted("llama 3.1", random_values(shape))
    tensors["rope_freqs.weight"][3] = 5
    write(tmp_path / "a.gguf", "llama 3.1", tensors, Kind.F32)
    with pytest.raises(PlanError, match=r"a\.gguf.*frequencies of its own \(rope_freqs\.weight\)"):
        gguf_source(tmp_path / "a.gguf", shape)


VALUES = [0, -1, 2**31 - 1, 1.0, math.nan, math.inf, "", "x", True, [1], [0.5], ["a"]]


@pytest.mark.parametrize("name", SAMPLES)
def test_any_metadata_may_hold_anything(name: str, tmp_path: Path) -> None:
    shape, pick, read, refused = shape_of(name), random.Random(name), 0, 0
    path, architecture = tmp_path / "a.gguf", SAMPLES[name][0]
    keys: dict[str, Any] = {KIND: architecture, "tokenizer.ggml.tokens": ["a", "b"]}
    keys |= metadata_of(shape, architecture)
    for _ in range(examples(60)):
        held = {key: value for key, value in keys.items() if value is not None}
        for key in pick.sample(list(held), pick.choice([1, 1, 2])):
            held[key] = pick.choice(VALUES)
        writer, kinds = GGUFWriter(path, "llama"), GGUFValueType
        writer.kv_data[0].clear()
        for key, value in held.items():
            inner = kinds.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, kinds.get_type(value), inner)
        steps = np.linspace(1, pick.choice([1, 8]), (shape.head_dim or 16) // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", steps)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        try:
            gguf_account(path)
            read_gguf_config(path)
        except PlanError as error:
            refused += 1
            assert all(problem.message for problem in error.problems)
            continue
        read += 1
    assert read and refused, "a test that refuses or reads everything tests nothing"
