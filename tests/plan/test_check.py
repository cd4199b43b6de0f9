"""Legality: each rule refuses what it should, naming the field, the numbers and what is legal; and
accepts the rest.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from workbench.errors import PlanError
from workbench.machine import attached as machine
from workbench.plan import corpus_files
from workbench.plan.catalog.catalog import models
from workbench.plan.rules.check import check
from workbench.plan.rules.supported import ENGINE_LIMITS, RUN_LIMITS
from workbench.plan.schema import Corpus, Plan
from workbench.plan.stage_partition import balanced, costs


def plan(model: str = "tiny", gpus: int = 8, strategy: str | None = None, **fields: Any) -> Plan:
    sections: dict[str, Any] = {"model": model, "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus}}
    built = Plan.model_validate(sections | ({"strategy": {"preset": strategy}} if strategy else {}))
    return built.replace(**{key.replace("__", "."): value for key, value in fields.items()})


FIVE_HEADS = {"model__heads": 5, "model__kv_heads": 5, "model__head_dim": 24}
ILLEGAL = [
    (
        "strategy.tensor.size",
        "more than heads = 4; legal for tiny: 1 to 4",
        {"strategy__tensor__size": 8},
    ),
    (
        "strategy.tensor.size",
        "whose sides divide heads = 5",
        {**FIVE_HEADS, "strategy__tensor": {"size": [2, 2], "algorithm": "2d"}},
    ),
    (
        "strategy.context.size",
        "size divides the 3 heads that tensor = 2 leaves",
        {
            **FIVE_HEADS,
            "strategy__tensor__size": 2,
            "strategy__context": {"size": 2, "algorithm": "ulysses"},
        },
    ),
    (
        "cluster.gpus",
        "legal: gpus 6, 9",
        {"strategy__pipeline__size": 3, "strategy__tensor__size": 1},
    ),
    ("strategy.pipeline.size", "4 layers; legal sizes: 1 to 4", {"strategy__pipeline__size": 8}),
    (
        "strategy.pipeline.partition",
        "2 numbers that add up to 4",
        {"strategy__pipeline__size": 2, "strategy__pipeline__partition": [4]},
    ),
    (
        "strategy.pipeline.chunks",
        "interleaved takes 2 or more",
        {"strategy__pipeline__schedule": "interleaved"},
    ),
    (
        "strategy.pipeline.schedule",
        "'1f2b' is not known; legal: gpipe",
        {"strategy__pipeline__schedule": "1f2b"},
    ),
    ("training.global_batch", "legal: 8, 16", {"training__global_batch": 12}),
    ("strategy.data.shard", "zero is 0", {"strategy__data__shard": 2}),
    (
        "strategy.data.shard",
        "legal: all, 1, 2, 4, 8",
        {"strategy__data__shard": 3, "strategy__data__zero": 1},
    ),
    ("strategy.data.keep_gathered", "needs data.zero 3", {"strategy__data__keep_gathered": True}),
    ("strategy.data.in_flight", "is 3, which needs data.zero 2", {"strategy__data__in_flight": 3}),
    (
        "strategy.data.in_flight",
        "legal: 2, or strategy.stack: workbench",
        {"strategy__data": {"zero": 3, "in_flight": 3}, "strategy__stack": "deepspeed"},
    ),
    ("strategy.data.offload", "needs data.zero 1", {"strategy__data__offload": "optimizer"}),
    (
        "strategy.data.offload_ratio",
        "is 0.5, but data.offload is parameters; legal: 1, or data.offload: optimizer",
        {"strategy__data": {"zero": 3, "offload": "parameters", "offload_ratio": 0.5}},
    ),
    (
        "strategy.data.offload_ratio",
        "is 0, which offloads nothing; legal: above 0 to 1",
        {"strategy__data": {"zero": 1, "offload": "optimizer", "offload_ratio": 0}},
    ),
    (
        "strategy.data.tile_factor",
        "is 2, which needs data.zero 3; zero is 2; legal: 1, or data.zero: 3",
        {"strategy__data": {"zero": 2, "tile_factor": 2}},
    ),
    (
        "strategy.data.tile_factor",
        "the outputs of every linear of a layer (q = 128, k and v = 64, hidden = 128); legal: 1,",
        {"strategy__data": {"zero": 3, "tile_factor": 3}},
    ),
    (
        "strategy.data.tile_factor",
        "is 2, but 2 tensor ranks divide each linear already; legal: 1, or tensor.size: 1",
        {"strategy__data": {"zero": 3, "tile_factor": 2}, "strategy__tensor__size": 2},
    ),
    (
        "strategy.data.tile_factor",
        "is 2, but pipeline.size is 2: each stage stays gathered; legal: 1, or pipeline.size: 1",
        {"strategy__data": {"zero": 3, "tile_factor": 2}, "strategy__pipeline__size": 2},
    ),
    (
        "strategy.data.tile_factor",
        "data.keep_gathered is true",
        {"strategy__data": {"zero": 3, "tile_factor": 2, "keep_gathered": True}},
    ),
    (
        "strategy.data.tile_factor",
        "tiny-moe has experts",
        {"model": "tiny-moe", "strategy__data": {"zero": 3, "tile_factor": 2}},
    ),
    (
        "strategy.data.offload_tier",
        "is disk, but data.offload is none; legal: host",
        {"strategy__data__offload_tier": "disk"},
    ),
    (
        "training.optimizer.delayed_update",
        "data.offload is none and data.offload_ratio 1",
        {"training__optimizer__delayed_update": True},
    ),
    (
        "training.optimizer.delayed_update",
        "data.offload_ratio 0.5: only a host that steps all parameters",
        {
            "strategy__data": {"zero": 1, "offload": "optimizer", "offload_ratio": 0.5},
            "training__optimizer__delayed_update": True,
        },
    ),
    (
        "strategy.offload_activations",
        "but recompute is selective",
        {"strategy__recompute": "selective", "strategy__offload_activations": True},
    ),
    (
        "strategy.context.size",
        "2 x size divides sequence_length = 100; legal: 1, 2",
        {"strategy__context__size": 4, "training__sequence_length": 100},
    ),
    ("strategy.expert.size", "has no experts; legal: 1", {"strategy__expert__size": 2}),
    ("strategy.placement", "must name each of tensor", {"strategy__placement": ["tensor", "data"]}),
    ("strategy.recompute", "from 0 to 3", {"strategy__recompute": [4]}),
    ("strategy.gradient_dtype", "legal: fp32 or bf16", {"strategy__gradient_dtype": "fp16"}),
    (
        "strategy.tensor.size",
        "algorithm 2d takes [q, q]",
        {"strategy__tensor": {"size": [4, 2], "algorithm": "2d"}},
    ),
    (
        "training.optimizer.warmup_steps",
        "legal: 0 to 100",
        {"training__optimizer__warmup_steps": 101},
    ),
    ("cluster.gpus_per_node", "legal: 1 to 8", {"cluster__gpus_per_node": 16}),
    ("cluster.gpus", "2 nodes x 8 GPUs = 16", {"cluster__gpus": 12, "cluster__gpus_per_node": 8}),
    ("model.kv_heads", "does not divide heads = 4; legal: 1, 2, 4", {"model__kv_heads": 3}),
    ("model.vocab", "at least 256", {"model__vocab": 100}),
    (
        "corpus.holdout",
        "has no text to read",
        {"corpus__holdout": 0.0, "training__evaluation__every": 5},
    ),
    (
        "strategy.preset",
        "sequence_length = 256; legal: strategy.context.ulysses_size 2, 4",
        {"strategy__preset": "usp", "strategy__context__ulysses_size": 3},
    ),
    (
        "strategy.preset",
        "sequence_length = 254; legal: strategy.context.ulysses_size 2",
        {
            "cluster__gpus": 2,
            "strategy__preset": "ring-attention",
            "strategy__context__algorithm": "usp",
            "training__sequence_length": 254,
        },
    ),
    ("strategy.preset", "did you mean dapple", {"strategy__preset": "dappel"}),
    ("cluster.gpu", "did you mean h100-sxm-80gb", {"cluster__gpu": "h100-sxm-80"}),
    (
        "cluster.gpu",
        "did you mean h100-pcie-80gb, h100-nvl-94gb, h100-sxm-80gb",
        {"cluster__gpu": "H100"},
    ),
    ("model", "did you mean tiny", {"model": "tinny"}),
]


@pytest.mark.parametrize(
    "field, words, fields", ILLEGAL, ids=[f"{i}-{case[0]}" for i, case in enumerate(ILLEGAL)]
)
def test_illegal(field: str, words: str, fields: dict[str, Any]) -> None:
    found = {problem.field: problem.message for problem in check(plan(**fields))}
    assert words in found.get(field, f"not refused; {found}")


MLA = {"kv_rank": 8, "rope_dim": 4, "nope_dim": 8, "value_dim": 8}
LATENT = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 257, "mla": MLA}
MOE = {"experts": 8, "top_k": 3, "ffn": 16}


@pytest.mark.parametrize(
    ("field", "words", "model"),
    [
        ("model.mla.value_dim", "is 13, wider than a query", {"mla": {**MLA, "value_dim": 13}}),
        ("model.positions", "beside model.mla; legal: rope", {"positions": "learned"}),
        ("model.qk_norm", "beside model.mla; legal: null", {"qk_norm": "head"}),
        ("model.rotary_dim", "beside model.mla; legal: null", {"rotary_dim": 4}),
        ("model.moe.top_groups", "is None with groups 4", {"moe": {**MOE, "groups": 4}}),
        (
            "model.moe.groups",
            "is 3 of 8 experts; legal: 1, 2, 4, 8, each of 1",
            {"moe": {**MOE, "groups": 3, "top_groups": 1}},
        ),
        (
            "model.moe.groups",
            "is 8 of 8 experts; legal: 1, 2, 4, each of 2",
            {"moe": {**MOE, "groups": 8, "top_groups": 4, "score_bias": True}},
        ),
        (
            "model.moe.top_groups",
            "is 1 of 4 groups of 2 experts, top_k 3; legal: 2 to 4",
            {"moe": {**MOE, "groups": 4, "top_groups": 1}},
        ),
    ],
)
def test_latent_attention_and_groups_that_cannot_be(
    field: str, words: str, model: dict[str, Any]
) -> None:
    written = {"model": {**LATENT, **model}, "cluster": {"gpu": "local", "gpus": 1}}
    found = {problem.field: problem.message for problem in check(Plan.model_validate(written))}
    assert words in found.get(field, f"not refused; {found}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strategy__tensor__size": 4},
        {"gpus": 3, "strategy__tensor__size": 3},
        {"strategy__tensor__size": 4, "strategy__pipeline__size": 2},
        {"strategy__pipeline__size": 4, "strategy__pipeline__partition": "uniform"},
        {"strategy__pipeline__size": 2, "strategy__pipeline__partition": [1, 3]},
        {
            "strategy__data__zero": 3,
            "strategy__data__shard": 2,
            "strategy__data__offload": "parameters",
            "training__optimizer__delayed_update": True,
        },
        {"strategy__data": {"zero": 1, "offload": "optimizer", "offload_ratio": 0.3}},
        {"strategy__recompute": [0, 3], "strategy__offload_activations": True},
        {"strategy__data": {"zero": 3, "tile_factor": 4}, "strategy__context__size": 2},
        {"strategy__context__size": 4},
        {"model": "tiny-moe", "strategy__expert__size": 8},
        {"strategy__placement": ["data", "pipeline", "context", "tensor"]},
        {"strategy__tensor": {"size": [2, 2, 2], "algorithm": "2.5d"}},
        {"strategy__recompute": [0, 3]},
        {"training__sequence_length": 4096},
    ],
)
def test_legal(fields: dict[str, Any]) -> None:
    assert check(plan(**fields)) == []


def test_learned_positions_bound_the_sequence() -> None:
    found = check(plan(model="tiny-gpt", training__sequence_length=257))
    assert found[0].field == "training.sequence_length" and "legal: 1 to 256" in found[0].message


def test_bf16_needs_a_gpu_that_has_it() -> None:
    found = check(plan(cluster__gpu="v100-sxm2-32gb", strategy__precision="bf16"))
    assert found[0].field == "strategy.precision" and "legal: fp32, fp16" in found[0].message


def test_key_value_heads_may_be_replicated() -> None:
    assert plan(strategy__tensor__size=4).resolve().shape.kv_heads == 2


def test_several_problems_are_listed_together() -> None:
    with pytest.raises(PlanError) as caught:
        plan(strategy__tensor__size=8, strategy__recompute=[9], training__global_batch=12).resolve()
    assert len(caught.value.problems) == 2 and str(caught.value).startswith(
        "2 problems in the plan:"
    )


def test_single_is_one_device() -> None:
    assert "another preset" in check(plan(strategy="single"))[0].message


@pytest.mark.parametrize(
    "fields, precision, gradients",
    [
        ({"cluster__gpu": "h100-sxm-80gb"}, "bf16", "fp32"),
        ({"cluster__gpu": "v100-sxm2-32gb"}, "fp16", "fp32"),
        ({"cluster__gpu": "v100-sxm2-32gb", "strategy": "zero-3"}, "fp16", "fp16"),
        ({"training__global_batch": 8}, "bf16", "bf16"),
        ({"strategy__precision": "fp32"}, "fp32", "fp32"),
    ],
)
def test_auto_precision(fields: dict[str, Any], precision: str, gradients: str) -> None:
    full = plan(**fields).resolve().strategy
    assert (full.precision, full.gradient_dtype) == (precision, gradients)


def test_defaults_follow_model_and_world() -> None:
    full = plan(gpus=8).resolve().training
    assert (full.sequence_length, full.global_batch) == (256, 32)


class TestLocal:
    """`gpu: local`, with a machine of two cores."""

    @pytest.fixture(autouse=True)
    def two_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = machine.Attached("cpu", 8, "CPU, 2 cores", 16 * 2**30, 2)
        monkeypatch.setattr("workbench.plan.resolution.attached", lambda: found)

    def test_memory_is_shared_by_the_ranks(self) -> None:
        full = plan(cluster__gpu="local", gpus=4).resolve()
        assert (
            full.gpu.memory_gib == 4.0
            and full.gpu.device == "cpu"
            and full.strategy.precision == "fp32"
        )

    def test_more_ranks_than_are_attached(self) -> None:
        message = check(plan(cluster__gpu="local", gpus=9))[0].message
        assert "is 9" in message and "1 to 8" in message

    def test_a_card_named_by_its_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = machine.Attached("cuda", 4, "NVIDIA A100-SXM4-80GB", 79 * 2**30, 16)
        monkeypatch.setattr("workbench.plan.resolution.attached", lambda: found)
        full = plan(cluster__gpu="local", gpus=4).resolve()
        assert full.gpu.name == "a100-sxm-80gb" and full.fabric.gpus_per_node == 4

    def test_an_unknown_card_says_what_to_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = machine.Attached("cuda", 1, "NVIDIA A1000 Laptop", 6 * 2**30, 16)
        monkeypatch.setattr("workbench.plan.resolution.attached", lambda: found)
        assert "A1000" in check(plan(cluster__gpu="local", gpus=1))[0].message


@pytest.mark.parametrize(
    "kernels, end", [("eager", "megatron-tp"), ("fused", "megatron-tp, fused")]
)
def test_a_plan_without_a_name_is_called_what_it_is(kernels: str, end: str) -> None:
    made = plan(strategy="megatron-tp", strategy__kernels=kernels)
    assert made.resolve().name == f"tiny on 8 h100-sxm-80gb, {end}"
    assert made.replace(name="mine").resolve().name == "mine"


def test_this_machine_has_something_attached() -> None:
    found = machine.attached()
    assert found.count >= 1 and found.memory_bytes > 2**28


@pytest.mark.parametrize(
    "name, stages", [("llama-3-8b", 4), ("llama-3.2-1b", 4), ("gpt3-175b", 16), ("deepseek-v3", 8)]
)
def test_balanced_partition_beats_an_even_one(name: str, stages: int) -> None:
    shape = models()[name].shape
    _, blocks, head = costs(shape, 4096)

    def worst(counts: list[int]) -> float:
        load, first = [], 0
        for count in counts:
            load.append(sum(blocks[first : first + count]))
            first += count
        load[-1] += head
        return max(load)

    counts = balanced(shape, stages, 4096)
    even = [shape.layers // stages + (i < shape.layers % stages) for i in range(stages)]
    assert sum(counts) == shape.layers and min(counts) >= 1
    assert worst(counts) <= worst(even) * 1.01
    assert counts[-1] <= max(counts)


def test_a_large_head_takes_layers_off_the_last_stage() -> None:
    counts = balanced(models()["llama-3.2-1b"].shape, 4, 4096)
    assert counts[-1] < min(counts[:-1])


def test_corpus_of_a_folder_is_stable_and_hashed_by_content(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89")
    assert [path.name for path in corpus_files.files(str(tmp_path))] == ["a.md", "b.txt"]
    (text,) = corpus_files.source_files(Corpus(source=str(tmp_path)))
    before = corpus_files.corpus_sha256(text)
    (tmp_path / "b.txt").write_text("three")
    assert corpus_files.corpus_sha256(text) != before


@pytest.mark.parametrize("source", ["no/such/text", "{empty}"])
def test_missing_corpus_names_the_field(tmp_path: Path, source: str) -> None:
    with pytest.raises(PlanError, match=r"corpus\.source: .*(does not exist|holds no text)"):
        corpus_files.files(source.format(empty=tmp_path))


def test_resolved_names_the_text_and_notices_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    full = plan(corpus=str(tmp_path)).pin()
    assert len(str(full.corpus.sha256)) == 64 and full.pin() == full
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(PlanError, match=r"corpus\.sha256"):
        full.pin()


def test_resolved_paths_do_not_depend_on_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    full = plan(corpus="a.txt", checkpoint__load="runs/one").pin()
    monkeypatch.chdir("/")
    assert full.pin() == full
    assert full.corpus.source == str(tmp_path / "a.txt") and full.checkpoint.load == str(
        tmp_path / "runs/one"
    )


@pytest.mark.parametrize(
    "limit, cores", [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_a_container_may_use_fewer_cores_than_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.host_cores() == cores


def fields(model: type[Any], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}", field
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                yield from fields(inner, f"{above}{name}.")


def test_every_field_says_what_it_is_in_one_line() -> None:
    described = dict(fields(Plan))
    assert "strategy.pipeline.schedule" in described and "model.moe.top_k" in described
    for name, field in described.items():
        assert (
            field.description and field.description.endswith(".") and len(field.description) < 100
        ), name


def test_a_field_that_nothing_runs_says_so() -> None:
    described = dict(fields(Plan))
    assert "strategy.data.overlap" in {name for name, _, _ in ENGINE_LIMITS}
    assert "estimated only" in str(described["strategy.pipeline.partition"].description)
    for name, _, can in ENGINE_LIMITS:
        assert "estimated only" in str(described[name].description), f"{name}: only {can} can run"
    for name, _, can in RUN_LIMITS:
        assert "estimated and rehearsed only" in str(described[name].description), (
            f"{name}: only {can} can run"
        )


@pytest.mark.parametrize(("old", "new"), [("complete", "resolve"), ("resolved", "pin")])
def test_a_former_name_warns_and_names_the_new_one(old: str, new: str) -> None:
    plan = Plan.of("tiny")
    with pytest.warns(DeprecationWarning, match=rf"Plan\.{old}\(\) is now Plan\.{new}\(\)"):
        assert getattr(plan, old)() == getattr(plan, new)()
