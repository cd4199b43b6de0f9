"""What continuous integration leaves of a long test's cases."""

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


def test_what_is_not_drawn_of_the_slow_cases_is_left_to_the_sweep(
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
            """
        )
    )
    leave_others_to_the_sweep(items)
    swept = [item.name for item in items if item.get_closest_marker("sweep")]
    assert len(swept) == 5 and "test_some[0]" not in swept
    assert all(name.startswith("test_some") for name in swept)
