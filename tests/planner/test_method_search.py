"""Methods of fine-tuning beside each other: plans are those of a search for each alone, and what
they save is counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import finetune_methods
from tests.conftest import Ask
from workbench.errors import PlanError
from workbench.plan.model.parameter_count import parameters
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.methods.finetune_methods import METHODS, method_plan
from workbench.planner.methods.method_comparison import MethodComparison
from workbench.planner.methods.method_search import search_methods
from workbench.planner.search import search
from workbench.planner.search.search import gpu_counts

WORDS = ("full", "LoRA rank 8", "LoRA rank 8, base in NF4")
NO_OFFLOAD = "strategy.data.offload=none"


def tuned(model: str = "llama-3.2-1b", gpus: int = 4, **task: Any) -> Plan:
    task = {"sequence_length": 1024, "global_batch": 16} | task
    cluster = {"gpu": "t4", "gpus": gpus}
    return Plan.model_validate(
        {"model": model, "cluster": cluster, "finetune": task, "strategy": {"precision": "fp16"}}
    )


@pytest.fixture(scope="module")
def found() -> MethodComparison:
    return search_methods(tuned(), where=[NO_OFFLOAD], tokens=1e8)


def test_each_goal_is_that_of_a_search_for_the_method_alone(found: MethodComparison) -> None:
    assert [each.words for each in found.methods] == list(WORDS)
    for method, name in zip(found.methods, METHODS):
        for goal, objective in (("lowest cost", "cost"), ("fewest GPUs", "gpus")):
            alone = search(method_plan(tuned(), name), objective, where=[NO_OFFLOAD], top=1)
            assert method.best(goal) is not None
            assert method.best(goal).plan == alone.top[0].plan
    fewest = [method.by_gpus[0].plan.world_size for method in found.methods]
    assert fewest == [2, 1, 1]


def test_a_bill_is_that_of_the_estimated_step(found: MethodComparison) -> None:
    for method in found.methods:
        for one in method.by_gpus:
            step, gpus = estimate(one.plan).step_seconds, one.plan.world_size
            hours = step * one.slowdown * 1e8 / (16 * 1024) / 3600
            bill = found.bill(one)
            assert bill.hours == pytest.approx(hours, rel=1e-9)
            assert bill.dollars == pytest.approx(hours * gpus * found.gpu.price_per_hour)


def test_what_is_saved_is_of_the_same_goal_of_full(found: MethodComparison) -> None:
    full, four_bit = found.full, found.methods[2]
    saved = found.saved(four_bit, "fewest GPUs")
    assert saved is not None and saved["gpus"] == 0.5
    hours = [found.bill(each.by_gpus[0]).hours for each in (four_bit, full)]
    assert saved["hours"] == pytest.approx(1 - hours[0] / hours[1])
    assert set(found.saved(full, "shortest").values()) == {0.0}


def test_states_are_those_of_one_copy(found: MethodComparison) -> None:
    """Of full AdamW 16 bytes a parameter; of 4-bit numbers, scales and factors 4.13 bits."""
    shape = tuned().resolve().shape
    full, lora, four_bit = (each.states for each in found.methods)
    assert full and lora and four_bit
    assert full.total == 16 * parameters(shape).total
    trained = lora.gradients / 2
    assert lora.parameters == 2 * (parameters(shape).total + trained)
    assert lora.optimizer == 12 * trained
    linears = parameters(shape).total - shape.vocab * shape.hidden
    assert four_bit.parameters == pytest.approx(
        2 * shape.vocab * shape.hidden + linears * (4 + 8 / 64) / 8 + 2 * trained, rel=0.01
    )


def test_the_plan_s_own_adapters_and_format_are_compared() -> None:
    tune = {"lora": {"rank": 4, "targets": "attention"}, "quantize": {"format": "int4"}}
    plan = tuned(adapter="mine", **tune)
    full, lora, four_bit = (method_plan(plan, name).finetune for name in METHODS)
    assert full and lora and four_bit
    assert (full.method, full.lora, full.quantize, full.adapter) == ("full", None, None, "default")
    assert (lora.quantize, lora.adapter, lora.lora) == (None, "mine", plan.lora)
    assert (four_bit.quantize, four_bit.lora) == (plan.finetune.quantize, plan.lora)
    assert method_plan(tuned(method="full"), "lora").lora is not None


def test_a_method_without_a_plan_says_why() -> None:
    found = search_methods(tuned("llama-3-8b", 1), where=[NO_OFFLOAD])
    assert [len(each.by_gpus) for each in found.methods] == [0, 0, 1]
    assert all(each.empty.startswith("no plan ") for each in found.methods[:2])
    assert found.saved(found.methods[2], "shortest") is None
    assert found.cheapest is found.methods[2].by_gpus[0]
    assert found.tokens == 100 * 16 * 1024  # the default number of steps
    text = repr(found)
    assert "full: no plan " in text and "Change from full" not in text
    assert text.count("<") == 0 and "<td>LoRA rank 8, base in NF4</td>" in found._repr_html_()


def test_a_method_that_is_illegal_says_why() -> None:
    plan = tuned(gpus=1).replace(**{"cluster.gpu": "h100-sxm-80gb", "strategy.precision": "fp8"})
    full, _, four_bit = search_methods(plan).methods
    assert full.by_gpus and not full.empty
    assert four_bit.empty.startswith("finetune.quantize: is nf4, but strategy.precision fp8")
    assert not four_bit.by_gpus and four_bit.states is None


@pytest.mark.parametrize(
    ("cluster", "tried"),
    [
        ({"gpus": 7}, (7, 3, 1)),
        ({"gpu": "h100-sxm-80gb", "gpus": 16, "gpus_per_node": 8}, (16, 8)),
        ({"gpus": 6, "nodes": 1}, (6,)),
    ],
)
def test_any_number_of_gpus_is_halved(cluster: dict[str, Any], tried: tuple[int, ...]) -> None:
    plan = tuned().replace(**{f"cluster.{name}": value for name, value in cluster.items()})
    assert gpu_counts(plan, "gpus") == tried and gpu_counts(plan, "time") == tried[:1]


def test_methods_of_nodes_of_a_given_size_are_compared() -> None:
    plan = tuned("tiny", 4, sequence_length=64).replace(**{"cluster.gpus_per_node": 2})
    for each in search_methods(plan, where=[NO_OFFLOAD]).methods:
        assert each.states and [one.plan.world_size for one in each.by_gpus] == [2, 4]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("llama-2-7b", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in ("llama-3-70b", "llama-3.1-405b")
        ),
    ],
)
def test_the_page_has_the_table_of_its_command(model: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    for row in finetune_methods.table_rows(model):
        assert finetune_methods.line(row) in page


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"training": {}}, {}, r"--methods: .* no `finetune`; legal: "),
        ({}, {"space": "operators"}, r"--space: is 'operators', .*; legal: default, wide, vast"),
        ({}, {"tokens": 0.0}, r"--tokens: is 0"),
        ({}, {"risk": 1.0}, r"--risk: is 1; legal"),
        ({}, {"where": ["nothing<1"]}, "nothing"),
    ],
)
def test_what_means_nothing_is_refused(
    change: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    plan = tuned()
    if change:
        written = plan.model_dump(exclude_unset=True)
        plan = Plan.model_validate({k: v for k, v in written.items() if k != "finetune"} | change)
    with pytest.raises(PlanError, match=says):
        search_methods(plan, **options)


def test_the_command_prints_and_writes_what_the_verb_finds(
    ask: Ask, tmp_path: Path, found: MethodComparison
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(tuned().to_yaml())
    words = ["search", str(file), "--methods", "--tokens", "1e8", "--where", NO_OFFLOAD]
    best = tmp_path / "best.yaml"
    code, said, _ = ask(*words, "--json", "-o", best)
    assert code == 0 and json.loads(said) == json.loads(json.dumps(found.to_json()))
    assert found.cheapest is not None and Plan.load(best) == found.cheapest.plan
    assert WORDS[2] in ask(*words)[1]
    code, _, error = ask(*words, "--top", "3")
    assert code == 2 and "--methods: has goals of its own" in error
