"""Stretched rotary frequencies: as transformers computes them, read and written in both spellings,
equal on every mesh.
"""

from typing import Any

import pytest
import torch

from tests.parallel.small import LLAMA as SMALL
from tests.parallel.small import plan
from tests.plan.test_catalog import LLAMA
from workbench.checkpoint.huggingface.huggingface_names import config_json
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.model_shape import Shape, shape_from

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn unrounded": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
ANSWERS = {
    "linear": (1.0, [0.33333334, 0.10540926, 0.03333334, 0.01054093, 0.00333333, 0.00105409]),
    "dynamic": (1.0, [1.0, 0.27894768, 0.07781181, 0.02170542, 0.00605468, 0.00168894]),
    "yarn": (1.13862944, [1.0, 0.07905694, 0.02500000, 0.00790569, 0.00250000, 0.00079057]),
    "yarn unrounded": (1.06318337, [1.0, 0.14849025, 0.02500000, 0.00790569, 0.0025, 0.00079057]),
    "llama3": (1.0, [1.0, 0.09583998, 0.01250000, 0.00395285, 0.00125000, 0.00039528]),
}
"""(factor of the tables, radians a token of the first six of eight pairs) by transformers 5.24's
LlamaRotaryEmbedding: base 1e4, max_position_embeddings 64, after 100 tokens.
"""


def config(name: str, spelling: str = "rope_parameters") -> dict[str, Any]:
    section = {"rope_type": name.split()[0], **SCALINGS[name]}
    return {
        **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **(
            {"rope_parameters": {**section, "rope_theta": 1e4}}
            if spelling == "rope_parameters"
            else {"rope_scaling": section, "rope_theta": 1e4}
        ),
    }


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    shape = shape_of(config(name))
    with torch.device("meta"):
        model = Transformer(shape)
    tables = model.positions(torch.empty(1, 100, dtype=torch.float64, device="cpu"))
    factor, frequencies = ANSWERS[name]
    expected = torch.arange(100.0)[:, None] * torch.tensor(frequencies)
    assert torch.allclose(tables.cos[:, :6].double(), factor * expected.double().cos(), atol=2e-6)
    assert torch.allclose(tables.sin[:, :6].double(), factor * expected.double().sin(), atol=2e-6)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_both_spellings_are_read_and_written(name: str, spelling: str) -> None:
    shape = shape_of(config(name, spelling))
    assert shape.rope_scaling is not None and shape.unmodelled is None
    written = config_json(shape, torch.float32)
    for gone in ("rope_scaling", "rope_parameters"):
        assert shape_of({key: value for key, value in written.items() if key != gone}) == shape
    assert shape_from(shape.model_dump()) == shape


def test_fields_of_another_type_are_refused() -> None:
    scaling = {"type": "linear", "factor": 2, "beta_fast": 3}
    with pytest.raises(PlanError, match="beta_fast is no field of type 'linear'"):
        shape_from({**SMALL, "rope_scaling": scaling})


def test_a_shape_without_it_is_written_as_before() -> None:
    assert "rope_scaling" not in Shape.model_validate(SMALL).model_dump()


@pytest.mark.parametrize(
    "section, words",
    [
        ({"rope_type": "llama3", "factor": 8.0}, "low_frequency_factor None"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 64}, "beta_slow is 64 and beta_fast 32"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor: is 0.5"),
        ({"rope_type": "linear"}, "a mapping with its factor"),
        ({"rope_type": "yarn", "factor": "x"}, "factor"),
    ],
)
def test_sections_that_mean_nothing_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        shape_of({**config("linear"), "rope_parameters": section})


@pytest.mark.parametrize(
    "section, words",
    [
        ({"rope_type": "longrope", "factor": 2.0}, "type 'longrope'"),
        ({"rope_type": "linear", "factor": 2.0, "gamma": 1}, "type linear with gamma"),
    ],
)
def test_what_is_not_built_is_named(section: dict[str, Any], words: str) -> None:
    assert words in str(shape_of({**config("linear"), "rope_parameters": section}).unmodelled)


@pytest.mark.parametrize(
    "more, field",
    [
        ({"positions": "learned", "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "head_dim"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta"),
    ],
)
def test_scalings_that_cannot_be_are_refused_by_field(more: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError, match=rf"model\.{field}"):
        plan(**more).resolve()


@pytest.mark.parametrize(
    "kind, mesh, changes",
    [
        ("dynamic", (1, 1, 1), {"cluster.gpus": 2, "strategy.context.size": 2}),
        ("llama3", (2, 2, 1), {"strategy.tensor.sequence": True}),
        ("yarn", (1, 1, 2), {"strategy.data.zero": 3}),
    ],
)
def test_meshes_equal_one_device(
    kind: str, mesh: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    scaling = shape_of(config(kind)).rope_scaling
    assert scaling is not None
    made = plan(
        *mesh,
        changes={"training.sequence_length": 32, **changes},
        rope_scaling=scaling.model_dump(),
        max_positions=24,
    )
    assert verify(made)["passed"]
