"""How fast weights are loaded beside the disk's sequential rate, and in how much memory.

`python -m tests.benchmarks.loading_weights [--layers 28] [--rounds 3] [--folder DIR] [--json]`: a
model of Llama-3.2-3B's shape with random bf16 weights, in shards with an index as transformers
writes them (6.4 GB, deleted at the end), is loaded onto four ranks: as tensor parallelism of four,
and as ZeRO-3 over four, parameters alone. In turn, each with the files dropped from the page cache
before: one process reads all files from first to last byte, 8 MiB at a time; and the ranks load.
Memory (PSS) is sampled in a load of its own, which is not timed. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.huggingface.huggingface_names import (
    config_json,
    huggingface_source,
    stored_parts,
    writing_family,
)
from workbench.checkpoint.read_tensors import LoadingRanks, load_shards
from workbench.checkpoint.safetensors_writer import TensorEntry, write_safetensors
from workbench.engine.process_group.rendezvous import all_gather_json
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.catalog.families.stored_parts import stored_extents
from workbench.plan.catalog.huggingface_files import INDEX_FILE
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

RANKS = 4
SHARD_BYTES = 2 * 10**9
READ_BYTES = 8 * 2**20
POLL_SECONDS = 0.05
LIMIT_SECONDS = 600.0
STRATEGIES = {
    "tensor 4": {"tensor": {"size": RANKS, "sequence": False}},
    "ZeRO-3 over 4": {"data": {"zero": 3}},
}


def shape_of(layers: int) -> Shape:
    """The shape of Llama-3.2-3B, with so many layers."""
    return Shape(
        layers=layers,
        hidden=3072,
        heads=24,
        kv_heads=8,
        head_dim=128,
        ffn=8192,
        vocab=128256,
        tied=True,
        max_positions=8192,
        rope_theta=5e5,
    )


def write_model(folder: Path, shape: Shape) -> list[Path]:
    """Write random bf16 weights and config.json into a folder; the files of weights."""
    family = writing_family(shape)
    entries = [
        TensorEntry(key, torch.bfloat16, extent)
        for key, extent in stored_extents(stored_parts(family, shape)).items()
    ]
    generator = torch.Generator().manual_seed(0)

    def random(key: str) -> Tensor:
        extent = next(entry.shape for entry in entries if entry.key == key)
        return torch.empty(extent, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    groups = list(_grouped(entries))
    place: dict[str, str] = {}
    for number, group in enumerate(groups):
        name = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        write_safetensors(folder / name, group, random)
        place |= {entry.key: name for entry in group}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": place}))
    (folder / "config.json").write_text(json.dumps(config_json(shape, torch.bfloat16)))
    return [folder / name for name in dict.fromkeys(place.values())]


def _grouped(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    group: list[TensorEntry] = []
    for entry in entries:
        if group and sum(each.nbytes for each in (*group, entry)) > SHARD_BYTES:
            yield group
            group = []
        group.append(entry)
    yield group


def drop_cached(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_sequentially(files: list[Path]) -> float:
    """Seconds in which one process reads the files."""
    buffer, began = bytearray(READ_BYTES), time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def plan_of(folder: Path, strategy: dict[str, Any]) -> ResolvedPlan:
    """A plan of four CPU ranks that loads the folder, with an optimizer that holds no state."""
    written = {
        "model": str(folder / "config.json"),
        "cluster": {"gpu": "local", "gpus": RANKS},
        "strategy": {**strategy, "precision": "fp32", "kernels": "eager"},
        "training": {
            **{"sequence_length": 64, "global_batch": RANKS, "micro_batch": 1},
            "optimizer": {"name": "sgd"},
        },
        "checkpoint": {"load": str(folder)},
    }
    return Plan.model_validate(written).resolve()


def load(plan: ResolvedPlan, watched: bool, rank: int) -> dict[str, float]:
    """Load a rank's parameters, in bf16; seconds, and memory where it is watched.

    What a training step needs beside the parameters (gradients, optimizer state) is not allocated:
    the layouts come from a session on the meta device. The baseline is taken before the
    parameters are allocated.
    """
    process, mesh = psutil.Process(), build_mesh(plan, rank)
    store = Session.build(plan, mesh, torch.device("meta"), torch.bfloat16, drawer=None).part.store
    ranks = LoadingRanks(rank, partial(all_gather_json, device=torch.device("cpu")))
    before = process.memory_full_info().pss
    own = {name: torch.empty_like(value, device="cpu") for name, value in store.values.items()}
    shards = [
        Shard(layout.name, "parameter", part, layout.shape, slices)
        for name, layout in store.layouts.items()
        for part, slices in layout.parts(own[name])
    ]
    samples, done = [before], threading.Event()

    def sample() -> None:
        while not done.wait(POLL_SECONDS):
            samples.append(process.memory_full_info().pss)

    sampler = threading.Thread(target=sample)
    dist.barrier()
    if watched:
        sampler.start()
    began = time.perf_counter()
    load_shards(huggingface_source(Path(str(plan.checkpoint.load)), plan.shape), shards, ranks)
    dist.barrier()
    seconds = time.perf_counter() - began
    done.set()
    if watched:
        sampler.join()
        samples.append(process.memory_full_info().pss)
    held = sum(value.nbytes for value in own.values())
    return {"seconds": seconds, "own": held, "growth": max(samples) - before}


def measure(layers: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Rates and memory of each strategy."""
    files = write_model(folder, shape_of(layers))
    size = sum(path.stat().st_size for path in files)
    found: dict[str, Any] = {"cores": psutil.cpu_count(), "bytes": size, "files": len(files)}
    for name, strategy in STRATEGIES.items():
        plan = plan_of(folder, strategy)
        pairs = []
        for _ in range(rounds):
            drop_cached(files)
            alone = read_sequentially(files)
            drop_cached(files)
            ours = max(
                each["seconds"]
                for each in run_ranks(RANKS, partial(load, plan, False), LIMIT_SECONDS)
            )
            pairs.append((alone, ours))
        drop_cached(files)
        ranks = run_ranks(RANKS, partial(load, plan, True), LIMIT_SECONDS)
        ratios = [alone / ours for alone, ours in pairs]
        found[name] = {
            "disk_MB_per_second": size / 1e6 / statistics.median(a for a, _ in pairs),
            "loading_MB_per_second": size / 1e6 / statistics.median(b for _, b in pairs),
            "rate_ratios": ratios,
            "rate_ratio": statistics.median(ratios),
            "own_MB": [each["own"] / 1e6 for each in ranks],
            "growth_MB": [each["growth"] / 1e6 for each in ranks],
            "memory_ratio": max(each["growth"] / each["own"] for each in ranks),
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.loading_weights")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Where the files are made for a while.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments.layers, arguments.rounds, Path(folder))
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{found['bytes'] / 1e9:.2f} GB in {found['files']} files, {found['cores']} cores")
    for name in STRATEGIES:
        one = found[name]
        ratios = ", ".join(f"{ratio:.2f}" for ratio in one["rate_ratios"])
        grown = ", ".join(f"{growth:,.0f}" for growth in one["growth_MB"])
        print(
            f"{name}: {one['loading_MB_per_second']:,.0f} of the disk's "
            f"{one['disk_MB_per_second']:,.0f} MB/s ({one['rate_ratio']:.2f}; {ratios}); memory "
            f"{grown} MB a rank, at most {one['memory_ratio']:.3f} of its parameters"
        )


if __name__ == "__main__":
    main()
