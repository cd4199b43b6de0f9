"""Layer profiles as files: read, written, refused by row and column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.errors import PlanError
from workbench.plan.model.layer_profile_csv import read_layer_profile, write_layer_profile

HEAD = (
    "model,profile_batch,index,node,layer,forward_ms,backward_ms,activation_bytes,"
    "parameter_bytes,inputs\n"
)
SKIP = [
    "m,4,0,a,input,0.5,0,100,0,",
    "m,4,1,b,first,1,2,200,40,a",
    "m,4,2,c,second,2,4,300,80,b a",
    "m,4,3,d,third,1,1,400,0,c b",
]
"""Four layers; the first is read by the next two, the second by the two after it."""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*rows: str, head: str = HEAD) -> Path:
        path = tmp_path / "layers.csv"
        path.write_text(head + "".join(f"{row}\n" for row in rows))
        return path

    return written


def test_sums_of_times_and_sizes(write: Write) -> None:
    profile = read_layer_profile(write(*SKIP))
    assert (profile.model, profile.profile_batch) == ("m", 4)
    assert profile.forward == pytest.approx((0, 0.0005, 0.0015, 0.0035, 0.0045))
    assert profile.backward == pytest.approx((0, 0, 0.002, 0.006, 0.007))
    assert profile.parameters == (0, 0, 40, 120, 120)


def test_each_output_that_a_later_layer_reads_crosses_a_cut_once(write: Write) -> None:
    profile = read_layer_profile(write(*SKIP))
    assert profile.crossing[1:4] == (100, 100 + 200, 200 + 300)
    assert profile.crossing[0] == profile.crossing[4] == 0


def test_a_layer_that_reads_a_later_row_waits_for_it(write: Write) -> None:
    profile = read_layer_profile(write(SKIP[0], SKIP[2], SKIP[1], SKIP[3]))
    assert [layer.node for layer in profile.layers] == ["a", "b", "c", "d"]


def test_what_is_written_is_read_again(write: Write, tmp_path: Path) -> None:
    profile = read_layer_profile(write(*SKIP))
    write_layer_profile(profile, tmp_path / "again.csv")
    assert read_layer_profile(tmp_path / "again.csv") == profile


def changed(column: int, value: str) -> list[str]:
    cells = SKIP[2].split(",")
    cells[column] = value
    return [*SKIP[:2], ",".join(cells), SKIP[3]]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        (5, "-1", "row 4, forward_ms: is '-1'; legal: a number from 0"),
        (5, "", "row 4, forward_ms: is missing"),
        (6, "fast", "row 4, backward_ms: is 'fast'; legal: a number from 0"),
        (6, "nan", "row 4, backward_ms: is 'nan'"),
        (7, "inf", "row 4, activation_bytes: is 'inf'"),
        (7, "1e300", "row 4, activation_bytes: is '1e300'; legal: a number from 0 to 1e+18"),
        (8, "-0.5", "row 4, parameter_bytes: is '-0.5'"),
        (9, "b x", "row 4, inputs: 'x' is no node of this model"),
        (3, "b", "row 4, node: 'b' is that of row 3 too; legal: one for each row"),
        (1, "8", "row 4, profile_batch: is '8', but '4' in row 2; legal: the same in every row"),
        (1, "", "row 4, profile_batch: is missing; legal: a whole number from 1"),
        (1, "0", "row 4, profile_batch: is '0'; legal: a whole number from 1"),
        (2, "x", "row 4, index: is 'x'; legal: a whole number from 0"),
        (5, "1_000", "row 4, forward_ms: is '1_000'; legal: a number from 0"),
        (3, "c d", "row 4, node: is 'c d'; legal: a name without spaces"),
        (4, "a\0b", "row 4, layer: is 'a\\x00b', which has characters that are not shown"),
        (0, "", "row 4, model: is missing; legal: a name"),
        (9, "b,9", "row 4: has 11 cells; legal: 10, one for each column"),
        (9, "d", "row 4, inputs: node 'c' reads what reads it; legal: a graph without cycles"),
        (0, "other", "holds several models; name one of m, other"),
    ],
)
def test_a_wrong_cell_is_refused_by_row_and_column(
    write: Write, column: int, value: str, said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        read_layer_profile(write(*changed(column, value)))
    assert said in str(refused.value) and "/layers.csv'" in str(refused.value)


def test_all_wrong_cells_are_named(write: Write) -> None:
    rows = [row.replace(",200,", ",-2,").replace(",300,", ",,") for row in SKIP]
    with pytest.raises(PlanError, match=r"row 3, activation_bytes[\s\S]*row 4, activation_bytes"):
        read_layer_profile(write(*rows))


def test_what_was_measured_and_kept_is_written_again(write: Write, tmp_path: Path) -> None:
    head = HEAD.strip() + ",kept_bytes,sequence_length,precision,source\n"
    known = [f"{row},{size},128,bf16,on a CPU" for row, size in zip(SKIP, (500, "", 700, 0))]
    profile = read_layer_profile(write(*known, head=head))
    assert (profile.sequence_length, profile.precision, profile.source) == (128, "bf16", "on a CPU")
    assert profile.kept == (0, 500, 500 + 200, 1400, 1400)
    assert profile.kept_input[1:] == (profile.crossing[1], 0, 0, 0)
    write_layer_profile(profile, tmp_path / "again.csv")
    assert read_layer_profile(tmp_path / "again.csv") == profile
    assert "second" in profile._repr_html_() and "on a CPU" in profile._repr_html_()


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("-1,128,fp32,x", "row 4, kept_bytes: is '-1'"),
        (",64,fp32,x", "row 4, sequence_length: is '64', but '128' in row 2; legal: the same"),
        (",128,bf16,x", "row 4, precision: is 'bf16', but 'fp32' in row 2; legal: the same in"),
        (",128,fp32,y", "row 4, source: is 'y', but 'x' in row 2"),
    ],
)
def test_wrong_further_cells_are_refused(write: Write, cells: str, said: str) -> None:
    head = HEAD.strip() + ",kept_bytes,sequence_length,precision,source\n"
    rows = [f"{row},{cells if i == 2 else ',128,fp32,x'}" for i, row in enumerate(SKIP)]
    with pytest.raises(PlanError) as refused:
        read_layer_profile(write(*rows, head=head))
    assert said in str(refused.value)


def test_what_layers_share_is_written_again(write: Write, tmp_path: Path) -> None:
    """Of 40 bytes of b, c has 30 and d 10, of which it has 5 through c."""
    head = HEAD.strip() + ",tied\n"
    rows = [f"{row},{tied}" for row, tied in zip(SKIP, ("", "", "b:30", "c:5 b:2 b:3"))]
    profile = read_layer_profile(write(*rows, head=head))
    assert profile.parameters[-1] == 40 + 80
    assert [layer.tied for layer in profile.layers][:3] == [(), (), (("b", 30),)]
    assert profile.ties == ((1, 2, 30), (2, 3, 5), (1, 3, 5))
    assert profile.tied_stages([0, 2]) == {(0, 1): 35}
    assert profile.tied_stages([0, 2, 3]) == {(0, 1): 30, (1, 2): 5, (0, 2): 5}
    write_layer_profile(profile, tmp_path / "again.csv")
    assert read_layer_profile(tmp_path / "again.csv") == profile
    assert [layer.tied for layer in read_layer_profile(write(*SKIP)).layers] == [None] * 4


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("b", "row 4, tied: is 'b'; legal: NODE:BYTES, bytes from 0 to 1e+18"),
        (":8", "row 4, tied: is ':8'; legal: NODE:BYTES"),
        ("b:-8", "row 4, tied: is 'b:-8'; legal: NODE:BYTES"),
        ("b:1e19", "row 4, tied: is 'b:1e19'; legal: NODE:BYTES"),
        ("x:8", "row 4, tied: 'x' is no earlier node; legal: one that is"),
        ("c:8", "row 4, tied: 'c' is no earlier node"),
        ("d:0", "row 4, tied: 'd' is no earlier node"),
        ("b:41", "row 4, tied: shares 41 bytes, of which 'b' has 40; legal: at most so many"),
    ],
)
def test_wrong_ties_are_refused(write: Write, cell: str, said: str) -> None:
    rows = [f"{row},{cell if i == 2 else ''}" for i, row in enumerate(SKIP)]
    with pytest.raises(PlanError) as refused:
        read_layer_profile(write(*rows, head=HEAD.strip() + ",tied\n"))
    assert said in str(refused.value)


def test_layers_without_any_time_are_refused(write: Write) -> None:
    with pytest.raises(PlanError, match="forward_ms: is 0 on every row; legal: above 0 on one"):
        read_layer_profile(write("m,4,0,a,input,0,0,100,0,"))


def test_files_without_layers_or_columns_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds no layers"):
        read_layer_profile(write())
    with pytest.raises(PlanError, match="lacks the columns index, node"):
        read_layer_profile(write("m,4", head="model,profile_batch\n"))
    with pytest.raises(PlanError, match="has more than one column node; legal: one"):
        read_layer_profile(write(*SKIP, head=HEAD.replace(",inputs", ",inputs,node")))
    with pytest.raises(PlanError, match="cannot be read"):
        read_layer_profile(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="does not hold 'x'; legal: m"):
        read_layer_profile(write(*SKIP), "x")
