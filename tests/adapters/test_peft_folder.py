"""Adapters beside PEFT itself: the same logits from what is written here, and the same weights from
what PEFT writes.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.test_transformers import VARIANTS, logits, random_model, runs, write
from tests.parallel.family_table import CONFIGS
from workbench.adapters import peft_config
from workbench.adapters.module_patterns import Pattern, match_modules
from workbench.adapters.peft_folder import PeftAdapters, read_peft_folder
from workbench.adapters.peft_names import adapter_extents, peft_modules
from workbench.adapters.peft_writer import write_peft_folder
from workbench.adapters.weight_updates import WeightUpdates, read_updates
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.block_linears import lora_scale
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Lora

RANK = 4
FUSED = ("gpt2", "phi3", "falcon", "bloom", "gpt_neox")
ATTENTION_ALONE = ("deepseek_v2", "deepseek_v3")
"""Families with experts beside dense layers of the same names."""


def small(family: str, **keys: Any) -> Shape:
    return shape_of({"model_type": family, **CONFIGS[family], "num_hidden_layers": 2, **keys})


def adapted(family: str, shape: Shape) -> list[str]:
    """Projections of blocks, routers apart."""
    modules = peft_modules(FAMILIES[family], shape).values()
    names = {one.name for module in modules for one in module.projections}
    names = {name for name in names if name != "head" and not name.endswith(".route")}
    return sorted(n for n in names if family not in ATTENTION_ALONE or ".attention." in n)


def drawn(shape: Shape, names: list[str], rank: int = RANK) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    extents = adapter_extents(shape, dict.fromkeys(names, rank))
    return {n: torch.randn(extent, generator=random) * 0.1 for n, extent in extents.items()}


def updates_of(adapters: PeftAdapters) -> WeightUpdates:
    return read_updates(adapters.source, adapters.scales, adapters.replaced)


def merged(model: Transformer, updates: WeightUpdates) -> Transformer:
    with torch.no_grad():
        for name, value in model.named_parameters():
            updates.apply(name, tuple((0, n) for n in value.shape), value)
    return model


def base_of(family: str, shape: Shape, folder: Path) -> tuple[Transformer, Any]:
    """A random model, and the same in transformers."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    model = random_model(shape)
    write(model, shape, FAMILIES[family], folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model, theirs


def assert_same_logits(model: Transformer, theirs: Any) -> None:
    vocab = model.shape.vocab
    tokens_BT = torch.randint(vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = logits(model, tokens_BT), theirs.eval()(tokens_BT).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("family", "keys"), [*((name, {}) for name in CONFIGS if runs(name)), *VARIANTS], ids=str
)
def test_peft_loads_what_is_written(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="compares with PEFT")
    shape = small(family, **keys)
    names, rslora = adapted(family, shape), bool(list(CONFIGS).index(family) % 2)
    values, lora = drawn(shape, names), Lora(rank=RANK, alpha=6, rslora=rslora)
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_peft_folder(
        folder, FAMILIES[family], shape, lora, names, torch.float32, values.__getitem__
    )
    read = read_peft_folder(folder, FAMILIES[family], shape)
    assert read.ranks == dict.fromkeys(names, RANK)
    assert read.scales == pytest.approx(
        dict.fromkeys(names, lora_scale(6, RANK, rslora)), rel=1e-12
    )
    updates = updates_of(read)
    for name in names:
        assert torch.equal(updates.updates[f"{name}.weight"].a, values[f"{name}.lora_a"])
        assert torch.equal(updates.updates[f"{name}.weight"].b, values[f"{name}.lora_b"])
    model, theirs = base_of(family, shape, tmp_path / "base")
    assert_same_logits(merged(model, updates), peft.PeftModel.from_pretrained(theirs, folder))


THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 3},
            "alpha_pattern": {"up_proj": 5},
            "modules_to_save": ["lm_head", "norm"],
        },
    ),
    "layers": (
        "qwen2",
        {
            "target_modules": ["q_proj", "gate_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
            "exclude_modules": ["mlp.gate_proj"],
            "use_rslora": True,
            "bias": "lora_only",
        },
    ),
    "regex": ("mistral", {"target_modules": r".*\.(0|1)\.self_attn\.[qv]_proj", "r": 3}),
    "fused": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fused by head": ("bloom", {"target_modules": ["query_key_value"], "bias": "all"}),
}


@pytest.mark.parametrize("case", THEIRS)
def test_what_peft_writes_is_read(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="compares with PEFT")
    family, keys = THEIRS[case]
    shape = small(family)
    model, theirs = base_of(family, shape, tmp_path / "base")
    config = peft.LoraConfig(**{"r": RANK, "lora_alpha": 6, "task_type": "CAUSAL_LM", **keys})
    theirs = peft.get_peft_model(theirs, config)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in theirs.parameters():
            if value.requires_grad:
                value.copy_(value + torch.randn(value.shape, generator=random) * 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    read = read_peft_folder(tmp_path / "adapter", FAMILIES[family], shape)
    assert_same_logits(merged(model, updates_of(read)), theirs)


def written(tmp_path: Path, shape: Shape, dtype: torch.dtype = torch.float32) -> Path:
    """Adapters of Llama's query projections."""
    names = [f"blocks.{layer}.attention.q" for layer in range(shape.layers)]
    values, folder = drawn(shape, names), tmp_path / "adapter"
    folder.mkdir()
    write_peft_folder(
        folder, FAMILIES["llama"], shape, Lora(rank=RANK, alpha=8), names, dtype, values.__getitem__
    )
    return folder


def test_a_value_that_is_not_finite_is_refused_by_place(tmp_path: Path) -> None:
    shape = small("llama")
    folder = written(tmp_path, shape)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name][3, 1] = float("nan")
    save_file(tensors, path)
    adapters = read_peft_folder(folder, FAMILIES["llama"], shape)
    with pytest.raises(PlanError) as refused:
        updates_of(adapters)
    assert f"{path}: {name} is nan at [3, 1]" in str(refused.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "peft_type": ({"peft_type": "IA3"}, "peft_type of '{}' is 'IA3'; legal here: 'LORA'"),
    "dora": ({"use_dora": True}, "sets 'use_dora', which changes what adapters compute"),
    "unknown": ({"some_new_key": {"a": 1}}, "sets 'some_new_key'"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights of '{}' is 'pissa'; legal here"),
    "parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, "sets 'target_parameters'"),
    "rank": ({"r": 5}, "has shape [4, 32], rank 5 and the base model need [5, 32]"),
    "no rank": ({"r": 0}, "r of '{}' is 0; legal here: a whole number from 1"),
    "true": ({"r": True}, "r of '{}' is True; legal here"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha of '{}' is '8'; legal here: a number"),
    "regex": ({"target_modules": "(q_proj"}, "target_modules of '{}' is '(q_proj'; legal here"),
    "targets": ({"target_modules": ["q_proj", "k_proj"]}, "lacks lora_A.weight of model.layers.0"),
    "no target": ({"target_modules": ["k_proj"]}, "of model.layers.0.self_attn.q_proj, which tar"),
    "layers": ({"layers_to_transform": [0]}, "of model.layers.1.self_attn.q_proj, which target"),
    "saved": ({"modules_to_save": ["embed_tokens"]}, "lacks model.embed_tokens.weight, which m"),
    "group": ({"layers_pattern": "(layers", "layers_to_transform": 0}, "layers_pattern of '{}' is"),
    "pattern": ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern.q_proj of '{}' is '4'; legal"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_not_read_are_refused_by_key(case: str, tmp_path: Path) -> None:
    shape = small("llama")
    folder, (keys, words) = written(tmp_path, shape), REFUSED[case]
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    with pytest.raises(PlanError) as refused:
        read_peft_folder(folder, FAMILIES["llama"], shape)
    assert words.format(path) in str(refused.value) and str(refused.value).startswith("--adapter: ")


SLOW = r"([a-z_.0-9]+)+!"
ENDLESS: dict[str, dict[str, Any]] = {
    "target_modules": {"target_modules": SLOW},
    "exclude_modules": {"exclude_modules": SLOW},
    "modules_to_save": {"modules_to_save": [SLOW]},
    "layers_pattern": {"layers_pattern": ["x", SLOW], "layers_to_transform": [0]},
    "rank_pattern": {"rank_pattern": {SLOW: 4}},
    "alpha_pattern": {"alpha_pattern": {SLOW: 4}},
}


@pytest.mark.parametrize("key", ENDLESS)
def test_a_pattern_that_takes_too_long_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_config, "match_modules", partial(match_modules, seconds=0.5))
    shape = small("llama")
    folder = written(tmp_path, shape)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ENDLESS[key]}))
    with pytest.raises(PlanError) as refused:
        read_peft_folder(folder, FAMILIES["llama"], shape)
    words = f"--adapter: '{SLOW}' of '{path}' takes more than 10 s to match the model's modules; "
    assert str(refused.value).startswith(words)


def test_a_child_matches_as_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["layers.1.self_attn.q_proj", "layers.12.mlp.up_proj", "lm_head"]
    patterns = [
        Pattern("a", r"(?:^|.*?\.)layers\.(\d+)\."),
        Pattern("b", "lm|lm_head", complete=True),
        Pattern("c", r"(.*\.)?(lm_head)$"),
        Pattern("d", "lm"),
    ]
    here = match_modules(patterns, names)
    assert here[patterns[0]] == {names[0]: "1", names[1]: "12"}
    assert here[patterns[1]] == here[patterns[3]] | {"lm_head": "lm_head"} == {"lm_head": "lm_head"}
    assert here[patterns[2]] == {"lm_head": None}
    monkeypatch.setattr("workbench.adapters.module_patterns.MOST_MATCHES", 0)
    assert match_modules(patterns, names) == here


def test_adapters_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    shape = small("llama")
    folder = written(tmp_path, shape)
    others = {
        ("llama", ("num_hidden_layers", 1)): "has adapters of model.layers.1.self_attn.q_proj, wh",
        ("llama", ("hidden_size", 64)): "has shape [4, 32], rank 4 and the base model need [4, 64]",
        ("llama", ("num_hidden_layers", 3)): "lacks lora_A.weight of model.layers.2.self_attn.q",
        ("gpt2", ("n_layer", 2)): "has adapters of model.layers.0.self_attn.q_proj, which the base",
    }
    for (family, (key, value)), words in others.items():
        with pytest.raises(PlanError) as refused:
            read_peft_folder(folder, FAMILIES[family], small(family, **{key: value}))
        assert words in str(refused.value), refused.value
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(PlanError, match="is damaged: it has"):
        read_peft_folder(folder, FAMILIES["llama"], shape)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(PlanError, match=r"is a pickle; save it as adapter_model\.safetensors"):
        read_peft_folder(folder, FAMILIES["llama"], shape)
    config.write_text('{"r": 4, "r": 4}')
    with pytest.raises(PlanError, match="is no configuration of adapters: r is written twice"):
        read_peft_folder(folder, FAMILIES["llama"], shape)
    config.unlink()
    with pytest.raises(PlanError, match=r"holds no adapters; legal: a folder that holds"):
        read_peft_folder(folder, FAMILIES["llama"], shape)


@pytest.mark.parametrize(
    ("family", "names", "words"),
    [
        ("mixtral", ["blocks.0.mlp.experts.up"], "has blocks.0.mlp.experts.up alone, and PEFT ad"),
        (
            "deepseek_v2",
            ["blocks.1.mlp.shared.down"],
            "has blocks.1.mlp.shared.down, which PEFT cannot tell from experts in DeepseekV2",
        ),
    ],
)
def test_what_peft_cannot_express_is_refused(
    family: str, names: list[str], words: str, tmp_path: Path
) -> None:
    shape = small(family)
    values, lora = drawn(shape, names), Lora(rank=RANK, alpha=8)
    arguments = (lora, names, torch.float32, values.__getitem__)
    with pytest.raises(PlanError) as refused:
        write_peft_folder(tmp_path, FAMILIES[family], shape, *arguments)
    assert words in str(refused.value) and not list(tmp_path.iterdir())
