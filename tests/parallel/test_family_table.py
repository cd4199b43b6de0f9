"""Every public family equals one device under every axis, or is refused by field."""

import pytest

from tests.parallel.family_table import AXES, CONFIGS, EVERYWHERE, cell


@pytest.mark.slow
@pytest.mark.drawn(14)
@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_equals_one_device(family: str, axis: str, lora: bool) -> None:
    found = cell(family, axis, lora)
    if found == "dense" or (found.startswith("refused") and axis not in EVERYWHERE):
        return
    assert float(found) <= 1e-10
