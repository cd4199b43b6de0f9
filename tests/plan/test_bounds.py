"""Every number has an upper bound with a reason, and a plan of numbers at their bounds is
answered.
"""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from workbench.errors import PlanError
from workbench.machine.calibration_file import Calibration
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Plan, build_plan, written_fields


def numbers(schema: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(path, node) of every integer and number of a JSON schema; [] stands for an entry of a list
    or a mapping.
    """

    def walk(node: dict[str, Any], path: tuple[Any, ...]) -> Iterator[Any]:
        if "$ref" in node:
            yield from walk(schema["$defs"][node["$ref"].rpartition("/")[2]], path)
        if node.get("type") in ("integer", "number") and not {"const", "enum"} & node.keys():
            yield path, node
        for branch in node.get("anyOf", ()):
            yield from walk(branch, path)
        for inner in ("items", "additionalProperties"):
            if isinstance(node.get(inner), dict):
                yield from walk(node[inner], (*path, "[]"))
        for name, inner in node.get("properties", {}).items():
            yield from walk(inner, (*path, name))

    return list(walk(schema, ()))


OF_A_PLAN = numbers(Plan.model_json_schema())


@pytest.mark.parametrize("declared", [Plan, Calibration])
def test_every_number_has_an_upper_bound_with_a_reason(declared: type[Any]) -> None:
    found = numbers(declared.model_json_schema())
    assert len(found) > 40
    for path, node in found:
        most = node.get("maximum", node.get("exclusiveMaximum"))
        assert most is not None, f"{'.'.join(path)} has no upper bound: see fields/bounds.py"
        assert most <= 1 or node["$comment"].startswith("at most "), ".".join(path)


@pytest.mark.parametrize(
    "field, value, says",
    [
        (
            "model.layers",
            10**6,
            "is 1000000; must be at most 2000 (twice the deepest transformer published",
        ),
        ("model.hidden", 12 * 10**9, "must be at most 1048576 (ten times the widest layer"),
        ("model.vocab", 10**18, "must be at most 16777216 (ten times the largest vocabulary"),
        (
            "training.global_batch",
            4 * 10**18,
            "must be at most 16777216 (ten times the largest batch",
        ),
        (
            "training.sequence_length",
            10**30,
            "must be at most 1073741824 (ten times the longest context",
        ),
        ("strategy.context.size", 10**30, "must be at most 1048576 (a million"),
        ("strategy.tensor.size", [2, 10**30], "must be at most 1048576 (a million"),
        ("strategy.pipeline.partition", [1, 10**9], "must be at most 2000 (twice the deepest"),
        ("strategy.recompute", [0, 10**9], "must be at most 2000 (twice the deepest"),
        ("strategy.data.bucket_mib", 1e300, "must be at most 1048576 (1 TiB)"),
        ("cluster.gpu.tflops.bf16", 1e300, "must be at most 10000000 (ten times the fastest wafer"),
        ("model.moe", {"experts": 151_936, "top_k": 8, "ffn": 768}, "must be at most 20480 (ten"),
        ("cluster.gpu.tflops.bf16", 1e-300, "must be at least 1e-06"),
        ("cluster.gpu.bandwidth_gbs", 1e-300, "must be at least 1e-06"),
        ("strategy.data.bucket_mib", 1e-300, "must be at least 9.5367431640625e-07"),
    ],
)
def test_a_number_beyond_its_bound_is_refused_by_field_bound_and_reason(
    field: str, value: float | list[int], says: str
) -> None:
    with pytest.raises(PlanError) as error:
        Plan.of("gpt2", gpu="h100-sxm-80gb", gpus=8, strategy="ddp", set={field: value})
    assert [problem.field.startswith(field) for problem in error.value.problems] == [True]
    assert says in str(error.value)


def test_bounds_are_ten_times_what_is_published() -> None:
    fields = {path[0]: node for path, node in numbers(Shape.model_json_schema()) if len(path) == 1}
    for name, entry in catalog.models().items():
        for field, value in entry.shape.model_dump().items():
            if isinstance(value, int) and field in fields:
                assert 10 * value <= fields[field]["maximum"], (name, field)


STARTS = [
    Plan.of("deepseek-v2-lite", gpu="a100-sxm-80gb", gpus=16, strategy="deepseek-v3").resolve(),
    Plan.of("gpt2", gpu="h100-sxm-80gb", gpus=8, strategy="megatron-3d").resolve(),
    Plan.of(
        "gpt2", gpu="h100-sxm-80gb", gpus=8, strategy="ddp", set={"finetune.lora.rank": 8}
    ).resolve(),
]


def _is_of_task(path: tuple[Any, ...], data: dict[str, Any]) -> bool:
    """Whether a field is not of the task section that the plan does not have."""
    return path[0] not in ("training", "finetune") or path[0] in data


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_of_numbers_at_their_bounds_is_estimated_or_refused(seed: int) -> None:
    pick, answered = random.Random(seed), 0
    for _ in range(40):
        data = copy.deepcopy(written_fields(pick.choice(STARTS)))
        for path, node in pick.sample(
            [path for path in OF_A_PLAN if "[]" not in path[0] and _is_of_task(path[0], data)],
            pick.choice([1, 2, 4]),
        ):
            bound = (
                node.get("maximum", 0.5),
                node.get("minimum", 1e-300 if node["type"] == "number" else 1),
            )
            at: Any = data
            for key in path[:-1]:
                at = at.get(key) if isinstance(at.get(key), dict) else at.setdefault(key, {}) or {}
            at[path[-1]] = (
                pick.choice(bound) if node["type"] == "number" else int(pick.choice(bound))
            )
        try:
            wb.estimate(build_plan(data))
            answered += 1
        except PlanError:
            pass
    assert answered > 10, "a test that refuses everything tests nothing"
