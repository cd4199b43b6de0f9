"""Plans in and out: YAML, changes by dotted path, and errors that name the field."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import PlanError
from workbench.plan.plan_data import assignments, changed, load_data
from workbench.plan.plan_diff import diff
from workbench.plan.schema import Plan, parse_plan
from workbench.safe_io import yaml_files

SHORT = """
model: tiny
cluster: {gpu: h100-sxm-80gb, gpus: 8}
strategy: {preset: megatron-3d, tensor: {size: 2}}
training: {optimizer: {learning_rate: 3e-4}}
"""


def problems(text: str) -> dict[str, str]:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_exponent_without_a_point_is_a_number() -> None:
    assert parse_plan(SHORT).training.optimizer.learning_rate == 3e-4


@pytest.mark.parametrize(
    "text, value",
    [("yes", "yes"), ("010", 10), ("1:30", "1:30"), ("", None), ("true", True), ("1.", 1.0)],
)
def test_core_schema_of_yaml_1_2(text: str, value: Any) -> None:
    assert yaml_files.parse(f"key: {text}") == {"key": value}


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="ascii"))
)


@given(
    st.recursive(
        scalars,
        lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner),
        max_leaves=8,
    )
)
def test_whatever_is_dumped_reads_back_equal(value: Any) -> None:
    assert yaml_files.parse(yaml_files.dump(value)) == value


def test_files_read_alike_by_yaml_1_1() -> None:
    value = {"mixed": "no", "number": "1e5", "rate": 3e-4, "octal": "010", "small": 1e-8}
    assert yaml.safe_load(yaml_files.dump(value)) == value


def test_duplicate_keys_are_refused_with_their_lines() -> None:
    found = problems(
        "model: tiny\ncluster: {gpu: local, gpus: 1}\ntraining:\n  steps: 3\n  steps: 4\n"
    )
    assert "lines 4 and 5" in found["steps"]


def test_broken_yaml_names_file_and_line() -> None:
    assert "line 2" in problems("model: [tiny\ncluster: 3")["plan"]


def test_unsafe_yaml_is_refused() -> None:
    assert "plan" in problems("model: !!python/object/apply:os.getcwd []")


def test_short_plan_round_trips_exactly() -> None:
    plan = parse_plan(SHORT)
    assert parse_plan(plan.to_yaml()) == plan
    assert "sequence_length" not in plan.to_yaml()


def test_complete_plan_round_trips_exactly() -> None:
    full = parse_plan(SHORT).resolve()
    assert parse_plan(full.to_yaml()) == full
    assert full.resolve() == full


def test_unknown_key_says_what_was_meant_and_what_is_legal() -> None:
    message = problems("model: tiny\ncluster: {gpu: local, gpus: 1}\ntraining: {step: 3}")[
        "training.step"
    ]
    assert "did you mean steps?" in message and "global_batch" in message


def test_several_problems_come_together() -> None:
    text = (
        "model: tiny\ncluster: {gpu: local, gpus: two}\ntraining: {micro_batch: -1, steps: 1.5}\n"
    )
    assert set(problems(text)) == {"cluster.gpus", "training.micro_batch", "training.steps"}


def test_wrong_value_is_shown_with_every_legal_kind() -> None:
    found = problems(
        "model: tiny\ncluster: {gpu: local, gpus: 1}\nstrategy: {pipeline: {partition: even}}"
    )
    message = found["strategy.pipeline.partition"]
    assert "'even'" in message and "'balanced'" in message and "a list" in message


def test_inline_model_errors_do_not_mention_other_kinds_of_model() -> None:
    found = problems(
        "model: {layers: 2, hidden: 64, heads: 4, ffn: 128}\ncluster: {gpu: local, gpus: 1}"
    )
    assert found == {"model.vocab": "is missing"}


def test_a_list_is_no_plan() -> None:
    assert "mapping" in problems("- tiny")["plan"]


def test_corpus_may_be_a_bare_string() -> None:
    assert (
        parse_plan("model: tiny\ncluster: {gpu: local, gpus: 1}\ncorpus: stdlib").corpus.source
        == "stdlib"
    )


def test_replace_below_a_catalog_name_writes_the_entry_out() -> None:
    plan = parse_plan(SHORT).replace(**{"model.hidden": 256, "cluster.gpu.memory_gib": 40.0})
    assert plan.resolve().shape.head_dim == 64
    assert plan.resolve().gpu.memory_gib == 40.0


def test_replace_through_a_value_that_has_no_fields() -> None:
    with pytest.raises(PlanError, match=r"training\.steps is 100"):
        parse_plan(SHORT).resolve().replace(**{"training.steps.first": 1})


def test_assignments_are_yaml() -> None:
    assert assignments(["a.b=3e-4", "c=[2, 2]", "d=null"]) == {"a.b": 3e-4, "c": [2, 2], "d": None}
    with pytest.raises(PlanError, match="key=value"):
        assignments(["steps"])


def test_a_pattern_of_operators_is_one_key_of_a_path() -> None:
    pattern, strategy = "blocks.*.mlp.down", "((1,2),(2,1))"
    found = changed({}, {f"strategy.operators.{pattern}": strategy})
    assert found == {"strategy": {"operators": {pattern: strategy}}}


def test_a_model_in_the_place_of_a_plan_is_refused_with_its_option() -> None:
    with pytest.raises(PlanError, match=r"gpt2: cannot be read: .*; .* is --model gpt2"):
        load_data("gpt2")


def test_diff_names_fields() -> None:
    a = parse_plan(SHORT).resolve()
    b = a.replace(**{"training.steps": 7})
    assert diff(a, b) == [("training.steps", 100, 7)]


def test_load_missing_file() -> None:
    with pytest.raises(PlanError, match=r"nowhere\.yaml: cannot be read"):
        Plan.load("nowhere.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "? [a, b]\n: 1",
        "a: {[b]: 1}",
        "a: !!bool maybe",
        "a: !!int x",
        "a: !!timestamp x",
        "a: " + "[" * 3000,
    ],
)
def test_yaml_that_means_nothing_is_told_of_its_file(text: str) -> None:
    with pytest.raises(PlanError, match=r"^plan: not valid YAML"):
        parse_plan(text)


def test_a_grid_without_sides_is_refused() -> None:
    text = (
        "model: tiny\ncluster: {gpu: local, gpus: 1}\nstrategy: {tensor: {size: [], algorithm: 2d}}"
    )
    assert "is []; " in problems(text)["strategy.tensor.size"]


def test_a_key_that_is_no_text_is_refused() -> None:
    assert (
        "is 1; must be text" in problems("1: 2\nmodel: tiny\ncluster: {gpu: local, gpus: 1}")["1"]
    )
