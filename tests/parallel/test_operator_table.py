"""Every catalog model that runs, small, equals one device under operators beside other axes."""

import pytest

from tests.parallel.operator_table import COLUMNS, catalog_shapes, cell, proportions, refusals

ROWS = proportions()


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("names", ROWS)
def test_a_catalog_model_equals_one_device(names: str, column: str) -> None:
    assert float(cell(ROWS[names], column)) <= 1e-10


def test_every_catalog_model_is_in_the_table_or_does_not_run() -> None:
    named = {name for names in ROWS for name in names.split(", ")}
    assert named | {name for name in catalog_shapes() if refusals(name)} == set(catalog_shapes())
    dense = {name for name, shape in catalog_shapes().items() if shape.moe is None}
    assert len(named & dense) >= 30 and "mixtral-8x7b" in named
