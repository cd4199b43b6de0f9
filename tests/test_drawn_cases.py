"""What continuous integration leaves of a long test's cases."""

from collections import Counter
from itertools import product

import pytest

from tests.drawn_cases import drawn_cases, leave_others_to_the_sweep

pytest_plugins = ["pytester"]


def test_every_value_is_drawn_before_any_is_repeated() -> None:
    values = [frozenset({f"mesh={m}", f"shape={s}"}) for m, s in product(range(6), range(3))]
    kept = drawn_cases(values, 6, seed="tests/a.py::test_a")
    assert len(kept) == 6 and kept == drawn_cases(values, 6, seed="tests/a.py::test_a")
    assert set().union(*(values[number] for number in kept)) == set().union(*values)


def test_no_more_are_drawn_than_there_are() -> None:
    assert drawn_cases([frozenset({"a=1"})] * 2, 5, seed="") == {0, 1}


def test_what_is_not_drawn_is_left_to_the_sweep_of_the_slow_cases_where_there_are_some(
    pytester: pytest.Pytester,
) -> None:
    items, _ = pytester.inline_genitems(
        pytester.makepyfile(
            """
            import pytest

            SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9)]

            @pytest.mark.drawn(3)
            @pytest.mark.parametrize("n", [0, *SLOW])
            def test_some(n): ...

            @pytest.mark.slow
            @pytest.mark.parametrize("n", range(4))
            def test_all(n): ...

            @pytest.mark.drawn(2)
            @pytest.mark.parametrize("n", range(6))
            def test_quick(n): ...
            """
        )
    )
    leave_others_to_the_sweep(items)
    swept = [item.name for item in items if item.get_closest_marker("sweep")]
    counts = Counter(name.partition("[")[0] for name in swept)
    assert counts == {"test_some": 5, "test_quick": 4} and "test_some[0]" not in swept
