"""A model that this repository did not write: data parallel, under ZeRO, and by operators, equal to
one device.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.parallel.users_model import build, build_plain
from workbench.engine.python_model.check_python_model import check_python_model
from workbench.engine.python_model.mixed_sequences import explained
from workbench.engine.verify.equivalence import verify
from workbench.engine.worker_lifecycle import train
from workbench.errors import PlanError
from workbench.models.deferred_init import build_deferred
from workbench.models.python_model import build_python_model
from workbench.parallel import python_model_stage
from workbench.parallel.operators import apply_traced, factor_redistribution, traced_forward
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan, PythonModel
from workbench.rehearsal.rehearse import rehearse
from workbench.runs.launch import subprocess_verbs
from workbench.runs.launch.accelerate_command import Recipe, compose

LAYERS = "encoder.layers.*"
PAIRED = {
    "tokens": "((2,1),(1,))",
    f"{LAYERS}.self_attn.linear": "((1,1),(1,2))",
    f"{LAYERS}.self_attn.linear_2": "((1,2),(2,1))",
    f"{LAYERS}.linear1": "((1,1),(1,2))",
    f"{LAYERS}.linear2": "((1,2),(2,1))",
    "output": "((1,1),(1,2))",
}
ROWS = {
    f"{LAYERS}.self_attn.linear": "((2,1),(1,1))",
    f"{LAYERS}.linear1": "((2,1),(1,1))",
    f"{LAYERS}.norm1": "((2,1),(1,))",
}
GRID = {
    "tokens": "((1,2),(2,))",
    f"{LAYERS}.self_attn.linear": "((2,1),(1,2))",
    f"{LAYERS}.self_attn.linear_2": "((2,2),(2,1))",
    f"{LAYERS}.linear1": "((2,1),(1,2))",
    f"{LAYERS}.linear2": "((2,2),(2,1))",
}

ROTATED = {
    "query": "((1,1),(1,2))",
    "mul": "((2,1),(1,))",  # complex numbers are redistributed on the way
    "convolution": "((1,2,1,1),(2,1,1,1),(2,1))",
}


def users(
    tensor: int = 1,
    data: int = 1,
    operators: dict[str, str] | None = None,
    changes: dict[str, Any] | None = None,
    factory: str = "build",
    **args: Any,
) -> Plan:
    """The user's model on tensor x data ranks."""
    model = {"python": f"tests.parallel.users_model:{factory}", "vocab": 260, "args": args}
    strategy = {
        "tensor": {"size": tensor},
        "data": {"bucket_mib": 0.01},
        "operators": operators or {},
    }
    optimizer = {"clip": 0.5, "learning_rate": 1e-2}
    training = {
        "sequence_length": 16,
        "global_batch": data * 4,
        "micro_batch": 2,
        "steps": 3,
        "optimizer": optimizer,
    }
    cluster = {"gpu": "local", "gpus": tensor * data}
    written = {"model": model, "cluster": cluster, "strategy": strategy, "training": training}
    return Plan.model_validate(written).replace(**(changes or {}))


@pytest.mark.parametrize(
    "plan",
    [
        users(data=2),
        users(data=2, factory="build_with_loss"),
        pytest.param(users(data=2, changes={"strategy.data.zero": 1}), marks=pytest.mark.slow),
        users(data=2, changes={"strategy.data.zero": 3}),
        users(2, operators=PAIRED),
        users(2, operators=PAIRED, norm_first=False),
        users(2, operators=ROWS),
        pytest.param(users(4, operators=GRID), marks=pytest.mark.slow),
        users(2, 2, operators=PAIRED, changes={"strategy.data.zero": 2}),
        users(2, operators=ROTATED, factory="build_rotated"),
    ],
    ids=[
        *("data", "loss", "zero-1", "zero-3", "paired", "post-norm", "rows", "grid", "zero-2"),
        "complex",
    ],
)
def test_fp64(plan: Plan) -> None:
    answer = verify(plan, "fp64", allow_code=True)
    assert answer["passed"], answer


def test_a_loss_that_is_a_mean_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a mean: \d\.\d+ of two sequences, .*reduction='sum'"):
        verify(users(data=2, factory="build_with_loss", reduction="mean"), allow_code=True)


def test_a_forward_that_mixes_sequences_is_named_where_verify_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = users(data=2, factory="build_plain").resolve()
    assert explained({"passed": False}, plan) == {"passed": False}  # for another reason

    def centred(self: nn.Module, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    monkeypatch.setattr(nn.LayerNorm, "forward", centred)
    assert explained({"passed": True}, plan) == {"passed": True}
    with pytest.raises(PlanError, match=r"mixes the sequences .* in norm.* \(mean, .*:\d+\)"):
        explained({"passed": False}, plan)


def test_a_forward_that_fails_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_many(self: nn.Module, x: Tensor) -> Tensor:
        return x + x.new_zeros(3, 5)

    monkeypatch.setattr(nn.LayerNorm, "forward", two_many)
    with pytest.raises(PlanError, match=r"forward fails .*:\d+: return x \+ .*: The size"):
        verify(users(data=2), allow_code=True)


def test_fp32() -> None:
    answer = verify(users(2, operators=PAIRED), "fp32", allow_code=True)
    assert answer["passed"], answer


def test_pairing_communicates_twice_a_branch() -> None:
    frame = rehearse(
        users(2, operators={k: v for k, v in PAIRED.items() if "layers" in k}), allow_code=True
    ).collectives
    frame = frame[
        (frame["step"] == 1) & (frame["axis"] == "tensor") & (frame["bytes"] == 2 * 16 * 32 * 4)
    ]
    counts = {row["action"]: row["count"] for row in frame.to_dict("records")}
    layers, branches, microbatches = 2, 2, 2
    assert counts == dict.fromkeys("FB", layers * branches * microbatches)


def test_zero_3_all_gathers_the_model_once_a_step() -> None:
    plan = users(4, 2, GRID, {"strategy.data.zero": 3, "strategy.precision": "bf16"})
    frame = rehearse(plan, allow_code=True).collectives
    frame = frame[
        (frame["step"] == 1) & (frame["axis"] == "data") & (frame["kind"] == "all_gather")
    ]
    elements = sum(row["bytes"] * row["count"] for row in frame.to_dict("records")) / 2
    model = sum(p.numel() for p in build().parameters())
    assert (
        model / 2 < elements < model
    )  # linear1 and linear2, and half of the table's rows, are halved already


def test_a_partial_sum_of_heads_that_is_not_reduced_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreduced(x: Tensor, known: Any, grid: Any, factors: Any, ways: Any) -> Tensor:
        return x if ways[0].partial else original(x, known, grid, factors, ways)

    original = factor_redistribution.redistributed
    monkeypatch.setattr(traced_forward, "redistributed", unreduced)
    answer = verify(users(2, operators=PAIRED), allow_code=True)
    assert not answer["passed"] and answer["worst"]["relative"] > 100 * answer["tolerance"]


def test_partial_gradients_of_weights_that_are_not_summed_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unsummed(*arguments: Any) -> Any:
        applied = original(*arguments)
        return applied._replace(summed=dict.fromkeys(applied.summed, ()))

    original = apply_traced.apply_traced
    monkeypatch.setattr(python_model_stage, "apply_traced", unsummed)
    answer = verify(users(2, operators=ROWS), allow_code=True)
    assert not answer["passed"] and "encoder.layers" in answer["worst"]["tensor"]


def test_a_model_without_values_trains_as_one_that_has_them() -> None:
    """Its parameters were on the meta device until each rank had filled its slices."""
    plan = users(data=2, factory="build_plain", changes={"strategy.data.zero": 3})
    assert build_deferred(build_plain) is not None
    assert verify(plan, allow_code=True)["passed"]


def test_its_own_initial_weights_are_those_of_the_seed() -> None:
    model = PythonModel(python="tests.parallel.users_model:build", vocab=260)
    one, same, other = (build_python_model(model, seed).state_dict() for seed in (1, 1, 2))
    assert all(one[name].equal(same[name]) for name in one) and not one["tokens.weight"].equal(
        other["tokens.weight"]
    )


def test_code_runs_only_where_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "workbench.models.python_model.importlib", None
    )  # whoever imports it fails otherwise
    plan, said = (
        users(data=2),
        r"model.python: 'tests.parallel.users_model:build' is code.*--allow-code",
    )
    for run in (verify, rehearse, subprocess_verbs.verify, subprocess_verbs.rehearse):
        with pytest.raises(PlanError, match=said):
            run(plan)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    with pytest.raises(PlanError, match=said):
        require(plan.resolve(), "run")


def test_a_worker_without_allow_code_refuses_code(tmp_path: Path) -> None:
    for folder in ("telemetry", "logs", "errors"):
        (tmp_path / folder).mkdir()
    (tmp_path / "plan.yaml").write_text(users().to_yaml())
    assert train(tmp_path / "plan.yaml") == 1
    assert "--allow-code" in "".join(path.read_text() for path in (tmp_path / "errors").iterdir())


def test_the_flag_travels_on_the_command_line_alone(tmp_path: Path) -> None:
    plan = users().resolve()
    assert compose(plan, tmp_path, 2000, Recipe(), allow_code=True).argv[-1] == "--allow-code"
    assert "--allow-code" not in compose(plan, tmp_path, 2000, Recipe()).argv
    assert "allow" not in plan.to_yaml()


def test_a_resolved_plan_names_the_code_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('this must not run')")
    plan = users().replace(**{"model.python": "mine:build"}).pin()
    assert plan.code and plan.code.sha256 == sha256((tmp_path / "mine.py").read_bytes()).hexdigest()
    (tmp_path / "mine.py").write_text("changed = True")
    with pytest.raises(PlanError, match=r"model.sha256: the plan was resolved with code"):
        plan.pin()


@pytest.mark.parametrize(
    ("plan", "field", "said"),
    [
        (
            users(2, operators={"encoder.layer.*": "((1,1),(1,2))"}),
            "encoder.layer.*",
            "names no operator of the model",
        ),
        (
            users(2, operators={"output": "((1,1),(1,4))"}),
            "output",
            "make 4 parts for strategy.tensor.size = 2",
        ),
        (
            users(4, operators={"*.self_attn.linear": "((1,1),(1,4))"}, width=36, heads=6),
            "*.self_attn.linear",
            "splits columns into 4 pieces, but 4 does not divide its 6",
        ),
        (
            users(2, operators={"*.linear1": "((1,1),(1,2))", "*.0.linear1": "((1,1),(1,1))"}),
            "*.0.linear1",
            "names",
        ),
    ],
    ids=["nothing", "product", "heads", "twice"],
)
def test_operators_that_the_model_does_not_have_are_refused(
    plan: Plan, field: str, said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        check_python_model(plan, allow_code=True)
    assert any(
        p.field == f"strategy.operators.{field}" and said in p.message
        for p in refused.value.problems
    ), refused


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"strategy.pipeline.size": 2, "strategy.pipeline.schedule": "zb-h1"},
            "strategy.pipeline.schedule",
        ),
        ({"strategy.context.size": 2}, "strategy.context.size"),
        ({"strategy.tensor.size": 2}, "strategy.tensor.size"),
        ({"strategy.recompute": "full"}, "strategy.recompute"),
        ({"strategy": {"preset": "megatron-tp"}}, "strategy.tensor.size"),
        ({"model.python": "os.system"}, "model"),
    ],
)
def test_plan_fields_that_name_parts_of_our_models_are_refused(
    changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(PlanError) as refused:
        users(data=2).replace(**changes).resolve()
    assert any(problem.field.startswith(field) for problem in refused.value.problems), refused


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("build_with_channel_dropout", "encoder.layers.0.dropout drops channels"),
        ("missing", "is not found"),
        ("failing", r"'.*:failing' fails at .*users_model.py:\d+ \(ValueError: no such size\)"),
        ("no_module", "returns int; legal: an nn.Module"),
        ("frozen", "output.weight is frozen"),
    ],
)
def test_models_that_would_not_train_alike_are_refused(factory: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_python_model(users(factory=factory), allow_code=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_module_written_as_its_file_is_refused_with_its_name(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    if there:
        (tmp_path / "parts/gpt.py").write_text("def build(): ...\n")
    plan = users().replace(**{"model.python": "parts.gpt.py:build"})
    lies = "is" if there else "is not"
    said = rf"without \.py, here 'parts\.gpt:build', and parts/gpt\.py {lies} in the current folder"
    with pytest.raises(PlanError, match=said):
        check_python_model(plan, allow_code=True)


def test_an_estimate_traces_code_only_where_it_is_allowed() -> None:
    with pytest.raises(PlanError, match=r"model.python: .* is code.*--allow-code"):
        require(users().resolve(), "estimate")
    require(users().resolve(), "estimate", allow_code=True)


def test_the_factory_returns_a_plain_module() -> None:
    assert isinstance(build(), nn.Module)
