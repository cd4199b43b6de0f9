"""Reading of safetensors files a slice at a time, against the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workbench.checkpoint import read_tensors
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.safetensors_reader import SafetensorsFile, read_header
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.checkpoint.tensor_index import Box, StoredTensor, TensorSource

EXTENTS = {"scalar": (), "one": (1,), "row": (7,), "matrix": (5, 6), "experts": (3, 4, 5)}


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_slices_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "a.safetensors"
    save_file({key: torch.randn(extent).to(dtype) for key, extent in EXTENTS.items()}, path)
    with SafetensorsFile(path) as ours, safe_open(path, framework="pt") as theirs:
        for key, extent in EXTENTS.items():
            assert torch.equal(ours.get_tensor(key), theirs.get_tensor(key))
            view = ours.get_slice(key)
            assert view.get_shape() == list(extent)
            some = tuple(slice(n // 3, max(1, n - 1)) for n in extent)
            assert torch.equal(view[some], theirs.get_tensor(key)[some])
            single = (slice(0, 1), *some[1:]) if extent else ()
            assert torch.equal(view[single], theirs.get_tensor(key)[single])


def described(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


ONE = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "five bytes": (b"12345", "5 bytes"),
    "cut header": (described(a=ONE)[:30], "30 bytes and announces a header of 65"),
    "huge header": (b"\xff" * 7 + b"\0" + b"{}", "announces a header of 72057594037927935"),
    "no JSON": ((4).to_bytes(8, "little") + b"{{{{", "header is no JSON"),
    "deep JSON": ((10**5).to_bytes(8, "little") + b"[" * 10**5, "header is no JSON"),
    "list": ((2).to_bytes(8, "little") + b"[]", "header is no object"),
    "cut data": (described(a=ONE) + b"0" * 15, "88 bytes, a ends at byte 89"),
    "longer data": (described(a=ONE) + b"0" * 17, "90 bytes, a ends at byte 89"),
    "overlap": (
        described(a=ONE, b={**ONE, "data_offsets": [8, 24]}) + b"0" * 24,
        "b begins at byte 8 of the data, a ends at 16",
    ),
    "hole": (
        described(a=ONE, b={**ONE, "data_offsets": [20, 36]}) + b"0" * 36,
        "b begins at byte 20 of the data, a ends at 16",
    ),
    "other bytes": (described(a={**ONE, "shape": [2, 3]}) + b"0" * 16, "takes 24 bytes and has 16"),
    "negative": (described(a={**ONE, "shape": [-2, -2]}) + b"0" * 16, "dtype, shape .* of a"),
    "no offsets": (described(a={"dtype": "F32", "shape": [4]}) + b"0" * 16, "data_offsets of a"),
    "no mapping": (described(a=3), "data_offsets of a"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    with pytest.raises(ValueError, match=rf"a\.safetensors is damaged: .*{words}.*; get it again"):
        read_header(path, "get it again")


def test_a_dtype_that_nobody_knows_is_named_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        described(a=ONE, b={**ONE, "dtype": "0x10", "data_offsets": [16, 32]}) + bytes(32)
    )
    with SafetensorsFile(path) as file:
        assert file.get_tensor("a").shape == (2, 2)
        with pytest.raises(ValueError, match=r"a\.safetensors: b is '0x10'; legal: "):
            file.get_tensor("b")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x cannot be read: No such file or directory; get it"):
        read_header(tmp_path / "x", "get it")
    with pytest.raises(ValueError, match="cannot be read: Is a directory; get it"):
        read_header(tmp_path, "get it")


def test_a_file_cut_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4)}, path)
    with SafetensorsFile(path) as opened:
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged: it ends at byte \d+"):
            opened.get_tensor("a")


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[[torch.Tensor], TensorSource]:
    """The index of a file without checksum that holds one tensor, of parameter and master."""

    def made(value: torch.Tensor) -> TensorSource:
        save_file({"a": value}, tmp_path / "f")
        box = Box("f", "a", tuple((0, n) for n in value.shape), "F32")
        stored = StoredTensor(tuple(value.shape), [box])
        tensors = {("a", kind): stored for kind in ("parameter", "master")}
        size = (tmp_path / "f").stat().st_size
        return TensorSource(tmp_path, tensors, {"f": (size, None)}, {}, exact=False)

    return made


@pytest.mark.parametrize("extent", [(50,), (9, 7), (3, 5, 7), (2, 30, 2)])
def test_parts_add_up_and_a_box_of_two_kinds_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
    source_of: Callable[[torch.Tensor], TensorSource],
    extent: tuple[int, ...],
) -> None:
    value = torch.randn(extent)
    source = source_of(value)
    monkeypatch.setattr(read_tensors, "PART_NUMEL", 15)
    slices = tuple((n // 3, n) for n in extent)
    mine = value[tuple(slice(*each) for each in slices)]
    shards = [
        Shard("a", kind, torch.zeros(mine.shape, dtype=dtype), extent, slices)
        for kind, dtype in (("parameter", torch.bfloat16), ("master", torch.float32))
    ]
    reads, calls = [], []
    read = SafetensorsFile.get_slice

    class Noted:
        def __init__(self, view: Any) -> None:
            self.view, self.get_shape = view, view.get_shape

        def __getitem__(self, at: Any) -> torch.Tensor:
            reads.append(self.view[at].numel())
            part: torch.Tensor = self.view[at]
            return part

    monkeypatch.setattr(SafetensorsFile, "get_slice", lambda self, key: Noted(read(self, key)))
    read_tensors.load_shards(source, shards, progress=lambda done, of: calls.append((done, of)))
    assert torch.equal(shards[1].tensor, mine) and torch.equal(shards[0].tensor, mine.bfloat16())
    assert sum(reads) == mine.numel() and len(reads) > 2 and max(reads) <= 15
    dones, totals = zip(*calls)
    assert set(totals) == {6 * mine.numel()} == {dones[-1]} and list(dones) == sorted(dones)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named_in_the_part_where_it_is(
    monkeypatch: pytest.MonkeyPatch, source_of: Callable[[torch.Tensor], TensorSource], bad: float
) -> None:
    value = torch.randn(9, 7)
    value[6, 3] = bad
    monkeypatch.setattr(read_tensors, "PART_NUMEL", 15)
    source = source_of(value)

    def load(start: int, stop: int) -> None:
        shard = Shard(
            "a", "parameter", torch.zeros(9, stop - start), (9, 7), ((0, 9), (start, stop))
        )
        read_tensors.load_shards(source, [shard])

    load(4, 7)
    with pytest.raises(ValueError, match=rf"f: a is {bad} at \[6, 3\]; get intact weights"):
        load(2, 5)
