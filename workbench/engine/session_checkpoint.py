"""A session's tensors as checkpoint shards: what this rank must save, and what it needs back."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from workbench.checkpoint import huggingface_names, read_tensors, tensor_index
from workbench.checkpoint.background_writer import Writer
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.checkpoint_lock import claim
from workbench.checkpoint.read_tensors import Ranks
from workbench.checkpoint.resume_point import is_foreign, meta_of, steps_done
from workbench.engine import replica_check
from workbench.engine.rendezvous import gather
from workbench.engine.session import Session


class Saver:
    """Saves and loads the session of one rank in its run directory; `told` as in `Writer`."""

    def __init__(
        self,
        session: Session,
        run_dir: Path,
        told: Callable[[int, Path, float], None] = lambda step, path, seconds: None,
    ) -> None:
        self.session, self.folder, self.told = session, run_dir / "checkpoints", told
        self._writer: Writer | None = None
        self._lock = -1

    def prepare(self) -> None:
        """Claim the folder of checkpoints, on all ranks together, where this was not done before.

        Raises ValueError on every rank where it cannot be written, or another run writes there.
        """
        if self._writer is not None:
            return
        plan, mesh = self.session.plan, self.session.mesh
        token = read_tensors.together(self._ranks(), self._claim)
        token = next(word for word in self._ranks().gather(token) if word)
        patience = float(plan.telemetry.timeout_seconds)
        self._writer = Writer(
            self.folder,
            mesh.rank,
            mesh.world_size,
            token,
            plan.checkpoint.keep,
            patience,
            self.told,
        )

    def _claim(self) -> str:
        """Rank 0's lock on the folder, and a word that no other run has; nothing on other ranks."""
        if self.session.mesh.rank:
            return ""
        self._lock = claim(self.folder)
        return secrets.token_hex(6)

    def save(self, step: int) -> Path:
        """Have the state after `step` steps written, from all ranks together; returns where it will
        be.

        Copies this rank's part and returns, once the former checkpoint is whole; or only when this
        one is, where the plan says so. Raises ValueError where a disk refuses, `ReplicasDiffer`
        where replicas do.
        """
        self.prepare()
        assert self._writer is not None
        plan = self.session.plan
        for axis in replica_check.AXES:
            replica_check.compare(
                self._along(axis), self.session.mesh[axis], self.session.device, step
            )
        shards = [shard for name, shard in self._shards() if self._saves(name, shard)]
        scaler = self.session.scaler
        meta = meta_of(plan, step) | ({"loss_scaler": scaler.state()} if scaler else {})
        path = self._writer.start(step, shards, meta, copy=plan.checkpoint.asynchronous)
        if not plan.checkpoint.asynchronous:
            self.wait()
        return path

    def check(self) -> None:
        """Raise what went wrong with the checkpoint under way, if it is known already."""
        if self._writer is not None:
            self._writer.check()

    def wait(self) -> None:
        """Wait until the checkpoint under way, if there is one, is whole. Raises ValueError where
        it cannot be.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Let another run write to the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def load(self) -> int:
        """Load what the plan says to start from; the number of steps already done, 0 where there is
        nothing to load.

        Of weights under Hugging Face's names parameters are loaded, the optimizer starts afresh,
        and no step is done. Raises ValueError on every rank, naming the file or the tensor, where
        what is there is damaged or of another model, and where the sampler's place does not fall
        between two of this plan's steps.
        """
        plan, ranks = self.session.plan, self._ranks()
        if plan.checkpoint.load is None:
            return 0
        folder = Path(plan.checkpoint.load)
        if is_foreign(folder):
            source = read_tensors.together(
                ranks, lambda: huggingface_names.source_of(folder, plan.shape)
            )
            steps, wanted = (
                0,
                [shard for _, shard in self._shards() if shard.kind in huggingface_names.KINDS],
            )
        else:
            source = read_tensors.together(ranks, lambda: tensor_index.source_of(folder))
            steps = read_tensors.together(
                ranks, lambda: steps_done(folder, dict(source.meta), plan)
            )
            wanted = [shard for _, shard in self._shards()]
        read_tensors.load(source, wanted, ranks)
        if self.session.scaler is not None and "loss_scaler" in source.meta:
            self.session.scaler.load(source.meta["loss_scaler"])
        self.session.part.store.gather_updated_params()
        return steps

    def _ranks(self) -> Ranks:
        mesh = self.session.mesh
        return (
            Ranks(mesh.rank, partial(gather, device=self.session.device))
            if mesh.world_size > 1
            else Ranks()
        )

    def _along(self, axis: str) -> dict[str, Tensor]:
        """What ranks along `axis` hold alike, by kind and name."""
        store, states = self.session.part.store, self.session.optimizer.state()
        return {
            f"{kind} of {layout.name}": tensor
            for name, layout in store.layouts.items()
            if axis in layout.replicated_over
            for kind, tensor in {"parameter": store.values[name], **states[name]}.items()
        }

    def _saves(self, name: str, shard: Shard) -> bool:
        """Whether it is this rank that saves the shard; a count of steps goes with a tensor's first
        entry.
        """
        store = self.session.part.store
        layout = store.layouts[name]
        if not layout.is_owner(self.session.mesh) or not shard.tensor.numel():
            return False
        if shard.kind != "step":
            return True
        parts = layout.parts(store.values[name])
        return any(
            part.numel() and all(start == 0 for start, _ in slices) for part, slices in parts
        )

    def _shards(self) -> Iterator[tuple[str, Shard]]:
        """Local names, and the boxes of the global tensors that lie under them."""
        store, states = self.session.part.store, self.session.optimizer.state()
        for name, layout in store.layouts.items():
            for kind, tensor in {"parameter": store.values[name], **states[name]}.items():
                if kind == "step":
                    yield name, Shard(layout.name, kind, tensor, (), ())
                else:
                    for part, slices in layout.parts(tensor):
                        yield name, Shard(layout.name, kind, part, layout.shape, slices)
