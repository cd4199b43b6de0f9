"""Every catalog model that runs, small, equals one device under operators beside other axes."""

import pytest

from tests.parallel.operator_table import (
    COLUMNS,
    MARK,
    catalog_shapes,
    cell,
    proportions,
    refusals,
    refused_beside,
)

ROWS = proportions()


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("names", ROWS)
def test_a_catalog_model_equals_one_device(names: str, column: str) -> None:
    assert float(cell(ROWS[names], column)) <= 1e-10


def test_every_catalog_model_is_in_the_table_or_does_not_run() -> None:
    named = {name.removesuffix(MARK) for names in ROWS for name in names.split(", ")}
    others = catalog_shapes().keys() - named
    beside = {name for name in others if refused_beside(catalog_shapes()[name])}
    assert all(refusals(name) for name in others - beside)
    fields = {refusals(name, "operators")[0].partition(" ")[0] for name in beside}
    assert fields == {"model.positions", "model.qk_norm", "model.mla"}
    assert "mixtral-8x7b" in named
