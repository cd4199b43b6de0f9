"""How many GPUs hold the states of a model, and how many a whole step of it needs."""

import json
import re

import pytest

import workbench as wb
from workbench.cli import answer
from workbench.errors import PlanError
from workbench.planner.memory_advice import planned_memory
from workbench.planner.states_on_gpus.state_terms import RECIPES, recipe_of_plan
from workbench.planner.states_on_gpus.subject_plan import shape_of_size
from workbench.planner.states_on_gpus.whole_step import STRATEGIES, on_gpus

V100 = "v100-sxm2-32gb"


def test_states_of_100b_in_fp32_fill_75_gpus_of_16_gb_and_38_of_32() -> None:
    found = wb.states(100e9, gpu_memory=(16, 32), gpus=[V100])
    first = found.to_json()["states"][0]
    assert first["bytes_per_parameter"] == 12 and first["bytes"] == 1.2e12
    assert first["gpus_by_gb"] == {"16": 75, "32": 38}
    assert re.search(r"\b12 +parameters 4 \+ momentum 4 \+ variance 4\b", repr(found))
    assert "100 B x 12 bytes = 1,200 GB; / 32 GB = 37.5: 38 GPUs" in found.divisions()


def test_published_bytes_a_parameter() -> None:
    assert [recipe.bytes_per_parameter for recipe in RECIPES] == [12, 16, 16, 18, 20]
    assert all(recipe.source for recipe in RECIPES)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.precision": "fp32"},
        {"strategy.precision": "bf16", "strategy.gradient_dtype": "fp32"},
        {"strategy.precision": "bf16", "training.optimizer.moments": "bf16"},
        {"strategy.precision": "bf16", "training.optimizer.master": "none"},
        {"strategy.precision": "fp16", "training.optimizer.name": "sgd"},
        {"training.optimizer.name": "sgd", "training.optimizer.beta1": 0},
    ],
)
def test_terms_of_a_plan_are_what_its_estimate_keeps(changes: dict[str, object]) -> None:
    plan = wb.Plan.of("gpt2", gpu="h100-sxm-80gb", gpus=8, strategy="ddp", set=changes)
    kept = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "master": 0.0}
    rows = wb.estimate(plan).rows(
        "memory", "rank", "category", "bytes", moment="before_optimizer", tier="device"
    )
    for rank, category, size in rows:
        if rank == 0 and category in kept:
            kept[category] += size
    recipe = recipe_of_plan(plan.resolve())
    parameters = wb.states(plan).parameters
    assert sum(kept.values()) == pytest.approx(recipe.total(parameters), rel=1e-9)


@pytest.mark.parametrize("model", ["gpt2-xl", "gpt3-13b", "llama-2-70b"])
def test_one_gpu_fewer_does_not_hold_a_step(model: str) -> None:
    plan = wb.Plan.of(model, gpu=V100, gpus=1, strategy="ddp", set={"training.micro_batch": 1})
    for step in wb.states(plan, gpus=[V100]).steps:
        if step.gpus is None:
            assert not step.memory.fits and "at any GPU count" in step.reason
            continue
        assert planned_memory(on_gpus(plan, V100, step.gpus, step.strategy).resolve()).fits
        fewer = step.gpus - (1 if step.gpus <= 16 else 16)
        if fewer:
            less = on_gpus(plan, V100, fewer, step.strategy).resolve()
            assert not planned_memory(less).fits, (step.strategy, fewer)


def test_a_subject_is_a_number_a_model_a_file_or_a_plan(tmp_path: object) -> None:
    plan = wb.Plan.of("gpt3-13b", gpu=V100, gpus=1, strategy="zero-infinity")
    file = f"{tmp_path}/plan.yaml"
    with open(file, "w") as out:
        out.write(plan.to_yaml())
    counts = {wb.states(one, gpus=[V100]).parameters for one in ("gpt3-13b", file, plan)}
    assert len(counts) == 1
    assert wb.states("1.4B", gpus=[V100]).parameters == wb.states(1.4e9, gpus=[V100]).parameters


@pytest.mark.parametrize("count", [1e8, 1.4e9, 13e9, 100e9, 1e12])
def test_a_number_of_parameters_has_a_model_near_it(count: float) -> None:
    assert wb.states(shape_of_size(count).name.split(" ")[0]).parameters > 0
    from workbench.plan.model.parameter_count import parameters

    assert parameters(shape_of_size(count)).total == pytest.approx(count, rel=0.05)


def test_a_gpu_without_the_plans_precision_is_no_usual_one() -> None:
    found = wb.states("gpt2", set={"strategy.precision": "bf16"})
    assert {step.gpu for step in found.steps} == {"h100-sxm-80gb"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["5"], "parameters: is 5; legal: 1e+06 to 1e+15"),
        (["1e30"], "parameters: is 1e+30"),
        (["nan"], "parameters: is nan; legal: 1e+06"),
        (["-5B"], "parameters: is -5e+09; legal: 1e+06"),
        (["100Q"], "SUBJECT: '100Q' is no number of parameters"),
        (["gpt3-31b"], "model: 'gpt3-31b' is not known; did you mean gpt3-13b"),
        (["missing.yaml"], "missing.yaml: cannot be read"),
        (["1B", "--gpu-memory", "0"], "--gpu-memory: is 0; legal: 1 to 10,000 GB a GPU"),
        (["1B", "--gpu-memory", "nan"], "--gpu-memory: is nan; legal"),
        (["1B", "--gpu-memory", "16,x"], "--gpu-memory: is '16,x'; legal: sizes in GB"),
        (["1B", "--gpu", "v100"], "gpus: 'v100' is not known; did you mean v100-sxm2-16gb"),
        (["1B", "--set", "training.micro_batch=0"], "training.micro_batch: is 0"),
        (["1B", "--gpu", V100, "--set", "strategy.precision=bf16"], "strategy.precision: is bf16"),
    ],
)
def test_what_is_illegal_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["states", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["states", "gpt2", "--gpu", V100, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "estimated"
    assert [row["strategy"] for row in found["whole_step"]] == list(STRATEGIES)
    assert answer(["states", "gpt2", "--gpu", V100]) == 0
    said = capsys.readouterr().out
    assert "(estimated)" in said and "GB are 1e9 bytes" in said
    assert wb.states("gpt2")._repr_html_().count("<table>") == 2


def test_a_model_without_a_shape_is_refused() -> None:
    plan = wb.Plan.of("gpt2", gpus=1).replace(model={"python": "a:b", "vocab": 300})
    with pytest.raises(PlanError, match=r"model\.python"):
        wb.states(plan)
