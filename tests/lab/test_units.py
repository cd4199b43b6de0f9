import pytest

from workbench import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (62277025792, "58.0 GiB"),
        (1536 * 2**20, "1.50 GiB"),
        (3 * 2**20, "3.00 MiB"),
        (512, "512 B"),
        (0, "0 MiB"),
    ],
)
def test_bytes(value: int, text: str) -> None:
    assert units.bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12.3 ms"),
        (7, "7 s"),
        (1.5, "1.50 s"),
        (5400, "1 h 30 min"),
        (150.4, "2 min 30 s"),
        (None, "–"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert units.seconds_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (14251.3, "$14,251"),
        (99.97, "$100"),
        (11.512, "$11.5"),
        (0.512, "$0.51"),
        (0.01, "$0.01"),
        (0.0042, "<$0.01"),
        (0, "$0"),
    ],
)
def test_money(value: float, text: str) -> None:
    assert units.dollars_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (128_000_000, "1,481 days"),
        (7200, "2 hours"),
        (864, "14.4 minutes"),
        (59.9, "59.9 seconds"),
        (1.7, "1.7 seconds"),
        (0.0123, "12.3 ms"),
        (0, "0"),
    ],
)
def test_days(seconds: float, text: str) -> None:
    assert units.days_text(seconds / 86400) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12_345_678, "12.3 M"), (950.0, "950"), (41_000, "41.0 k"), (None, "–")]
)
def test_counts(value: float | None, text: str) -> None:
    assert units.count_text(value) == text


def test_a_unit_ignores_what_is_not_a_number() -> None:
    assert units.byte_unit([float("nan"), 2**21]) == ("MiB", 2**20)
