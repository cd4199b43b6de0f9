"""A plan on a layer profile against the rehearsal of its model, whose embedding is tied to its
head: what ranks hold and exchange.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearsal.test_stage_replicas import calls
from workbench.engine.layer_times.measure import measure_layers
from workbench.plan.model.layer_profile_csv import write_layer_profile
from workbench.plan.schema import Plan, build_plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse
from workbench.runs.measure.profile_layers import single_device_plan

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000, "tied": True}
STATES = ("parameters", "gradients", "optimizer")


def plan(model: Any, gpus: int, pipeline: dict[str, Any]) -> Plan:
    strategy = {"precision": "fp32", "kernels": "eager", "recompute": "none", "pipeline": pipeline}
    return build_plan(
        {
            "model": model,
            "cluster": {"gpu": "local", "gpus": gpus},
            "strategy": strategy,
            "training": {"global_batch": 24, "micro_batch": 6, "sequence_length": 16},
        }
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "layers.csv"
    one = single_device_plan(plan(MODEL, 1, {}).resolve())
    write_layer_profile(measure_layers(one, 0.0, lambda done, words: None), path)
    return str(path)


def states(profile: Profile, step: int, rank: int) -> list[int]:
    rows = profile.rows("memory", "rank", "category", "bytes", moment="peak", step=step)
    found = {category: size for at, category, size in rows if at == rank}
    return [found[category] for category in STATES]


@pytest.mark.parametrize(
    ("gpus", "pipeline"),
    [
        (1, {}),
        (2, {"size": 2}),
        (4, {"size": 4}),
        (4, {"size": 2, "partition": [3, 1]}),
        (3, {"size": 2, "replicas": [2, 1]}),
        (6, {"size": 3, "replicas": [3, 1, 2], "partition": [1, 2, 1]}),
    ],
    ids=str,
)
def test_states_and_calls_are_those_of_the_model(
    file: str, gpus: int, pipeline: dict[str, Any]
) -> None:
    """Embedding and head are rows of the file, which the model's partition does not count."""
    real = plan(MODEL, gpus, pipeline)
    if pipeline:
        first, *between = real.resolve().strategy.pipeline.partition
        partition = [first + 1, *between[:-1], between[-1] + 1]
        pipeline = pipeline | {"partition": partition}
    estimated, rehearsed = estimate(plan(file, gpus, pipeline)), rehearse(real, ranks=range(gpus))
    for rank in range(gpus):
        stand_in = estimated.representative[rank]
        # Buckets are padded, and scalars count on one side alone.
        expected = pytest.approx(states(rehearsed, 1, rank), rel=0.01)
        assert states(estimated, 0, stand_in) == expected
        made = calls(rehearsed, 1, rank)
        made.pop(("world", "all_reduce", gpus, "fp32", 12, "CLIP"), None)
        assert calls(estimated, 0, stand_in) == made
