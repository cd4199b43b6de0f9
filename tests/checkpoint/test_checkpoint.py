"""Checkpoints are whole or absent, written while training goes on, verified when read, and load
under any mesh.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from workbench.checkpoint import checkpoint_format, read_tensors, safetensors_writer
from workbench.checkpoint.background_writer import CheckpointWriter
from workbench.checkpoint.checkpoint_format import Shard, checkpoint_path
from workbench.checkpoint.checkpoint_lock import (
    clear_unfinished,
    lock_checkpoints,
    unwritable_error,
)
from workbench.checkpoint.checksums import file_sha256
from workbench.checkpoint.intact_checkpoints import checkpoint_of
from workbench.checkpoint.manifest import is_finite, manifest_text, read_manifest
from workbench.checkpoint.read_tensors import LoadingRanks, assign_files
from workbench.checkpoint.resume_point import finished_checkpoints
from workbench.checkpoint.safetensors_writer import TensorEntry
from workbench.checkpoint.tensor_index import checkpoint_source
from workbench.errors import PlanError

SHAPES = {"embed.weight": (10, 6), "layers.0.weight": (8, 12), "norm.weight": (7,)}


def whole() -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {
        (name, kind): torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
        for kind in ("parameter", "moment1")
    }
    return {**values, ("norm.weight", "step"): torch.tensor(7.0)}


def cut(dim: int, size: int, rank: int, empty: bool = False) -> list[Shard]:
    """Shards of `rank` when every matrix is cut along `dim` into `size`; vectors and scalars lie on
    rank 0.
    """
    shards = []
    for (name, kind), value in whole().items():
        slices = [(0, n) for n in value.shape]
        if value.ndim == 2:
            piece = -(-value.shape[dim] // size)
            slices[dim] = (
                min(rank * piece, value.shape[dim]),
                min((rank + 1) * piece, value.shape[dim]),
            )
        elif rank:
            continue
        part = value[tuple(slice(*s) for s in slices)]
        shards.append(
            Shard(
                name,
                kind,
                torch.full_like(part, -1) if empty else part,
                tuple(value.shape),
                tuple(slices),
            )
        )
    return shards


def writers(
    folder: Path, size: int, keep: int = 2, patience: float = 20.0
) -> list[CheckpointWriter]:
    """The writers of all ranks, in one process."""
    os.close(lock_checkpoints(folder))
    return [CheckpointWriter(folder, rank, size, "token", keep, patience) for rank in range(size)]


def save_all(folder: Path, step: int, size: int, dim: int = 0, keep: int = 2, **meta: Any) -> Path:
    made = writers(folder, size, keep)
    for rank, writer in enumerate(made):
        writer.start(step, cut(dim, size, rank), meta)
    for writer in made:
        writer.wait()
    return checkpoint_path(folder, step)


def load(path: Path, shards: list[Shard]) -> None:
    read_tensors.load_shards(checkpoint_source(path), shards)


def assert_loaded(shards: list[Shard]) -> None:
    for shard in shards:
        expected = whole()[shard.name, shard.kind][tuple(slice(*s) for s in shard.slices)]
        assert torch.equal(shard.tensor, expected), (shard.kind, shard.name)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_same_mesh_loads_exactly(tmp_path: Path, size: int) -> None:
    path = save_all(tmp_path, 50, size, sample_index=400, plan="abc")
    assert path.name == "step-00000050"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        *(f"rank{r:05d}.safetensors" for r in range(size)),
    ]
    assert checkpoint_source(path).meta == {"sample_index": 400, "plan": "abc"}
    for rank in range(size):
        shards = cut(0, size, rank, empty=True)
        load(path, shards)
        assert_loaded(shards)


@pytest.mark.parametrize(("dim", "size"), [(0, 1), (0, 2), (1, 2), (1, 4), (0, 5)])
def test_other_meshes_load_the_same_values(tmp_path: Path, dim: int, size: int) -> None:
    path = save_all(tmp_path, 1, 3, dim=0)
    for rank in range(size):
        shards = cut(dim, size, rank, empty=True)
        load(path, shards)
        assert_loaded(shards)


def test_views_of_one_buffer_transposed_and_in_several_boxes(tmp_path: Path) -> None:
    def shards(flat: torch.Tensor) -> list[Shard]:
        a, b, c = flat[:12].view(3, 4), flat[12:24].view(3, 4).t(), flat[24:]
        return [
            Shard("a", "parameter", a, (3, 4), ((0, 3), (0, 4))),
            Shard("b", "parameter", b, (4, 3), ((0, 4), (0, 3))),
            Shard("c", "parameter", c[:2].view(1, 2), (2, 3), ((0, 1), (1, 3))),
            Shard("c", "parameter", c[2:5].view(1, 3), (2, 3), ((1, 2), (0, 3))),
            Shard("c", "parameter", c[5:].view(1, 1), (2, 3), ((0, 1), (0, 1))),
        ]

    flat, again = torch.arange(30.0), torch.zeros(30)
    (writer,) = writers(tmp_path, 1)
    writer.start(0, shards(flat), {})
    writer.wait()
    load(checkpoint_path(tmp_path, 0), shards(again))
    assert torch.equal(flat, again)


def test_files_are_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(3, dtype=torch.bfloat16),
        "a": torch.rand(2, 3),
        "s": torch.tensor(2.0),
        "d": torch.rand(5, dtype=torch.float64),
        "e": torch.empty(0, 3),
        "t": torch.rand(4, 2).t(),
    }
    entries = [TensorEntry(key, value.dtype, tuple(value.shape)) for key, value in tensors.items()]
    told: list[int] = []
    size, sha256 = safetensors_writer.write_safetensors(
        tmp_path / "x", entries, tensors.__getitem__, told.append
    )
    assert size == (tmp_path / "x").stat().st_size == sum(told) and sha256 == file_sha256(
        tmp_path / "x"
    )
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys() and all(
        torch.equal(read[key], tensors[key]) for key in read
    )


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_all(tmp_path, step, 1)
    (tmp_path / "step-00000040").mkdir()
    assert [p.name for p in finished_checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]
    save_all(tmp_path, 30, 1, again=True)
    assert read_manifest(checkpoint_path(tmp_path, 30))["meta"] == {"again": True}
    save_all(tmp_path, 5, 1)  # a run that began again earlier
    assert [p.name for p in finished_checkpoints(tmp_path)] == ["step-00000005", "step-00000030"]
    assert not list(tmp_path.glob("*.writing*")) + list(tmp_path.glob("*.replaced"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_marks_its_checkpoint(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    tensor = torch.linspace(-3, 3, 2**20 + 7).to(dtype).view(-1, 1)
    for step, bad in ((1, None), (2, value)):
        if bad is not None:
            tensor[-2] = bad
        (writer,) = writers(tmp_path, 1)
        size = tuple(tensor.shape)
        writer.start(
            step, [Shard("w", "parameter", tensor, size, tuple((0, n) for n in size))], {"a": 1}
        )
        writer.wait()
    first, second = (read_manifest(checkpoint_path(tmp_path, step)) for step in (1, 2))
    assert (first["meta"], second["meta"]) == ({"a": 1}, {"a": 1, "finite": False})
    assert all("finite" not in file for file in (*first["files"], *second["files"]))
    assert [is_finite(checkpoint_path(tmp_path, step)) for step in (1, 2)] == [True, False]


def test_the_last_checkpoint_without_nan_is_kept_and_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    folder = tmp_path / "checkpoints"
    good, bad = torch.ones(3), torch.full((3,), float("nan"))
    for step, tensor in enumerate((good, good, bad, bad, bad), start=1):
        (writer,) = writers(folder, 1)
        writer.start(step, [Shard("w", "parameter", tensor, (3,), ((0, 3),))], {})
        writer.wait()
    assert [path.name for path in finished_checkpoints(folder)] == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    assert checkpoint_of(tmp_path).name == "step-00000002"
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(
        PlanError,
        match=r"holds no intact checkpoint: .*step-00000005' has NaN .*lower training\.optimizer",
    ):
        checkpoint_of(tmp_path)


class Slow:
    """Writes files only when told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, write = threading.Event(), safetensors_writer.write_safetensors

        def slowly(*arguments: Any) -> tuple[int, str]:
            assert self.go.wait(20)
            return write(*arguments)

        monkeypatch.setattr(safetensors_writer, "write_safetensors", slowly)


def test_training_goes_on_while_a_copy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    shards = cut(0, 1, 0)
    told: list[tuple[int, Path]] = []
    os.close(lock_checkpoints(tmp_path))
    writer = CheckpointWriter(
        tmp_path, 0, 1, "t", 2, 20.0, lambda step, path, seconds: told.append((step, path))
    )
    writer.start(1, shards, {})
    for shard in shards:
        shard.tensor.fill_(-5)  # the next step
    writer.check()
    assert not finished_checkpoints(tmp_path) and not told
    slow.go.set()
    writer.wait()
    assert told == [(1, checkpoint_path(tmp_path, 1))]
    again = cut(0, 1, 0, empty=True)
    load(checkpoint_path(tmp_path, 1), again)
    assert_loaded(again)


def test_copies_are_written_over_and_may_be_left_out(tmp_path: Path) -> None:
    shards = cut(0, 1, 0)
    (writer,) = writers(tmp_path, 1, keep=3)
    for step, copy in enumerate((True, True, False)):
        for shard in shards:
            shard.tensor.add_(step)
        writer.start(step, shards, {}, copy)
        writer.wait()
        again = cut(0, 1, 0, empty=True)
        load(checkpoint_path(tmp_path, step), again)
        assert all(torch.equal(mine.tensor, theirs.tensor) for mine, theirs in zip(shards, again))


def test_the_next_waits_for_the_former_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Slow(monkeypatch)
    (writer,) = writers(tmp_path, 1)
    writer.start(1, cut(0, 1, 0), {})
    threading.Timer(0.1, slow.go.set).start()
    writer.start(2, cut(0, 1, 0), {})
    assert checkpoint_path(tmp_path, 1) in finished_checkpoints(tmp_path)
    assert capsys.readouterr().out.startswith(
        "checkpoint: step 2 waits until the previous one is written"
    )
    writer.wait()
    assert [p.name for p in finished_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def full_disk(rank: int) -> Callable[..., Any]:
    write = safetensors_writer.write_safetensors

    def failing(path: Path, *rest: Any) -> tuple[int, str]:
        if f"rank{rank:05d}" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    return failing


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_leaves_no_checkpoint_and_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    save_all(tmp_path, 1, 2)
    monkeypatch.setattr(safetensors_writer, "write_safetensors", full_disk(failing))
    made = writers(tmp_path, 2)
    for rank, writer in enumerate(made):
        writer.start(2, cut(0, 2, rank), {})
    words = r"cannot write .*step-00000002\.writing.*No space left.*checkpoint\.every"
    with pytest.raises(ValueError, match=words):
        made[failing].wait()
    with pytest.raises(ValueError, match=rf"{words}.*rank {failing}"):
        made[1 - failing].wait()
    assert [p.name for p in finished_checkpoints(tmp_path)] == ["step-00000001"]
    assert not list(
        tmp_path.glob("step-00000002.writing*/*.safetensors")
    )  # no room is kept by what came to nothing
    monkeypatch.undo()
    save_all(tmp_path, 2, 2)
    assert [p.name for p in finished_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def test_a_file_that_grows_too_large_for_the_disk(tmp_path: Path) -> None:
    """A limit that the kernel itself holds a forked child to: what the disk says when it is
    full.
    """
    limited = os.fork()
    if limited == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        (writer,) = writers(tmp_path, 1)
        writer.start(3, cut(0, 1, 0), {})
        try:
            writer.wait()
        except ValueError as error:
            os._exit(0 if "cannot write" in str(error) and "step-00000003" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(limited, 0)[1] == 0
    assert finished_checkpoints(tmp_path) == []


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    lead, other, _ = writers(tmp_path, 3, patience=1.0)
    lead.start(4, cut(0, 3, 0), {})
    other.start(4, cut(0, 3, 1), {})
    with pytest.raises(
        ValueError, match=r"rank 2 has not written its part of .*step-00000004.*timeout_seconds"
    ):
        lead.wait()
    with pytest.raises(ValueError, match="rank 2 has not written"):
        other.wait()
    assert finished_checkpoints(tmp_path) == []


def test_a_killed_run_leaves_nothing_that_counts(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 1)
    killed = os.fork()
    if killed == 0:
        (writer,) = writers(tmp_path, 1)
        checkpoint_format.commit_checkpoint = lambda *_: os.kill(os.getpid(), 9)
        writer.start(2, cut(0, 1, 0), {})
        writer.wait()
        os._exit(1)
    assert os.waitpid(killed, 0)[1] == 9
    assert list(tmp_path.glob("step-00000002.writing-*")) and [
        p.name for p in finished_checkpoints(tmp_path)
    ] == ["step-00000001"]
    checkpoint_path(tmp_path, 1).rename(
        tmp_path / "step-00000001.replaced"
    )  # killed between two renames
    os.close(lock_checkpoints(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    load(checkpoint_path(tmp_path, 1), cut(0, 1, 0, empty=True))


def test_resuming_a_killed_run_clears_its_unfinished_checkpoints_unless_a_run_still_writes(
    tmp_path: Path,
) -> None:
    held, hold = os.pipe()
    writing = os.fork()
    if writing == 0:
        lock_checkpoints(tmp_path)
        (tmp_path / "step-00000002.writing-token").mkdir()
        os.write(hold, b"x")
        threading.Event().wait()
    os.read(held, 1)
    clear_unfinished(tmp_path)
    left = [path.name for path in tmp_path.iterdir()]
    os.kill(writing, 9)
    os.waitpid(writing, 0)
    clear_unfinished(tmp_path)
    assert left == ["step-00000002.writing-token"] and list(tmp_path.iterdir()) == []
    clear_unfinished(tmp_path / "absent")


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    first = lock_checkpoints(tmp_path)
    with pytest.raises(ValueError, match=f"another run writes to {tmp_path}; stop it"):
        lock_checkpoints(tmp_path)
    os.close(first)
    os.close(lock_checkpoints(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"checkpoint: cannot write .*file.checkpoints: Not a directory"
    ):
        lock_checkpoints(tmp_path / "file" / "checkpoints")
    if not os.access("/proc", os.F_OK):
        return
    with pytest.raises(
        ValueError, match="checkpoint: cannot write /proc/"
    ):  # a file system that takes no files
        lock_checkpoints(Path(f"/proc/{os.getpid()}"))


def test_a_link_in_place_of_the_folder_is_not_cleared(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "run" / "checkpoints"
    save_all(elsewhere, 1, 1)
    (elsewhere / "step-00000002.writing-token").mkdir()
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    clear_unfinished(link)
    with pytest.raises(ValueError, match=f"{link} is a link, whose target would be cleared"):
        lock_checkpoints(link)
    assert (elsewhere / "step-00000002.writing-token").is_dir() and finished_checkpoints(link) == []


def test_a_tensor_of_another_shape_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 1)
    body = read_manifest(path)
    tensor = next(each for each in body["files"][0]["tensors"] if len(each["shape"]) == 2)
    tensor["shape"], tensor["slices"] = tensor["shape"][::-1], tensor["slices"][::-1]
    (path / "manifest.json").write_text(manifest_text(body))
    wanted = Shard(
        tensor["name"],
        tensor["kind"],
        torch.zeros(tensor["shape"]),
        tuple(tensor["shape"]),
        tuple((0, n) for n in tensor["shape"]),
    )
    with pytest.raises(ValueError, match=r"has shape \[\d+, \d+\], its manifest says"):
        read_tensors.load_shards(replace(checkpoint_source(path), exact=False), [wanted])


@pytest.mark.parametrize("name", ["rank00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove", "lengthen"])
def test_damage_is_named_and_nothing_is_copied(tmp_path: Path, name: str, damage: str) -> None:
    path = save_all(tmp_path, 5, 2)
    file = path / name
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "truncate" else data + b" ")
    shards = cut(0, 1, 0, empty=True)
    with pytest.raises(ValueError, match=rf"{name}.*checkpoint\.load"):
        load(path, shards)
    assert all((shard.tensor == -1).all() for shard in shards)


def test_a_flipped_bit_anywhere_is_seen(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 1, sample_index=40)
    for file in path.iterdir():
        data = file.read_bytes()
        for at in {*range(0, len(data), 17), 0, 7, 8, len(data) - 1}:
            file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            with pytest.raises(ValueError, match=rf"{file.name} is damaged.*checkpoint\.load"):
                load(path, cut(0, 1, 0, empty=True))
        file.write_bytes(data)
    load(path, cut(0, 1, 0, empty=True))


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 1, sample_index=40) / "manifest.json"
    text = path.read_text()
    for other in (
        text.replace('"sample_index": 40', '"sample_index": 41'),
        text.replace(": ", ":"),
        "[]",
        "{}",
        "\0",
    ):
        path.write_text(other)
        with pytest.raises(ValueError, match="does not match its checksum"):
            read_manifest(path.parent)
    assert json.loads(text)["version"] == 2


def test_another_model_is_refused_by_tensor(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 1)

    def vector(name: str, length: int, dtype: torch.dtype = torch.float32) -> list[Shard]:
        return [
            Shard(name, "parameter", torch.zeros(length, dtype=dtype), (length,), ((0, length),))
        ]

    with pytest.raises(
        ValueError,
        match=r"parameter of norm\.weight has shape \(7,\), the plan's model needs \(9,\)",
    ):
        load(path, vector("norm.weight", 9))
    with pytest.raises(ValueError, match=r"has no parameter of head\.weight"):
        load(path, vector("head.weight", 9))
    with pytest.raises(
        ValueError, match=r"norm\.weight is F32, the plan needs BF16; set strategy\.precision"
    ):
        load(path, vector("norm.weight", 7, torch.bfloat16))


def test_a_missing_slice_is_seen_when_saving(tmp_path: Path) -> None:
    half = [Shard("a", "parameter", torch.zeros(2), (4,), ((0, 2),))]
    (writer,) = writers(tmp_path, 1)
    writer.start(0, half, {})
    with pytest.raises(RuntimeError, match="shards do not cover the model"):
        writer.wait()
    assert finished_checkpoints(tmp_path) == []


def test_every_file_is_verified_once_by_a_rank_that_needs_it() -> None:
    sizes = {"a": 5, "b": 4, "c": 3, "d": 9}
    needs = [["a", "b", "c"], ["a", "b", "c"], ["c"], []]
    own = assign_files(needs, sizes)
    assert sorted(file for files in own for file in files) == ["a", "b", "c"]
    assert all(set(mine) <= set(need) for mine, need in zip(own, needs)) and own == [
        ["a"],
        ["b"],
        ["c"],
        [],
    ]


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 2)
    (path / "rank00001.safetensors").unlink()
    rounds: list[list[Any]] = []

    def gather(item: Any) -> list[Any]:
        rounds.append([item])
        return [item, "rank 1 found this"] if len(rounds) == 1 else [item, item]

    with pytest.raises(ValueError, match="rank 1 found this"):
        read_tensors.load_shards(
            checkpoint_source(path), cut(0, 2, 0, empty=True), LoadingRanks(0, gather)
        )
    assert rounds == [[None]]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EDQUOT, "free space there"),
        (errno.EROFS, "make it writable"),
        (errno.EACCES, "make it writable"),
        (errno.EIO, "see to that disk"),
    ],
)
def test_the_remedy_follows_the_disks_errno(tmp_path: Path, number: int, remedy: str) -> None:
    message = str(unwritable_error(tmp_path, OSError(number, os.strerror(number))))
    assert os.strerror(number) in message and remedy in message
    assert ("free space" in message) == (number in (errno.ENOSPC, errno.EDQUOT))
