"""GGUF files: the same weights on every mesh, and what does not fit is named."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf import GGML_QUANT_SIZES, GGUFWriter, dequantize
from gguf import GGMLQuantizationType as Kind
from gguf.quants import _type_traits

from tests.checkpoint.gguf_samples import SHAPE, write_sample
from tests.checkpoint.test_huggingface import state
from tests.conftest import Ask
from workbench.checkpoint.gguf.gguf_tensors import DequantizedSlice, gguf_source
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.plan.catalog.gguf_config import gguf_account, read_gguf_config
from workbench.plan.catalog.huggingface_keys import IDLE
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.launch.preflight import preflight
from workbench.safe_io.gguf_files import open_gguf


def plan(path: Path, tensor: int = 1, pipeline: int = 1, data: int = 1, zero: int = 0) -> Plan:
    return Plan.model_validate(
        {
            "model": str(path),
            "cluster": {"gpu": "local", "gpus": tensor * pipeline * data},
            "strategy": {
                "tensor": {"size": tensor},
                "pipeline": {"size": pipeline},
                "data": {"zero": zero},
                "precision": "fp32",
            },
            "training": {"sequence_length": 16, "global_batch": 8, "micro_batch": 2},
            "checkpoint": {"load": str(path)},
        }
    )


def resolved(*mesh: Any) -> ResolvedPlan:
    return plan(*mesh).resolve()


@pytest.mark.parametrize(
    "kind, mesh",
    [
        (Kind.Q8_0, (1, 1, 1, 0)),
        (Kind.Q4_1, (2, 1, 1, 0)),
        (Kind.BF16, (1, 2, 1, 0)),
        (Kind.F16, (1, 1, 2, 3)),
        (Kind.F32, (4, 1, 1, 0)),
    ],
)
def test_each_rank_reads_its_slices(
    tmp_path: Path, kind: Kind, mesh: tuple[int, int, int, int]
) -> None:
    expected = write_sample(tmp_path / "a.gguf", kind)
    made = resolved(tmp_path / "a.gguf", *mesh)
    assert made.shape == SHAPE
    assert preflight(made, root=tmp_path) == []
    seen = dict.fromkeys(expected, 0)
    for done, shards in run_ranks(made.world_size, partial(state, made)):
        assert done == 0
        for name, held, slices, tensor in shards:
            if held == "parameter":
                wanted = expected[name][tuple(slice(*s) for s in slices)]
                assert np.array_equal(tensor, wanted), name
                seen[name] += tensor.size
    assert all(seen[name] >= value.size for name, value in expected.items())


@pytest.mark.parametrize("kind", sorted(_type_traits), ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantises_is_read_by_slices(tmp_path: Path, kind: Kind) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    columns = 2 * max(block, 256)
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (8, columns // block * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("blk.0.attn_v.weight", raw, raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with np.errstate(all="ignore"):
        complete = dequantize(raw, kind)
        read = DequantizedSlice(open_gguf(tmp_path / "a.gguf"), "blk.0.attn_v.weight")
        part = read[slice(3, 7), slice(33, columns - 5)].numpy()
    assert read.get_shape() == [8, columns]
    assert np.array_equal(part, complete[3:7, 33:-5], equal_nan=True)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"without": "blk.1.ffn_up.weight"}, r"has no blk\.1\.ffn_up\.weight"),
        (
            {"misshapen": "blk.1.ffn_up.weight"},
            r"blk\.1\.ffn_up\.weight has shape \(95, 64\), its metadata say \(96, 64\)",
        ),
        ({"shape": SHAPE.model_copy(update={"layers": 3})}, r"has blk\.2\.attn_k\.weight and 8"),
        ({"change": {"llama.rope.scaling.type": "yarn"}}, r"a\.gguf' describes.*scaling\.factor"),
        ({"change": {"llama.rope.scaling.type": "longrope"}}, r"rope\.scaling\.type 'longrope'"),
        (
            {"change": {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}},
            "8 of 16",
        ),
        ({"change": {"llama.expert_count": 4, "llama.expert_used_count": 2}}, r"model\.moe.*None"),
        ({"change": {"llama.rope.freq_base": 3e4}}, r"model\.rope_theta: is 500000\.0.*30000\.0"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    change = {"change": {"llama.block_count": 2}, **change}
    write_sample(tmp_path / "a.gguf", **change)
    with pytest.raises(ValueError, match=words):
        gguf_source(tmp_path / "a.gguf", SHAPE)


def test_truncated_files_are_refused_at_any_length(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_sample(path)
    content = path.read_bytes()
    for length in (0, 3, 4, 30, 200, 1000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:length])
        with pytest.raises(
            PlanError, match=r"^model: '.*a\.gguf' is no intact GGUF file: "
        ) as found:
            plan(path).resolve()
        assert len(found.value.problems) == 1 and "\n" not in str(found.value)
        assert re.search(
            rf"(at byte {length},.*|is empty|header is damaged); get", str(found.value)
        )


@pytest.mark.parametrize(
    "at, content, words",
    [
        (0, b"PK\3\4", r"it begins with b'PK\\x03\\x04' in place of b'GGUF'"),
        (4, b"\1\0\0\0", "it is of version 1; legal: 2 or 3"),
        (32, b"\xff\xff\xff\xff", "its header is damaged"),
    ],
)
def test_what_is_wrong_with_a_header_is_said_in_words(
    tmp_path: Path, at: int, content: bytes, words: str
) -> None:
    path = tmp_path / "a.gguf"
    write_sample(path)
    spoilt = bytearray(path.read_bytes())
    spoilt[at : at + 4] = content
    path.write_bytes(spoilt)
    with pytest.raises(PlanError, match=f"a.gguf' is no intact GGUF file: {words}; get the file"):
        plan(path).resolve()


def test_a_count_beyond_the_file_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_sample(path)
    content = bytearray(path.read_bytes())
    content[16:24] = (2**60).to_bytes(8, "little")  # entries of the metadata
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is no intact GGUF file"):
        plan(path).resolve()


def test_architectures_and_values_out_of_range_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(PlanError, match=r"general\.architecture 'mamba'; legal: llama, .*bloom"):
        plan(tmp_path / "a.gguf").resolve()
    write_sample(tmp_path / "b.gguf", change={"llama.embedding_length": 2**31})
    with pytest.raises(PlanError, match="hidden"):
        plan(tmp_path / "b.gguf").resolve()
    with pytest.raises(PlanError, match=r"c\.gguf' cannot be read: No such file"):
        plan(tmp_path / "c.gguf").resolve()


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    shape = Shape.model_validate(SHAPE.model_dump() | {"tied": False})
    expected = write_sample(tmp_path / "a.gguf", shape=shape)
    made = resolved(tmp_path / "a.gguf", 2)
    assert not made.shape.tied
    for _, shards in run_ranks(2, partial(state, made)):
        ((slices, tensor),) = [
            (s, t) for name, k, s, t in shards if (name, k) == ("head.weight", "parameter")
        ]
        assert np.array_equal(tensor, expected["head.weight"][slice(*slices[0])])


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention.scale", 0.5),
        ("attention.causal", False),
        ("attention.value_length", 8),
        ("attention.sliding_window_pattern", [True, False]),
        ("attention.max_alibi_bias", 8.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.25),
        ("use_parallel_residual", True),
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("leading_dense_block_count", 1),
        ("rope.dimension_count", 8),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.scaling.yarn_ext_factor", 0.5),
    ],
)
def test_metadata_that_no_field_says_are_named_and_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    write_sample(tmp_path / "a.gguf", change={f"llama.{key}": value})
    shape = read_gguf_config(tmp_path / "a.gguf")
    assert shape.unmodelled is not None and key.split(".")[-1] in shape.unmodelled.replace(
        "attention factor", "attn_factor"
    )
    with pytest.raises(PlanError, match=re.escape(shape.unmodelled)):
        gguf_source(tmp_path / "a.gguf", SHAPE)


@pytest.mark.parametrize(
    "beside", [("attn_q.bias", "attn_k.bias"), ("attn_q_norm.weight",), ("attn_sinks.weight",)]
)
def test_tensors_that_no_parameter_is_stored_in_are_named(
    tmp_path: Path, beside: tuple[str, ...]
) -> None:
    write_sample(tmp_path / "a.gguf", beside=tuple(f"blk.1.{name}" for name in beside))
    shape = read_gguf_config(tmp_path / "a.gguf")
    assert shape.unmodelled == f"tensors {', '.join(sorted(beside))}"
    assert shape.unmodelled in gguf_account(tmp_path / "a.gguf").not_modelled.values()


def test_a_file_of_several_is_refused_whose_head_may_be_in_another(tmp_path: Path) -> None:
    write_sample(tmp_path / "a.gguf", change={"split.count": 2})
    with pytest.raises(PlanError, match=r"split.count 2: .* legal: 1"):
        read_gguf_config(tmp_path / "a.gguf")


def test_every_metadata_key_is_accounted_for_once(tmp_path: Path) -> None:
    change = {
        **{"llama.attention.sliding_window": 6, "llama.attention.key_length": 16},
        **{"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.type": "none"},
        **{"llama.attention.scale": 0.5, "llama.logit_scale": 1.0},
        **{"llama.house_style": 3, "mistral.attention.sliding_window": 4},
        **{"general.file_type": 7, "split.count": 1},
    }
    write_sample(tmp_path / "a.gguf", change=change, tokenizer=True)
    made, keys = gguf_account(tmp_path / "a.gguf"), open_gguf(tmp_path / "a.gguf").keys()
    reported = [*made.used, *made.not_modelled, *made.ignored, *made.unknown]
    own = [key for key in keys if not key.startswith(("GGUF.", "tokenizer."))]
    assert sorted(reported) == sorted(own)
    assert made.unknown == {"llama.house_style": 3, "mistral.attention.sliding_window": 4}
    assert set(made.not_modelled) == {"llama.attention.scale"}
    assert "llama.attention.sliding_window" in made.used
    assert made.ignored["llama.rope.scaling.factor"] == IDLE
    assert {"general.file_type", "split.count", "llama.logit_scale"} < set(made.ignored)


def test_plan_lists_the_metadata_as_it_does_a_configuration(tmp_path: Path, ask: Ask) -> None:
    write_sample(tmp_path / "a.gguf", change={"llama.house_style": 3})
    choice = ["--model", tmp_path / "a.gguf", "--gpu", "h100-sxm-80gb", "--gpus", "1"]
    code, out, _ = ask("plan", *choice, "--json")
    assert code == 0 and json.loads(out)["config"]["unknown"] == {"llama.house_style": 3}
    code, out, _ = ask("plan", *choice)
    assert "unknown: llama.house_style = 3" in out
