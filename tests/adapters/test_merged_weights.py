"""Adapters merged into their base: W + s B A in fp32, rounded once; of a folder, a GGUF file and a
checkpoint.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.adapters.adapter_checkpoints import write_adapter_checkpoint
from tests.adapters.test_peft_folder import RANK, adapted, base_of, drawn, small
from tests.checkpoint.test_session_checkpoint import save
from tests.conftest import Ask
from tests.parallel.small import LLAMA, plan
from workbench import verbs
from workbench.adapters.peft_folder import read_peft_folder
from workbench.adapters.weight_updates import WeightUpdates, read_updates
from workbench.engine.export.export_adapter import export_adapter
from workbench.engine.export.export_gguf import export_gguf
from workbench.engine.export.export_weights import export_checkpoint
from workbench.engine.generation.loaded_model import load_session, weights_plan
from workbench.engine.generation.perplexity import measure_perplexity
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.kernels.four_bit_weight import quantize_four_bit
from workbench.kernels.four_bit_weight import reference as dequantized
from workbench.plan.base_weights import base_sha256
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Lora
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

LORA = Lora(rank=RANK, alpha=6, rslora=True)
SCALE = 6 / RANK**0.5


def update(values: dict[str, Tensor], name: str) -> Tensor:
    """s B A, in fp64."""
    b, a = values[f"{name}.lora_b"], values[f"{name}.lora_a"]
    found: Tensor = SCALE * (b.double() @ a.double())
    return found


def test_a_folder_of_16_bits_is_merged_and_rounded_once(tmp_path: Path) -> None:
    shape = small("llama")
    _, theirs = base_of("llama", shape, tmp_path / "random")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / "base" / name).write_text(name)
    values = drawn(shape, ["blocks.0.attention.q", "blocks.1.mlp.down"])
    sha256 = base_sha256(tmp_path / "base")
    path = write_adapter_checkpoint(tmp_path / "run", shape, values, LORA, sha256)
    seen: list[tuple[int, int, str]] = []
    answer = export_checkpoint(
        path, tmp_path / "to", lambda *it: seen.append(it), base=tmp_path / "base"
    )
    assert answer["dtype"] == "bfloat16" and seen[-1][0] == seen[-1][1]
    base, merged = (load_file(tmp_path / it / "model.safetensors") for it in ("base", "to"))
    keys = {
        "model.layers.0.self_attn.q_proj.weight": "blocks.0.attention.q",
        "model.layers.1.mlp.down_proj.weight": "blocks.1.mlp.down",
    }
    for key, value in merged.items():
        exact = base[key].double() + (update(values, keys[key]) if key in keys else 0)
        # Where fp32's own rounding decides between two neighbours in bf16, either is right.
        off = (value.double() - exact).abs() / exact.abs().clamp(min=1e-30)
        assert float(off.max()) <= 2**-8, key
        assert key in keys or torch.equal(value, base[key])
    said = [json.loads((tmp_path / it / "config.json").read_text()) for it in ("base", "to")]
    assert {**said[0], "dtype": 0, "torch_dtype": 0} == {**said[1], "dtype": 0, "torch_dtype": 0}
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "to" / "generation_config.json").is_file()


def test_a_base_in_four_bits_is_merged_as_it_was_trained(tmp_path: Path) -> None:
    """W is the dequantized value, of layers without adapters too; of values in the run's dtype."""
    base = tmp_path / "base"
    shape = small("llama").model_copy(update={"ffn": 64})
    base_of("llama", shape, base)
    values = drawn(shape, ["blocks.0.attention.q", "blocks.1.mlp.down"])
    quantize = {"format": "nf4", "group": 32, "double": True}
    path = write_adapter_checkpoint(tmp_path / "run", shape, values, LORA, quantize=quantize)
    export_checkpoint(path, tmp_path / "to", base=base)
    stored, merged = (load_file(it / "model.safetensors") for it in (base, tmp_path / "to"))
    form = FourBitFormat("nf4", 32, True)
    for key, adapter in (
        ("model.layers.0.self_attn.q_proj.weight", "blocks.0.attention.q"),
        ("model.layers.1.mlp.down_proj.weight", "blocks.1.mlp.down"),
        ("model.layers.0.mlp.up_proj.weight", None),
    ):
        exact = dequantized(quantize_four_bit(stored[key], form)).double()
        exact += update(values, adapter) if adapter else 0
        torch.testing.assert_close(merged[key].double(), exact, rtol=1e-6, atol=1e-7)
    for key in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(merged[key], stored[key])


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "falcon"])
def test_merged_weights_have_the_logits_of_peft(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="compares with PEFT")
    transformers = pytest.importorskip("transformers")
    shape = small(family)
    _, theirs = base_of(family, shape, tmp_path / "base")
    values = drawn(shape, adapted(family, shape))
    path = write_adapter_checkpoint(tmp_path / "run", shape, values, LORA)
    base = tmp_path / "base"
    export_checkpoint(path, tmp_path / "merged", base=base)
    export_adapter(path, tmp_path / "adapter", base)
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
    )
    expected = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens_BT = torch.randint(shape.vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted = ours(tokens_BT).logits, expected(tokens_BT).logits
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-5
    export_checkpoint(tmp_path / "adapter", tmp_path / "again", base=base)
    again, merged = (load_file(tmp_path / it / "model.safetensors") for it in ("again", "merged"))
    for key, value in merged.items():
        torch.testing.assert_close(again[key], value, rtol=0, atol=1e-6)


def test_a_checkpoint_and_a_gguf_file_are_bases(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.checkpoint.gguf_samples import SHAPE, write_sample
    from workbench.checkpoint.gguf.gguf_tensors import GgufWeights
    from workbench.safe_io.gguf_files import open_gguf

    gguf = tmp_path / "base.gguf"
    weights = write_sample(gguf, tokenizer=True)
    values = drawn(SHAPE, ["blocks.1.attention.q", "blocks.0.mlp.up"])
    path = write_adapter_checkpoint(tmp_path / "run", SHAPE, values, LORA, base_sha256(gguf))
    export_checkpoint(path, tmp_path / "to", base=gguf)
    merged = load_file(tmp_path / "to" / "model.safetensors")
    for name, key in (
        ("blocks.1.attention.q", "model.layers.1.self_attn.q_proj.weight"),
        ("blocks.0.mlp.up", "model.layers.0.mlp.up_proj.weight"),
    ):
        exact = torch.from_numpy(weights[f"{name}.weight"]).double() + update(values, name)
        assert merged[key].dtype == torch.float32
        torch.testing.assert_close(merged[key].double(), exact, rtol=1e-6, atol=1e-6)
    export_gguf(path, tmp_path / "to.gguf", "f32", base=gguf)
    file = open_gguf(tmp_path / "to.gguf")
    found = GgufWeights(file).get_tensor("blk.1.attn_q.weight")
    assert np.array_equal(found, merged["model.layers.1.self_attn.q_proj.weight"])
    assert file.get("tokenizer.ggml.eos_token_id") == 0

    changes = {"training.global_batch": 8}
    run_ranks(1, partial(save, plan(changes=changes).resolve(), tmp_path / "full"))
    full = tmp_path / "full" / "checkpoints" / "step-00000001"
    shape = Shape.model_validate({"name": "small", **LLAMA})
    values = drawn(shape, ["blocks.1.attention.q"])
    path = write_adapter_checkpoint(tmp_path / "second", shape, values, LORA, base_sha256(full))
    export_checkpoint(path, tmp_path / "two", base=full)
    export_checkpoint(full, tmp_path / "one")
    one, two = (load_file(tmp_path / it / "model.safetensors") for it in ("one", "two"))
    key = "model.layers.1.self_attn.q_proj.weight"
    exact = one[key].double() + update(values, "blocks.1.attention.q")
    torch.testing.assert_close(two.pop(key).double(), exact, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(one[other], value) for other, value in two.items())


def test_adapters_of_one_base_are_kept_apart_by_name(tmp_path: Path) -> None:
    shape, base = small("llama"), tmp_path / "base"
    base_of("llama", shape, base)
    values = drawn(shape, ["blocks.0.attention.q"])
    write = partial(write_adapter_checkpoint, shape=shape, values=values, lora=LORA)
    for name in ("default", "tone", "facts"):
        path = write(tmp_path / name, adapter=name)
        answer = export_adapter(path, tmp_path / "to" / ("" if name != "default" else "d"), base)
        assert answer["adapter"] == name
    for folder in ("d", "tone", "facts"):
        found = read_peft_folder(tmp_path / "to" / folder, FAMILIES["llama"], shape)
        assert found.scales == {"blocks.0.attention.q": SCALE}
    with pytest.raises(PlanError, match="facts' is there already; legal: a new folder"):
        export_adapter(path, tmp_path / "to", base)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other weights": ({"base_sha256": "0" * 64}, "--base: '{base}' has sha256 "),
    "other model": ({"shape": small("llama", num_hidden_layers=3)}, "model.layers: is 3; in "),
    "no base": ({"base": None}, "--base: is needed: {path} does not say where its base is"),
    "base is gone": ({"base": "gone"}, "--base: is needed: 'gone', of which {path} has adapters"),
    "no weights": ({"base": Path(__file__).parent}, "adapters' holds no weights; legal: a folder"),
    "all weights": ({"method": "full"}, "--base: is for adapters; '{path}' holds all weights"),
    "damaged": ({"adapter": "a/b"}, "is damaged: its meta does not say what finetune trained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    changes, shape, base = dict(changes), small("llama"), tmp_path / "base"
    base_of("llama", shape, base)
    given = changes.pop("base", base)
    shape = changes.pop("shape", shape)
    values = drawn(shape, ["blocks.0.attention.q"])
    sha256 = changes.pop("base_sha256", None)
    path = write_adapter_checkpoint(tmp_path / "run", shape, values, LORA, sha256, **changes)
    with pytest.raises(ValueError) as refused:
        export_checkpoint(path, tmp_path / "to", base=given and Path(given))
    assert words.format(base=base, path=path) in str(refused.value), refused.value
    assert not (tmp_path / "to").exists()


def test_the_base_is_the_one_that_the_run_says(tmp_path: Path) -> None:
    shape, base = small("llama"), tmp_path / "base"
    base_of("llama", shape, base)
    values = drawn(shape, ["blocks.0.attention.q"])
    path = write_adapter_checkpoint(tmp_path / "run", shape, values, LORA, base_sha256(base))
    made = plan(changes={"finetune.base": str(base)})
    (tmp_path / "run" / "plan.yaml").write_text(made.to_yaml())
    assert export_checkpoint(path, tmp_path / "merged")["dtype"] == "float32"
    export_adapter(path, tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(base)
    (base / "config.json").write_text("{")
    with pytest.raises(PlanError, match=r"base/config\.json' is no model configuration"):
        export_adapter(path, tmp_path / "second")


def perplexity_of(
    model: Path, updates: WeightUpdates | None, mesh: dict[str, int], rank: int
) -> float:
    session = load_session(weights_plan(model, length=16, **mesh), rank, updates=updates)
    return measure_perplexity(session, [n % 250 for n in range(3, 400, 3)]).perplexity


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_merge_adapters_into_their_own_slices(axis: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.checkpoint.gguf_samples import SHAPE, write_sample

    base, merged = tmp_path / "base.gguf", tmp_path / "merged.gguf"
    write_sample(base)
    values = drawn(SHAPE, ["blocks.1.attention.v", "blocks.0.mlp.down"])
    path = write_adapter_checkpoint(tmp_path / "run", SHAPE, values, LORA)
    export_gguf(path, merged, "f32", base=base)
    export_adapter(path, tmp_path / "adapter", base)
    found = read_peft_folder(tmp_path / "adapter", FAMILIES["llama"], SHAPE)
    updates = read_updates(found.source, found.scales)
    own = run_ranks(2, partial(perplexity_of, base, updates, {axis: 2}))
    plain, expected = (perplexity_of(it, None, {}, 0) for it in (base, merged))
    assert own == pytest.approx([expected] * 2, rel=1e-6)
    assert abs(plain / expected - 1) > 1e-4


@pytest.mark.slow
def test_adapters_go_out_and_generate_as_merged_weights_do(tmp_path: Path, ask: Ask) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.checkpoint.gguf_samples import SHAPE, write_sample

    base, run = tmp_path / "base.gguf", tmp_path / "run"
    write_sample(base, tokenizer=True)
    values = {name: value * 4 for name, value in drawn(SHAPE, ["blocks.1.attention.v"]).items()}
    path = write_adapter_checkpoint(run, SHAPE, values, LORA, base_sha256(base), adapter="tone")
    code, said, _ = ask("weights", path, "--to", tmp_path / "adapters", "--base", base)
    adapter, merged = tmp_path / "adapters" / "tone", tmp_path / "merged.gguf"
    assert code == 0 and f"with --adapter {adapter}" in " ".join(said.split())
    words = ("--type", "f32", "--merge", "--base", base)
    assert ask("weights", path, "--to", merged, *words)[0] == 0
    two = verbs.generate(base, "ab", tokens=6, tensor=2, adapter=adapter)
    assert two["tokens"] == verbs.generate(merged, "ab", tokens=6)["tokens"]
    refused = {
        ("weights", path, "--to", tmp_path / "a.gguf"): "--merge: is needed: ",
        ("weights", adapter, "--to", tmp_path / "a"): "--merge: is needed: ",
        ("perplexity", base, __file__, "--adapter", run): f"'{run}' holds no adapters; legal",
    }
    for command, wanted in refused.items():
        code, _, why = ask(*command)
        assert code == 2 and wanted in " ".join(why.split()), (command, why)
