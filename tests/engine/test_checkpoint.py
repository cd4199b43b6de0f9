"""Checkpoints are whole or absent, verified when read, and load under any mesh."""

import json
import threading
from pathlib import Path

import pytest
import torch

from workbench.engine import checkpoint
from workbench.engine.checkpoint import Shard, finished, load, path_of, read_manifest, save

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
    """Shards of `rank` when every matrix is cut along `dim` into `size`; vectors and scalars lie on rank 0."""
    shards = []
    for (name, kind), value in whole().items():
        slices = [(0, n) for n in value.shape]
        if value.ndim == 2:
            piece = -(-value.shape[dim] // size)
            slices[dim] = (min(rank * piece, value.shape[dim]), min((rank + 1) * piece, value.shape[dim]))
        elif rank:
            continue
        part = value[tuple(slice(*s) for s in slices)]
        shards.append(
            Shard(name, kind, torch.full_like(part, -1) if empty else part, tuple(value.shape), tuple(slices))
        )
    return shards


def save_all(
    folder: Path, step: int, size: int, dim: int = 0, keep: int = 2, meta: dict[str, object] | None = None
) -> Path:
    """Save from `size` ranks, each a thread."""
    barrier = threading.Barrier(size)
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            save(folder, step, cut(dim, size, rank), rank, list(range(size)), meta or {}, lambda: void(barrier), keep)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return path_of(folder, step)


def void(barrier: threading.Barrier) -> None:
    barrier.wait(30)


def assert_loaded(shards: list[Shard]) -> None:
    for shard in shards:
        expected = whole()[shard.name, shard.kind][tuple(slice(*s) for s in shard.slices)]
        assert torch.equal(shard.tensor, expected), shard.key


@pytest.mark.parametrize("size", [1, 2, 3])
def test_same_mesh_loads_exactly(tmp_path: Path, size: int) -> None:
    path = save_all(tmp_path, 50, size, meta={"sample_index": 400, "plan": "abc"})
    assert path.name == "step-00000050"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", *(f"rank{r:05d}.safetensors" for r in range(size)),
    ]  # fmt: skip
    for rank in range(size):
        shards = cut(0, size, rank, empty=True)
        assert load(path, shards) == {"sample_index": 400, "plan": "abc", "step": 50}
        assert_loaded(shards)


@pytest.mark.parametrize(("dim", "size"), [(0, 1), (0, 2), (1, 2), (1, 4), (0, 5)])
def test_other_meshes_load_the_same_values(tmp_path: Path, dim: int, size: int) -> None:
    path = save_all(tmp_path, 1, 3, dim=0)
    for rank in range(size):
        shards = cut(dim, size, rank, empty=True)
        load(path, shards)
        assert_loaded(shards)


def test_views_of_one_buffer_and_transposed_tensors(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    shards = [
        Shard("a", "parameter", flat[:12].view(3, 4), (3, 4), ((0, 3), (0, 4))),
        Shard("b", "parameter", flat[12:].view(3, 4).t(), (4, 3), ((0, 4), (0, 3))),
    ]
    save(tmp_path, 0, shards, 0, [0], {}, lambda: None)
    flat_again = torch.zeros(24)
    target = [
        Shard("a", "parameter", flat_again[:12].view(3, 4), (3, 4), ((0, 3), (0, 4))),
        Shard("b", "parameter", flat_again[12:].view(3, 4).t(), (4, 3), ((0, 4), (0, 3))),
    ]
    load(path_of(tmp_path, 0), target)
    assert torch.equal(flat, flat_again)


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_all(tmp_path, step, 1)
    (tmp_path / "step-00000040").mkdir()
    assert [p.name for p in finished(tmp_path)] == ["step-00000020", "step-00000030"]
    save_all(tmp_path, 30, 1, meta={"again": True})
    assert read_manifest(path_of(tmp_path, 30))["meta"] == {"again": True, "step": 30}
    assert not list(tmp_path.glob("*.writing")) + list(tmp_path.glob("*.replaced"))


def test_a_rank_that_cannot_write_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 1, 2)

    def full(tensors: object, path: Path) -> None:
        if "rank00001" in path.name:
            raise OSError(28, "No space left on device")
        checkpoint_save(tensors, path)

    checkpoint_save = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ValueError, match=r"cannot write .*step-00000002\.writing.*No space left.*checkpoint\.every"):
        save_all(tmp_path, 2, 2)
    assert [p.name for p in finished(tmp_path)] == ["step-00000001"]
    monkeypatch.undo()
    save_all(tmp_path, 2, 2)
    assert [p.name for p in finished(tmp_path)] == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", ["rank00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_named_and_nothing_is_copied(tmp_path: Path, name: str, damage: str) -> None:
    path = save_all(tmp_path, 5, 2)
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-20] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    shards = cut(0, 1, 0, empty=True)
    with pytest.raises(ValueError, match=f"{name}.*checkpoint.load"):
        load(path, shards)
    assert all((shard.tensor == -1).all() for shard in shards)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 1, meta={"sample_index": 40}) / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"sample_index": 40', '"sample_index": 41'))
    with pytest.raises(ValueError, match="does not match its checksum"):
        read_manifest(path.parent)
    for other in ("[]", "null", "{}", "\x00"):
        path.write_text(other)
        with pytest.raises(ValueError, match="damaged"):
            read_manifest(path.parent)


def test_another_model_is_refused_by_tensor(tmp_path: Path) -> None:
    path = save_all(tmp_path, 5, 1)
    other = [Shard("norm.weight", "parameter", torch.zeros(9), (9,), ((0, 9),))]
    with pytest.raises(ValueError, match=r"parameter of norm\.weight has shape \(7,\), the plan's model needs \(9,\)"):
        load(path, other)
    absent = [Shard("head.weight", "parameter", torch.zeros(9), (9,), ((0, 9),))]
    with pytest.raises(ValueError, match=r"has no parameter of head\.weight"):
        load(path, absent)


def test_a_missing_slice_is_seen_when_saving(tmp_path: Path) -> None:
    half = [Shard("a", "parameter", torch.zeros(2), (4,), ((0, 2),))]
    with pytest.raises(AssertionError):
        save(tmp_path, 0, half, 0, [0], {}, lambda: None)
    assert finished(tmp_path) == []


def test_dtypes_convert(tmp_path: Path) -> None:
    save(
        tmp_path,
        0,
        [Shard("a", "parameter", torch.ones(2, dtype=torch.bfloat16), (2,), ((0, 2),))],
        0,
        [0],
        {},
        lambda: None,
    )
    wide = torch.zeros(2)
    load(path_of(tmp_path, 0), [Shard("a", "parameter", wide, (2,), ((0, 2),))])
    assert wide.tolist() == [1.0, 1.0]
    assert json.loads((path_of(tmp_path, 0) / "manifest.json").read_text())["version"] == 1
