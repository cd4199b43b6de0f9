"""A plan on a layer profile against the rehearsal of its model, whose embedding is tied to its
head: what ranks hold and exchange.
"""

from __future__ import annotations

from pathlib import Path
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
    return measured(tmp_path_factory.mktemp("tied"), MODEL)


def measured(folder: Path, model: dict[str, Any]) -> str:
    """The file of a model's layer profile."""
    one = single_device_plan(plan(model, 1, {}).resolve())
    write_layer_profile(measure_layers(one, 0.0, lambda done, words: None), folder / "layers.csv")
    return str(folder / "layers.csv")


def both(model: dict[str, Any], file: str, gpus: int, pipeline: dict[str, Any]) -> list[Profile]:
    """A plan on the file, estimated, and of the model, rehearsed; embedding and head are rows of
    the file, which the model's partition does not count.
    """
    real, own = plan(model, gpus, pipeline), pipeline
    if pipeline:
        partition = list(real.resolve().strategy.pipeline.partition)
        partition[0] += 1
        partition[-1] += 1
        own = pipeline | {"partition": partition}
    return [estimate(plan(file, gpus, own)), rehearse(real, ranks=range(gpus))]


def states(profile: Profile, step: int, rank: int) -> list[int]:
    rows = profile.rows("memory", "rank", "category", "bytes", moment="peak", step=step)
    found = {category: size for at, category, size in rows if at == rank}
    return [found[category] for category in STATES]


@pytest.mark.parametrize(
    ("gpus", "pipeline"),
    [
        (1, {}),
        (4, {"size": 2, "partition": [3, 1]}),
        (3, {"size": 2, "replicas": [2, 1]}),
        pytest.param(2, {"size": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"size": 4}, marks=pytest.mark.slow),
        pytest.param(
            6, {"size": 3, "replicas": [3, 1, 2], "partition": [1, 2, 1]}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_states_and_calls_are_those_of_the_model(
    file: str, gpus: int, pipeline: dict[str, Any]
) -> None:
    """States within 1 %: buckets are padded."""
    estimated, rehearsed = both(MODEL, file, gpus, pipeline)
    for rank in range(gpus):
        stand_in, made = estimated.representative[rank], calls(rehearsed, 1, rank)
        expected = pytest.approx(states(rehearsed, 1, rank), rel=0.01)
        assert states(estimated, 0, stand_in) == expected
        made.pop(("world", "all_reduce", gpus, "fp32", 12, "CLIP"), None)
        assert calls(estimated, 0, stand_in) == made


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_peaks_are_those_of_the_model(tied: bool, tmp_path: Path) -> None:
    """All but buffers of communication, 2 % of a small stage; what backward needs is measured with
    as many sequences as the stages run at once.
    """
    model = MODEL | {"tied": tied}
    written = measured(tmp_path, model)
    for gpus in (1, 2, 4):
        estimated, rehearsed = both(model, written, gpus, {"size": gpus} if gpus > 1 else {})
        expected = pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.03)
        assert estimated.peak_bytes_by_rank == expected
