"""Weights under Hugging Face's names: the same model there and here, to the bit and back."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.test_session_checkpoint import Whole, save, session_of
from tests.parallel.small import GPT, LLAMA, plan
from workbench.checkpoint.huggingface.huggingface_names import (
    config_json,
    huggingface_source,
    parameter_shapes,
)
from workbench.engine.export.export_weights import export_checkpoint
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

BATCH = {"training.global_batch": 8}
LAYER = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}
"""Names and shapes in transformers' LlamaDecoderLayer, of the small shape."""
OUTSIDE = {
    "model.embed_tokens.weight": (257, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (257, 32),
}


def state(made: ResolvedPlan, rank: int) -> tuple[int, list[tuple[str, str, Any, np.ndarray]]]:
    """Steps done, and what a rank holds, after it has loaded."""
    saver = SessionCheckpointer(session_of(made, rank), Path("unused"))
    done = saver.load()
    return done, [(s.name, s.kind, s.slices, s.tensor.float().numpy()) for _, s in saver._shards()]


def whole(made: ResolvedPlan) -> Whole:
    ((_, shards),) = run_ranks(1, partial(state, made))
    return {(name, kind): tensor for name, kind, _, tensor in shards}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Whole]:
    """A checkpoint written by tensor x ZeRO-3 ranks in bf16, its export, and its whole tensors."""
    folder = tmp_path_factory.mktemp("export")
    made = plan(
        2, 1, 2, changes={**BATCH, "strategy.data.zero": 3, "strategy.precision": "bf16"}
    ).resolve()
    run_ranks(4, partial(save, made, folder))
    checkpoint = folder / "checkpoints" / "step-00000001"
    export_checkpoint(checkpoint, folder / "weights", shard_bytes=30_000)
    read = {**BATCH, "strategy.precision": "bf16", "checkpoint.load": str(checkpoint)}
    return checkpoint, folder / "weights", whole(plan(changes=read).resolve())


def test_names_shapes_and_index_are_those_of_transformers(
    exported: tuple[Path, Path, Whole],
) -> None:
    _, folder, _ = exported
    expected = {
        f"model.layers.{n}.{name}": shape for n in range(4) for name, shape in LAYER.items()
    } | OUTSIDE
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = {
        key: (file, value) for file in files for key, value in load_file(folder / file).items()
    }
    assert {key: tuple(value.shape) for key, (_, value) in tensors.items()} == expected
    assert {key: file for key, (file, _) in tensors.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in tensors.values())
    assert all(value.dtype == torch.bfloat16 for _, value in tensors.values())
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        *files,
        "model.safetensors.index.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["num_key_value_heads"]) == (["LlamaForCausalLM"], 2)


@pytest.mark.parametrize(
    "mesh, data", [((1, 2, 1), {}), ((1, 1, 2), {"zero": 3}), ((2, 1, 1), {"zero": 1})]
)
def test_exported_weights_start_a_run_on_any_mesh(
    exported: tuple[Path, Path, Whole], mesh: tuple[int, int, int], data: dict[str, Any]
) -> None:
    _, folder, wholes = exported
    changes = BATCH | {f"strategy.data.{key}": value for key, value in data.items()}
    changes |= {"strategy.precision": "bf16", "checkpoint.load": str(folder)}
    made = plan(*mesh, changes=changes).resolve()
    held = 0
    for done, shards in run_ranks(made.world_size, partial(state, made)):
        assert done == 0
        for name, kind, slices, tensor in shards:
            if kind in (
                "parameter",
                "master",
            ):  # a master begins as its parameter, which is all that was exported
                expected = wholes[name, "parameter"][tuple(slice(*s) for s in slices)]
                assert np.array_equal(tensor, expected), (name, kind)
                held += tensor.size
            else:
                assert not tensor.any(), (name, kind)
    assert held >= sum(value.size for (_, kind), value in wholes.items() if kind == "parameter")


def plain_loss(weights: dict[str, Tensor], config: dict[str, Any], tokens_T: Tensor) -> Tensor:
    """Summed next-token loss of a Llama as transformers computes it, from its names and
    configuration alone.
    """
    heads, groups, size = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    length = len(tokens_T) - 1
    frequency = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    angles = torch.outer(torch.arange(length).double(), frequency).repeat(1, 2)

    def normed(x: Tensor, name: str) -> Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
            * weights[f"{name}.weight"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def turned(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * angles.cos() + half * angles.sin()

    x = weights["model.embed_tokens.weight"][tokens_T[:-1]]
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}"
        h = normed(x, f"{at}.input_layernorm")
        q, k, v = (
            linear(h, f"{at}.self_attn.{p}_proj").view(length, count, size).transpose(0, 1)
            for p, count in (("q", heads), ("k", groups), ("v", groups))
        )
        k, v = (y.repeat_interleave(heads // groups, 0) for y in (turned(k), v))
        scores = turned(q) @ k.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(
            -1
        )
        x = x + linear((scores @ v).transpose(0, 1).reshape(length, -1), f"{at}.self_attn.o_proj")
        h = normed(x, f"{at}.post_attention_layernorm")
        x = x + linear(
            F.silu(linear(h, f"{at}.mlp.gate_proj")) * linear(h, f"{at}.mlp.up_proj"),
            f"{at}.mlp.down_proj",
        )
    head = weights[
        "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    ]
    return F.cross_entropy(normed(x, "model.norm") @ head.t(), tokens_T[1:], reduction="sum")


@pytest.mark.parametrize(
    "more", [{}, {"tied": True, "rope_theta": 5e5}, {"biases": "qkv"}, {"biases": "all"}], ids=str
)
def test_a_foreign_reader_computes_the_same_loss(tmp_path: Path, more: dict[str, Any]) -> None:
    made = plan(changes=BATCH, **more).resolve()

    def ours(rank: int) -> float:
        session = session_of(made, rank)
        with torch.no_grad():  # so that biases and norms count
            for value in session.part.store.values.values():
                value.add_(
                    torch.randn(value.shape, generator=torch.Generator().manual_seed(3)), alpha=0.05
                )
        saver = SessionCheckpointer(session, tmp_path)
        saver.save(1)
        saver.wait()
        model = session.part.stages[0]
        with torch.no_grad():
            return float(model(tokens[None, :-1], tokens[None, 1:]))

    tokens = torch.randint(257, (17,), generator=torch.Generator().manual_seed(2))
    (loss,) = run_ranks(1, ours)
    export_checkpoint(tmp_path / "checkpoints" / "step-00000001", tmp_path / "weights")
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    weights = {
        key: value.double()
        for key, value in load_file(tmp_path / "weights" / "model.safetensors").items()
    }
    assert float(plain_loss(weights, config, tokens)) == pytest.approx(loss, rel=1e-5)
    theirs = Plan.of(str(tmp_path / "weights")).resolve().shape
    assert huggingface_source(tmp_path / "weights", theirs).tensors.keys() >= {
        (n, "master") for n in parameter_shapes(made.shape)
    }


@pytest.mark.parametrize(
    "shape, words",
    [
        ({**GPT, "norm": "rmsnorm"}, r"model\.norm: is 'rmsnorm', which GPT2"),
        ({**LLAMA, "norm": "layernorm"}, r"model\.norm: is 'layernorm'"),
        ({**LLAMA, "mlp": "gelu"}, r"model\.mlp: is 'gelu'.*swiglu"),
        ({**LLAMA, "moe": {"experts": 2, "top_k": 1, "ffn": 8}}, r"model\.moe: is set"),
    ],
)
def test_models_without_such_names_are_refused(
    tmp_path: Path, shape: dict[str, Any], words: str
) -> None:
    run_ranks(1, partial(save, plan(shape=shape, changes=BATCH).resolve(), tmp_path))
    with pytest.raises(PlanError, match=words):
        export_checkpoint(tmp_path / "checkpoints" / "step-00000001", tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_exports_replace_nothing_and_read_nothing_damaged(
    exported: tuple[Path, Path, Whole], tmp_path: Path
) -> None:
    checkpoint, folder, _ = exported
    with pytest.raises(PlanError, match="is there already"):
        export_checkpoint(checkpoint, folder)
    with pytest.raises(PlanError, match=r"--to.*cannot be written"):
        export_checkpoint(checkpoint, folder / "config.json" / "below")
    file = checkpoint / "rank00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"rank00002\.safetensors is damaged"):
        export_checkpoint(checkpoint, tmp_path / "other")
    file.write_bytes(data)
    assert list(tmp_path.iterdir()) == []


Weights = dict[str, Tensor]


def without(weights: Weights, config: dict[str, Any]) -> None:
    del weights["model.layers.3.mlp.up_proj.weight"]


def misshapen(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.3.mlp.up_proj.weight"] = torch.zeros(48, 31)


def quantised(weights: Weights, config: dict[str, Any]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)


def unexpected(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)


def other_base(weights: Weights, config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 5e5


def scaled(weights: Weights, config: dict[str, Any]) -> None:
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}


def longrope(weights: Weights, config: dict[str, Any]) -> None:
    config["rope_scaling"] = {"rope_type": "longrope", "factor": 8.0}


def other_family(weights: Weights, config: dict[str, Any]) -> None:
    config |= {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    config["architectures"] = ["MixtralForCausalLM"]


@pytest.mark.parametrize(
    "spoil, words",
    [
        (without, r"has no model\.layers\.3\.mlp\.up_proj\.weight"),
        (misshapen, r"up_proj\.weight has shape \(48, 31\), the plan's model needs \(48, 32\)"),
        (quantised, r"lm_head\.weight is I8; legal: F64, F32, F16, BF16"),
        (
            unexpected,
            r"has model\.layers\.0\.self_attn\.q_norm\.weight, which the plan's model lacks",
        ),
        (other_base, r"model\.rope_theta: is 10000\.0; in .*config\.json it is 500000\.0"),
        (scaled, r"model\.rope_scaling\.type: is None; in .*config\.json it is 'linear'"),
        (longrope, r"rope_scaling of type 'longrope'"),
        (other_family, r"model\.moe\.experts: is None; in .*config\.json it is 2"),
    ],
)
def test_foreign_folders_that_do_not_fit_are_refused(
    tmp_path: Path, spoil: Any, words: str
) -> None:
    shape = Shape.model_validate(LLAMA)
    weights: Weights = {
        f"model.layers.{n}.{k}": torch.zeros(s) for n in range(4) for k, s in LAYER.items()
    }
    weights |= {key: torch.zeros(extent) for key, extent in OUTSIDE.items()}
    config = config_json(shape, torch.float32)
    write(tmp_path, weights, config)
    assert len(huggingface_source(tmp_path, shape).tensors) == 2 * len(weights)
    spoil(weights, config)
    write(tmp_path, weights, config)
    with pytest.raises(ValueError, match=words):
        huggingface_source(tmp_path, shape)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize(
    "extra",
    [
        HEAD,
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.4.mlp.up_proj.weight",
        "model.layers.1.post_feedforward_layernorm.weight",
        "model.norm.bias",
        "lm_head.bias",
        "model.embed_positions.weight",
        "score.weight",
    ],
)
def test_no_tensor_is_dropped_because_the_configuration_says_otherwise(
    tmp_path: Path, extra: str, sharded: bool
) -> None:
    shape, weights = tied_model()
    weights[extra] = torch.ones(SIZES.get(extra, (32,)))
    write(tmp_path, weights, config_json(shape, torch.float32), sharded)
    with pytest.raises(ValueError, match=re.escape(extra)):
        huggingface_source(tmp_path, shape)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_an_equal_copy_of_the_embedding_is_a_tied_head(tmp_path: Path, sharded: bool) -> None:
    shape, weights = tied_model()
    expected = 2 * len(weights)
    weights[HEAD] = weights[EMBEDDING].clone()
    write(tmp_path, weights, config_json(shape, torch.float32), sharded)
    assert len(huggingface_source(tmp_path, shape).tensors) == expected
    weights[HEAD][256, 31] += 1e-3
    write(tmp_path, weights, config_json(shape, torch.float32), sharded)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        huggingface_source(tmp_path, shape)


def test_a_missing_head_that_is_not_tied_is_said(tmp_path: Path) -> None:
    shape, weights = tied_model()
    shape = shape.model_copy(update={"tied": False})
    write(tmp_path, weights, config_json(shape, torch.float32))
    with pytest.raises(ValueError, match=r"no lm_head\.weight.*tie_word_embeddings to true"):
        huggingface_source(tmp_path, shape)


def test_a_tensor_of_two_values_in_two_shards_is_refused(tmp_path: Path) -> None:
    shape, weights = tied_model()
    write(tmp_path, weights, config_json(shape, torch.float32), sharded=True)
    key, last = "model.layers.0.mlp.up_proj.weight", tmp_path / "model-00002.safetensors"
    again = load_file(last) | {key: weights[key].clone()}
    save_file(again, last)
    huggingface_source(tmp_path, shape)
    again[key][0, 0] += 1
    save_file(again, last)
    with pytest.raises(ValueError, match=f"has another {re.escape(key)} than .*model-00001"):
        huggingface_source(tmp_path, shape)


SIZES = {HEAD: (257, 32), "model.layers.4.mlp.up_proj.weight": (48, 32)}


def tied_model() -> tuple[Shape, Weights]:
    """A small Llama whose head is its embedding, and its weights."""
    random = torch.Generator().manual_seed(4)
    names = {f"model.layers.{n}.{k}": s for n in range(4) for k, s in LAYER.items()} | OUTSIDE
    weights = {k: torch.randn(s, generator=random) for k, s in names.items() if k != HEAD}
    return Shape.model_validate(LLAMA | {"tied": True}), weights


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_weights_are_refused_by_name_and_place(
    exported: tuple[Path, Path, Whole], tmp_path: Path, value: float
) -> None:
    for path in exported[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    key = "model.layers.2.mlp.up_proj.weight"
    listed = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    weights = load_file(tmp_path / listed[key])
    weights[key].view(-1)[[7, 1000]] = value
    save_file(weights, tmp_path / listed[key])
    made = plan(
        changes={**BATCH, "strategy.precision": "bf16", "checkpoint.load": str(tmp_path)}
    ).resolve()
    words = f"{listed[key]}: {key} is {value} at [0, 7]; get intact weights"
    with pytest.raises(PlanError, match=re.escape(words)):
        SessionCheckpointer(session_of(made, 0), Path("unused")).load()


def write(folder: Path, weights: Weights, config: dict[str, Any], sharded: bool = False) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(weights, folder / "model.safetensors")
        return
    keys = sorted(weights, key=lambda key: key == HEAD)
    files = {
        key: f"model-{1 + (n >= len(keys) // 2):05d}.safetensors" for n, key in enumerate(keys)
    }
    for file in set(files.values()):
        save_file({key: weights[key] for key in keys if files[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_files_that_are_missing_or_cut_are_named(
    exported: tuple[Path, Path, Whole], tmp_path: Path
) -> None:
    shape = plan().resolve().shape
    for path in exported[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    cut = next(tmp_path.glob("model-00002*"))
    data = cut.read_bytes()
    cut.write_bytes(data[:-3])
    with pytest.raises(ValueError, match=f"{cut.name} is damaged"):
        huggingface_source(tmp_path, shape)
    cut.unlink()
    with pytest.raises(ValueError, match=f"lists '{cut.name}', which is not there"):
        huggingface_source(tmp_path, shape)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is no index of a model"):
        huggingface_source(tmp_path, shape)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        huggingface_source(tmp_path, shape)
