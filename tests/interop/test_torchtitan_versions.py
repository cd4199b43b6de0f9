"""torchtitan jobs: older names of keys, values that contradict each other, and what is cut to fit
is told.
"""

from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.interop.torchtitan import read_torchtitan
from workbench.interop.translation import Imported, ImportOptions

ON_8 = ImportOptions(None, "h100-sxm-80gb", 8)


def read(model: dict[str, Any] | None = None, **sections: Any) -> Imported:
    return read_torchtitan.read({"model": {"flavor": "8B", **(model or {})}, **sections}, ON_8)


def left(found: Imported) -> dict[str, Any]:
    return {note.field: note.why for note in found.untranslated}


def problems(**sections: Any) -> dict[str, Any]:
    with pytest.raises(PlanError) as caught:
        read(**sections)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_the_older_switch_of_float8_is_fp8() -> None:
    found = read(float8={"enable_float8_linear": True})
    assert (
        found.plan.strategy.precision == "fp8" and "float8.enable_float8_linear" in found.translated
    )
    off = read(float8={"enable_float8_linear": False, "recipe_name": "rowwise"})
    assert "float8.recipe_name" in left(off)
    same = read({"converters": ["float8"]}, float8={"recipe_name": "tensorwise"})
    assert "float8.recipe_name" in same.translated
    assert off.plan.strategy.precision == "bf16"
    assert (
        read({"converters": ["float8"]}, float8={"recipe_name": "rowwise"}).plan.strategy.precision
        == "fp8"
    )


def test_two_names_of_the_local_batch_must_agree() -> None:
    message = problems(training={"batch_size": 1, "local_batch_size": 2})["training.batch_size"]
    assert "is 1" in message and "local_batch_size, its newer name, is 2" in message
    same = read(training={"batch_size": 2, "local_batch_size": 2})
    assert same.plan.training.micro_batch == 2


def test_a_warm_up_longer_than_the_run_is_cut_and_told() -> None:
    found = read(training={"steps": 100}, lr_scheduler={"warmup_steps": 200})
    assert found.plan.training.optimizer.warmup_steps == 100
    assert "100 were taken, of 200" in left(found)["lr_scheduler.warmup_steps"]
    older = read(training={"steps": 100, "warmup_steps": 200})
    assert "of 200" in left(older)["training.warmup_steps"]
    assert problems(training={"warmup_steps": 3}, lr_scheduler={"warmup_steps": 4})[
        "training.warmup_steps"
    ]


def test_a_degree_that_two_sections_say_otherwise_names_both() -> None:
    message = problems(
        training={"tensor_parallel_degree": 2}, parallelism={"tensor_parallel_degree": 4}
    )
    words = message["parallelism.tensor_parallel_degree"]
    assert "4 in [parallelism] and 2 in [training]" in words and "{" not in words


def test_without_an_option_every_second_layer_is_recomputed() -> None:
    for section in ({}, {"mode": "selective"}):
        found = read(activation_checkpoint=section)
        assert found.plan.strategy.recompute == list(range(1, 32, 2))
        assert (
            "selective_ac_option" in {n.field: n.why for n in found.assumed}["strategy.recompute"]
        )
    assert read(activation_checkpoint={"mode": "none"}).plan.strategy.recompute == "none"
    assert (
        read(activation_checkpoint={"selective_ac_option": "op"}).plan.strategy.recompute
        == "selective"
    )


@pytest.mark.parametrize(
    "parts, kernels",
    [
        (None, "compiled"),
        (["model", "loss"], "compiled"),
        (["model"], "compiled"),
        (["loss"], "eager"),
    ],
)
def test_layers_are_compiled_where_the_model_is_among_the_parts(
    parts: list[str] | None, kernels: str
) -> None:
    found = read(compile={"enable": True} | ({} if parts is None else {"components": parts}))
    assert found.plan.strategy.kernels == kernels
    assert ("compile.components" in left(found)) == (kernels == "eager")


def test_a_job_wholly_in_bf16_has_no_master_weights_and_bf16_moments() -> None:
    optimizer = read(training={"dtype": "bfloat16"}).plan.training.optimizer
    assert (optimizer.master, optimizer.moments) == ("none", "bf16")
    usual = read(training={"dtype": "float32"}).plan.training.optimizer
    assert (usual.master, usual.moments) == ("auto", "fp32")
    mixed = read(training={"dtype": "bfloat16", "mixed_precision_param": "float32"})
    assert mixed.plan.training.optimizer.master == "auto" and "training.dtype" in left(mixed)


def test_a_plan_wholly_in_bf16_is_written_as_such_a_job() -> None:
    plan = read(training={"dtype": "bfloat16"}).plan
    written = read_torchtitan.write(plan, "0.2.2")
    assert 'dtype = "bfloat16"' in written.text
    assert not {"training.optimizer.master", "training.optimizer.moments"} & {
        n.field for n in written.untranslated
    }


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("checkpoint", "last_save_model_weights_only"),  # 0.1.0
        ("checkpoint", "initial_load_model_weights_only"),
        ("training", "debug_moe_force_load_balance"),  # 0.2.0
        ("memory_estimation", "enable"),
        ("training", "dataloader.num_workers"),  # 0.2.1
        ("validation", "dataloader.pin_memory"),
    ],
)
def test_keys_of_each_version_are_known(section: str, key: str) -> None:
    found = read(**{section: {key: 1}})
    assert f"{section}.{key}" in left(found) and found.unknown == []
