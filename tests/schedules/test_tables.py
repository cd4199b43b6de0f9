"""Grammar, CSV and what `validate` says of broken tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.schedules import (
    Action,
    Table,
    generate,
    lower,
    names,
    parse_action,
    read_csv,
    table_of,
    validate,
    write_csv,
)
from workbench.schedules.action import KINDS, WHOLE_STAGE, matching, parse_cell

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}

actions = st.builds(
    lambda stage, kind, m: Action(stage, kind, None if kind in WHOLE_STAGE else m),
    st.integers(0, 99),
    st.sampled_from(KINDS),
    st.integers(0, 999),
)


@given(actions)
def test_an_action_reads_back(action: Action) -> None:
    assert parse_action(f" {action} ") == action


@given(actions.filter(lambda a: a.is_p2p and a.stage > 0))
def test_the_other_end_of_the_other_end_is_the_action(action: Action) -> None:
    assert matching(matching(action)) == action
    assert matching(action).kind[:4] != action.kind[:4]


class Counted(tuple[Any, ...]):
    """A row that counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.times += 1
        return super().__iter__()


@pytest.mark.parametrize("work", [validate, lower])
def test_checking_goes_through_a_table_as_often_however_many_microbatches_it_has(
    work: Callable[..., Any],
) -> None:
    def passes(microbatches: int) -> int:
        table = generate("1f1b", 4, microbatches)
        counted = Table(
            tuple(map(Counted, table.rows)), table.stages, table.microbatches, table.placement
        )
        Counted.times = 0
        work(counted)
        return Counted.times

    assert passes(8) == passes(64) > 0


def test_words_are_those_of_the_field() -> None:
    assert parse_action("1SEND_F0") == Action(1, "SEND_F", 0)
    assert parse_action("0REDUCE_GRAD") == Action(0, "REDUCE_GRAD")
    assert matching(parse_action("1SEND_B3")) == parse_action("0RECV_B3")


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0F-1", "0REDUCE_GRAD3", "0F0 1F0", "0f0"])
def test_a_bad_action_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"kind|microbatch"):
        parse_action(text)


def test_an_overlapped_pair_reads_as_one_after_the_other() -> None:
    assert parse_cell("(3F1;4B0)OVERLAP_F_B") == (parse_action("3F1"), parse_action("4B0"))


@pytest.mark.parametrize(
    "text", ["(3F1)OVERLAP_F_B", "3F1;4B0OVERLAP_F_B", "(4B0;3F1)OVERLAP_F_B", "OVERLAP_F_B"]
)
def test_a_bad_overlap_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="takes a forward and a backward"):
        parse_cell(text)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("lowered", [False, True])
def test_csv_reads_back(tmp_path: Path, name: str, lowered: bool) -> None:
    table = generate(name, 3, 6, CHUNKS.get(name, 1))
    table = lower(table) if lowered else table
    write_csv(table, tmp_path / "t.csv")
    assert read_csv(tmp_path / "t.csv") == table


def test_a_spreadsheets_byte_order_mark_is_no_cell(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\n")
    assert read_csv(tmp_path / "t.csv") == drawn("0F0 0B0")


def test_empty_cells_are_idle(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0F0,,0B0\n,1F0,1B0\n")
    assert [len(row) for row in read_csv(tmp_path / "t.csv").rows] == [2, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0Q0\n", "rank 0, cell 1.*0Q0"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 runs forward on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "no rank runs forward for stage 1"),
        ("", "no forward"),
        (
            "0F0,0B0\n999999999F0\n",
            "no rank runs forward for stage 1, yet there is a stage 999999999",
        ),
        (
            "0F0,0F999999999\n",
            "no rank runs forward for microbatch 1, yet there is a microbatch 999999999",
        ),
        ("0F0," + "x" * 200_000, "line 1 .* a cell of over 131,072 characters"),
    ],
)
def test_a_broken_file_names_the_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=f"t.csv.*{words}"):
        read_csv(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "content",
    [
        b"0F" + b"9" * 5000,
        b"9" * 5000 + b"F0",
        b"0F0\n" + b"x" * 100_000,
        b"(0F0;" + b"x" * 9999 + b")OVERLAP_F_B",
        b"\xff\xfe0F0",
        "0F\u0663".encode(),
        b"\0" * 9999,
        b"0F0\r0F1\r\n",
        b"0REDUCE_GRAD" + b"3" * 5000,
    ],
)
def test_a_hostile_file_is_told_of_briefly_and_not_in_pythons_words(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.csv") as caught:
        read_csv(tmp_path / "t.csv")
    assert len(str(caught.value)) < 1_000
    assert not any(
        word in str(caught.value) for word in ("codec", "digits) for", "newline=", "sys.")
    )


def drawn(*rows: str) -> Table:
    return table_of([[parse_action(cell) for cell in row.split()] for row in rows])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (drawn("0F0 0F1 0B0"), "0B1 is missing"),
        (drawn("0F0 0I0"), "0B0 is missing, or its half 0W0"),
        (drawn("0F0 0B0 0W0"), "beside its half 0W0"),
        (drawn("0F0 0B0 0B0"), "0B0 stands 2 times"),
        (drawn("0B0 0F0"), "0B0 stands before 0F0"),
        (drawn("0F0 0W0 0I0"), "0W0 stands before 0I0"),
        (drawn("0F0 0B0 1B0", "1F0"), "1B0 belongs to rank 1"),
        (drawn("0F0 0REDUCE_GRAD 0B0"), "0REDUCE_GRAD stands before 0B0"),
        (drawn("0F0 0F1 0B0 0B1 0B2"), "0B2 is beyond the 2 microbatches"),
        (drawn("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"), "1F0 has no 1RECV_F0"),
        (drawn("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "1RECV_F0 has no 0SEND_F0"),
        (
            drawn("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "0SEND_F0 stands before 0F0",
        ),
        (drawn("0F0 0B0 0F1 0B1", "1F1 1F0 1B1 1B0"), "deadlocks.*rank 0 at 0B0, rank 1 at 1F1"),
    ],
)
def test_validate_says_what_is_wrong(table: Table, words: str) -> None:
    assert any(re.search(words, problem) for problem in validate(table)), validate(table)


def test_transfers_in_two_orders_are_found() -> None:
    table = drawn(
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    assert validate(table) == ["rank 0 sends to rank 1 in another order than it receives"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("zb-h9", 2, 2),
            "'zb-h9' does not exist; there are: 1f1b, dualpipe-v, eager-1f1b, gpipe, interleaved, "
            "zb-h1, zb-h2, zb-v",
        ),
        (("1f1b", 0, 2), "ranks = 0"),
        (("1f1b", 2, 0), "microbatches = 0"),
        (("1f1b", 2, 2, 0), "chunks = 0"),
        (("gpipe", 2, 2, 2), "chunks = 2; schedule 'gpipe' takes 1 a rank"),
        (("zb-h1", 2, 2, 2), "chunks = 2; schedule 'zb-h1' takes 1 a rank"),
        (("zb-v", 2, 2), "chunks = 1; schedule 'zb-v' takes 2 a rank"),
        (("dualpipe-v", 2, 4, 3), "chunks = 3; schedule 'dualpipe-v' takes 2 a rank"),
        (("interleaved", 2, 2, 1), "chunks = 1; schedule 'interleaved' takes 2 or more a rank"),
        (("interleaved", 4, 6, 2), "microbatches = 6; .* multiple of its 4 ranks, such as 4 or 8"),
        (("interleaved", 4, 3, 2), "microbatches = 3; .* multiple of its 4 ranks, such as 4"),
        (("dualpipe-v", 4, 7, 2), "microbatches = 7; .* 2 for each of its 4 ranks, at least 8"),
    ],
)
def test_generate_refuses_by_name(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(*arguments)
