"""Families beside transformers itself, where it is installed: the same logits from the weights
written here, and the same weights from those written there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.parallel.family_table import CONFIGS, shape
from workbench.checkpoint import read_tensors
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.huggingface.huggingface_names import (
    config_json,
    huggingface_source,
    stored_parts,
)
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.models.attention.soft_cap import soft_cap
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.stored_parts import stored_extents
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.catalog.huggingface_config import read_huggingface_config, shape_of
from workbench.plan.model.model_shape import Shape
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan


def runs(family: str) -> bool:
    """Whether models of the family are built here, and their weights are written."""
    written = {"model": shape(family).model_dump(), "cluster": {"gpu": "local", "gpus": 1}}
    legal = not unsupported(Plan.model_validate(written).resolve(), "run")
    return legal and FAMILIES[family].names is not None


def test_every_family_is_in_the_table() -> None:
    assert FAMILIES.keys() == CONFIGS.keys()


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"new_decoder_architecture": False}),
    ("falcon", {"new_decoder_architecture": False, "parallel_attn": False, "bias": True}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"}),
    ("phi3", {"partial_rotary_factor": 0.75}),
]
"""Family -> keys of further kinds of it: Falcon 7B, Falcon RW but for ALiBi, GPT-NeoX in sequence,
Phi-4-mini.
"""


@pytest.mark.parametrize(
    ("family", "keys"), [*((name, {}) for name in CONFIGS if runs(name)), *VARIANTS], ids=str
)
def test_logits_and_weights_equal_those_of_transformers(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    small = shape_of({"model_type": family, **CONFIGS[family], **keys})
    model = random_model(small)
    write(model, small, FAMILIES[family], tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens_BT = torch.randint(small.vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = logits(model, tokens_BT), theirs(tokens_BT).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    for name, value in read(tmp_path / "theirs").items():
        assert torch.equal(value, model.get_parameter(name)), name


WINDOWS: dict[str, str] = {
    "mistral": "by kind",
    "qwen2": "by kind",
    "qwen3": "by kind",
    "gemma2": "by kind",
    "gemma3_text": "by kind",
    "mixtral": "everywhere",
    "qwen3_moe": "everywhere",
    "phi3": "everywhere",
    "llama": "nowhere",
    "olmo2": "nowhere",
}
"""Family -> where transformers' class of it has the window of `sliding_window`."""
KINDS = {"s": "sliding_attention", "f": "full_attention"}
LAYERS: list[tuple[str, tuple[str, ...]]] = [
    ("", ("by kind", "everywhere", "nowhere")),
    ("ssss", ("by kind", "everywhere")),
    ("ffff", ("by kind", "nowhere", "off")),
    ("ssfs", ("by kind",)),
    ("sfsf", ("by kind",)),
    ("sffs", ()),
    ("fsss", ()),
    ("ssssss", ()),
]
"""Letters of `layer_types` -> where a window is for them to be modelled; elsewhere named."""


def keys_of_windows(family: str, letters: str, on: bool = True) -> dict[str, Any]:
    """The keys as `save_pretrained` writes them, with the usual `max_window_layers`."""
    keys: dict[str, Any] = {"sliding_window": 6, "max_window_layers": 28}
    keys |= {"use_sliding_window": on} if family.startswith("qwen") else {}
    keys |= {"head_dim": 8} if family == "mistral" else {}
    return keys | ({"layer_types": [KINDS[letter] for letter in letters]} if letters else {})


@pytest.mark.parametrize("letters, modelled", LAYERS, ids=[letters for letters, _ in LAYERS])
@pytest.mark.parametrize("family", WINDOWS)
def test_windows_are_those_of_transformers_or_named(
    family: str, letters: str, modelled: tuple[str, ...], tmp_path: Path
) -> None:
    keys = keys_of_windows(family, letters)
    config = {"model_type": family, "pad_token_id": None, **CONFIGS[family], **keys}
    small = shape_of(config)
    assert (small.unmodelled is None) == (WINDOWS[family] in modelled)
    if small.unmodelled:
        assert "layer_types" in small.unmodelled
    else:
        assert_equal_logits(config, small, tmp_path)


@pytest.mark.parametrize("letters", ["", "ffff", "ssss", "sffs"])
@pytest.mark.parametrize("family", [name for name in WINDOWS if name.startswith("qwen")])
def test_a_window_that_is_turned_off_is_none(family: str, letters: str, tmp_path: Path) -> None:
    keys = keys_of_windows(family, letters, on=False)
    config = {"model_type": family, "pad_token_id": None, **CONFIGS[family], **keys}
    small = shape_of(config)
    if "s" in letters:
        assert small.unmodelled == "layer_types with sliding_attention among them"
    else:
        assert (small.window, small.unmodelled) == (None, None)
        assert_equal_logits(config, small, tmp_path)


@pytest.mark.parametrize(
    "family, keys, window",
    [
        ("mistral", {}, 4096),
        ("mixtral", {}, None),
        ("phi3", {}, None),
        ("gemma2", {}, 4096),
        ("gemma3_text", {}, 4096),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 28}, 4096),
        ("qwen2", {"use_sliding_window": True}, None),
        ("qwen2", {"sliding_window": 6}, None),
    ],
    ids=str,
)
def test_windows_of_absent_keys_are_those_of_transformers(
    family: str, keys: dict[str, Any], window: int | None
) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    own = {key: value for key, value in CONFIGS[family].items() if key != "sliding_window"} | keys
    theirs = transformers.AutoConfig.for_model(family, **own)
    kinds = getattr(theirs, "layer_types", None)
    has = theirs.sliding_window if kinds is None or KINDS["s"] in kinds else None
    assert shape_of({"model_type": family, **own}).window == has == window


STRETCHED = {KINDS["s"]: {"rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize("family", CONFIGS)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    own, tried = CONFIGS[family], 0
    for key in transformers.AutoConfig.for_model(family).to_dict().keys() - {"rope_parameters"}:
        absent = {other: value for other, value in own.items() if other != key}
        try:
            found = shape_of({"model_type": family, **absent})
        except PlanError as error:
            assert "has no " in str(error)
            continue
        usual = transformers.AutoConfig.for_model(family, **absent).to_dict()[key]
        assert found == shape_of({"model_type": family, **absent, key: usual}), key
        tried += 1
    assert tried > 10


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("deepseek_v3", {"q_lora_rank": None, "num_key_value_heads": 4}),
        ("gemma3_text", {"rope_parameters": STRETCHED, "rope_scaling": None}),
    ],
    ids=str,
)
def test_a_null_that_turns_off_is_read_so_and_what_is_not_modelled_is_named(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    config = {"model_type": family, "pad_token_id": None, **CONFIGS[family], **keys}
    small = shape_of(config)
    if "rope_parameters" in keys:
        assert small.unmodelled == "rope_parameters of sliding_attention of type 'linear'"
    else:
        assert_equal_logits(config, small, tmp_path)


def assert_equal_logits(config: dict[str, Any], small: Shape, folder: Path) -> None:
    """Assert that transformers computes the same from `config`, also beyond the window, and from
    the configuration that is written of its shape.
    """
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    family = FAMILIES[config["model_type"]]
    model = random_model(small)
    write(model, small, family, folder / "given", config)
    write(model, small, family, folder / "written")
    tokens_BT = torch.randint(small.vocab, (2, 24), generator=torch.Generator().manual_seed(1))
    found = logits(model, tokens_BT)
    for name in ("given", "written"):
        assert read_huggingface_config(str(folder / name)).window == small.window
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            expected = theirs(tokens_BT).logits
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5, name


def random_model(small: Shape) -> Transformer:
    """A model all of whose parameters count: norms near one, biases near zero."""
    model, random = Transformer(small), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = 0.3 if value.dim() > 1 else 0.1
            value.copy_(torch.randn(value.shape, generator=random) * scale)
            value.add_("norm" in name and name.endswith("weight"))
    return model.eval()


def logits(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in place of the loss."""
    head: Any = model.head
    weight = head.weight
    head.forward = lambda x_BTD, _: soft_cap(x_BTD @ weight.t(), head.softcap)
    with torch.no_grad():
        found: Tensor = model(tokens_BT, tokens_BT)
    return found


def write(
    model: Transformer,
    small: Shape,
    family: Family,
    folder: Path,
    config: dict[str, Any] | None = None,
) -> None:
    """The model's weights in one file under a family's names, beside `config` or its own."""
    parts, values = stored_parts(family, small), dict(model.named_parameters())
    tensors = {key: torch.zeros(extent) for key, extent in stored_extents(parts).items()}
    for name, own in parts.items():
        for part in own:
            value = values[name].detach()[tuple(slice(*its) for its in part.ours)]
            target = tensors[part.key][tuple(slice(*its) for its in part.theirs)]
            target.copy_((value.t() if part.transposed else value).reshape(target.shape))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = config or config_json(small, torch.float32, family)
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> dict[str, Tensor]:
    """All parameters that a folder holds."""
    source = huggingface_source(folder, read_huggingface_config(str(folder)))
    wanted = [
        Shard(name, kind, torch.empty(it.shape), it.shape, tuple((0, n) for n in it.shape))
        for (name, kind), it in source.tensors.items()
        if kind == "parameter"
    ]
    read_tensors.load_shards(source, wanted)
    return {shard.name: shard.tensor for shard in wanted}
