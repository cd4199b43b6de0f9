"""A session's tensors as checkpoint shards: what this rank must save, and what it needs back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.engine import checkpoint
from workbench.engine.checkpoint import Shard
from workbench.engine.session import Session


class Saver:
    """Saves and loads the session of one rank in its run directory."""

    def __init__(self, session: Session, run_dir: Path) -> None:
        self.session, self.folder = session, run_dir / "checkpoints"

    def save(self, step: int) -> Path:
        """Write a checkpoint of the state after `step` steps, from all ranks together; returns its folder."""
        plan, mesh = self.session.plan, self.session.mesh
        meta = {
            "plan": plan.name,
            "world_size": plan.world_size,
            "sample_index": step * plan.training.global_batch,
        }
        shards = [shard for name, shard in self._shards() if self._saves(name, shard)]
        return checkpoint.save(
            self.folder, step, shards, mesh.rank, self._writers(bool(shards)), meta, self._barrier, plan.checkpoint.keep
        )

    def load(self) -> int:
        """Load what the plan says to start from; the number of steps already done, 0 where there is nothing to load.

        Raises ValueError, naming the file or the tensor, where the checkpoint is damaged or of another model, and
        where the sampler's place does not fall between two of this plan's steps.
        """
        source, batch = self.session.plan.checkpoint.load, self.session.plan.training.global_batch
        if source is None:
            return 0
        meta = checkpoint.load(Path(source), [shard for _, shard in self._shards()])
        self.session.part.store.publish()
        steps, rest = divmod(int(meta["sample_index"]), batch)
        if rest:
            raise ValueError(
                f"training.global_batch is {batch}, but the checkpoint stands at sample {meta['sample_index']}, "
                "which is not between two of its steps"
            )
        return steps

    def _saves(self, name: str, shard: Shard) -> bool:
        """Whether it is this rank that saves the shard; a count of steps goes with a tensor's first slice."""
        layout = self.session.part.store.layouts[name]
        first = all(start == 0 for start, _ in layout.slices) and (layout.flat is None or layout.flat[0] == 0)
        return layout.owned(self.session.mesh) and (first or shard.kind != "step")

    def _shards(self) -> Iterator[tuple[str, Shard]]:
        store, states = self.session.part.store, self.session.optimizer.state()
        for name, layout in store.layouts.items():
            for kind, tensor in {"parameter": store.values[name], **states[name]}.items():
                if kind == "step":
                    yield name, Shard(layout.name, kind, tensor, (), ())
                else:
                    for part, slices in layout.parts(tensor):
                        yield name, Shard(layout.name, kind, part, layout.shape, slices)

    def _writers(self, owner: bool) -> list[int]:
        """Ranks that own something, as all ranks agree."""
        mesh = self.session.mesh
        owners = torch.zeros(mesh.world_size, device=self.session.device)
        owners[mesh.rank] = float(owner)
        if mesh.world_size > 1:
            dist.all_reduce(owners)
        return [rank for rank, owns in enumerate(owners.tolist()) if owns]

    def _barrier(self) -> None:
        if self.session.mesh.world_size > 1:
            dist.barrier()
