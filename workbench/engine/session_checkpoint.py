"""Saving and loading of a session: its tensors as the shards of a distributed checkpoint."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from workbench.adapters.initial_adapters import initial_adapters
from workbench.checkpoint import read_tensors, tensor_index
from workbench.checkpoint.background_writer import CheckpointWriter
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.checkpoint_lock import lock_checkpoints
from workbench.checkpoint.gguf import gguf_tensors
from workbench.checkpoint.huggingface import huggingface_names
from workbench.checkpoint.read_tensors import LoadingRanks, Progress, SliceReader
from workbench.checkpoint.resume_changes import trained_on
from workbench.checkpoint.resume_point import (
    checkpoint_meta,
    is_gguf,
    is_huggingface_folder,
    naming_field,
    steps_done,
)
from workbench.checkpoint.tensor_index import TensorSource
from workbench.copy_stream import CopyStream
from workbench.engine.process_group.rendezvous import all_gather_json
from workbench.engine.session import Session
from workbench.engine.verify import replica_check
from workbench.errors import refuse


class SessionCheckpointer:
    """Saves and loads the session of one rank in its run directory.

    `on_committed` is called as in `CheckpointWriter`.
    """

    def __init__(
        self,
        session: Session,
        run_dir: Path,
        on_committed: Callable[[int, Path, float], None] = lambda step, path, seconds: None,
    ) -> None:
        self.session, self.folder, self.on_committed = (
            session,
            run_dir / "checkpoints",
            on_committed,
        )
        self._trained_on = trained_on(session.plan)
        self._writer: CheckpointWriter | None = None
        self._lock = -1

    def prepare(self) -> None:
        """Lock the folder of checkpoints, once; called by all ranks together.

        Raises:
            ValueError: On every rank, where the folder cannot be written or another run holds it.
        """
        if self._writer is not None:
            return
        plan, mesh = self.session.plan, self.session.mesh
        token = read_tensors.raise_on_all_ranks(self._ranks(), self._lock_folder)
        token = next(word for word in self._ranks().gather(token) if word)
        timeout = float(plan.telemetry.timeout_seconds)
        self._writer = CheckpointWriter(
            self.folder,
            mesh.rank,
            mesh.world_size,
            token,
            plan.checkpoint.keep,
            timeout,
            self.on_committed,
            CopyStream(self.session.device),
        )
        self.session.before_update = self._writer.before_update

    def _lock_folder(self) -> str:
        """Lock the folder on rank 0; returns a token unique to this run, empty on other ranks."""
        if self.session.mesh.rank:
            return ""
        self._lock = lock_checkpoints(self.folder)
        return secrets.token_hex(6)

    def save(self, step: int) -> Path:
        """Save the state after `step` steps; called by all ranks together.

        Waits for the previous checkpoint, starts to copy this rank's shards to host memory, and
        returns while they are copied and written; with `checkpoint.asynchronous` off it waits for
        this one too.

        Args:
            step: Steps done.

        Returns:
            The folder that the checkpoint will have once committed.

        Raises:
            ValueError: The previous checkpoint could not be written; synchronously, this one.
            ReplicasDiffer: Replicas differ.
        """
        self.prepare()
        assert self._writer is not None
        plan = self.session.plan
        mesh = self.session.mesh
        for axis in (*replica_check.REPLICA_AXES, *mesh.operator_axes):
            replica_check.check_replicas(
                self._replicated_tensors(axis), mesh[axis], self.session.device, step
            )
        shards = [shard for name, shard in self._shards() if self._should_save(name, shard)]
        scaler = self.session.scaler
        meta = checkpoint_meta(plan, step, self._trained_on) | (
            {"loss_scaler": scaler.state()} if scaler else {}
        )
        if (delayed := self.session.delayed) is not None:
            meta |= {"delayed_update": delayed.state()}
        path = self._writer.start(step, shards, meta, copy=plan.checkpoint.asynchronous)
        if not plan.checkpoint.asynchronous:
            self.wait()
        return path

    def check(self) -> None:
        """Raise the error of the pending checkpoint, if it is already known."""
        if self._writer is not None:
            self._writer.check()

    def wait(self) -> None:
        """Wait until the pending checkpoint is committed.

        Raises:
            ValueError: It cannot be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Release the lock on the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def load(self, progress: Progress = lambda done, of: None) -> int:
        """Load the plan's `finetune.base` and `checkpoint.load`, from whatever mesh wrote them.

        From a folder of Hugging Face weights, or a GGUF file, only parameters are loaded: the
        optimizer starts afresh, at step 0. Of a base they are those that are not trained, or all
        where no checkpoint holds what is.

        Args:
            progress: Called with the bytes done and in all of this rank.

        Returns:
            Steps already done; 0 where there is nothing to load.

        Raises:
            ValueError: On every rank, naming the file or tensor that is damaged or of another
                model, or where the sample index does not fall between two of this plan's steps.
        """
        plan, ranks = self.session.plan, self._ranks()
        if plan.finetune is not None and plan.finetune.base is not None:
            self._load_base(Path(plan.finetune.base), progress)
        if plan.checkpoint.load is None:
            if plan.lora is not None and plan.lora.initial is not None:
                self._load_initial(Path(plan.lora.initial), progress)
            self.session.part.store.gather_params()
            return 0
        folder = Path(plan.checkpoint.load)
        if is_gguf(folder) or is_huggingface_folder(folder):
            source, steps, wanted = self._weights(folder), 0, self._weight_shards()
        else:
            source = read_tensors.raise_on_all_ranks(
                ranks, lambda: tensor_index.checkpoint_source(folder)
            )
            steps = read_tensors.raise_on_all_ranks(
                ranks, lambda: steps_done(folder, dict(source.meta), plan)
            )
            if self.session.delayed is not None and source.meta.get("delayed_update"):
                self.session.delayed.load(source.meta["delayed_update"])
            wanted = [shard for _, shard in self._shards()]
        read_tensors.load_shards(source, wanted, ranks, progress)
        if self.session.scaler is not None and "loss_scaler" in source.meta:
            self.session.scaler.load(source.meta["loss_scaler"])
        self.session.part.store.gather_params()
        return steps

    def load_base(self, progress: Progress = lambda done, of: None) -> int:
        """Load the weights that training started from, where the plan goes on from a checkpoint; of
        a plan without `finetune.base` they are those that the session has drawn.

        Args:
            progress: As in `load`.

        Returns:
            The steps that `checkpoint.load` has done.

        Raises:
            ValueError: On every rank, naming a damaged file; or where `checkpoint.load` is weights,
                of which nothing says that training started from them.
        """
        plan, ranks = self.session.plan, self._ranks()
        assert plan.checkpoint.load is not None
        folder = Path(plan.checkpoint.load)
        if is_gguf(folder) or is_huggingface_folder(folder):
            raise refuse(
                "checkpoint.load",
                f"'{folder}' is weights, and finetune.preference compares with those"
                " that training starts from; legal: finetune.base in its place, or a checkpoint",
            )
        if plan.finetune is not None and plan.finetune.base is not None:
            with naming_field("finetune.base"):
                source = self._weights(Path(plan.finetune.base))
                read_tensors.load_shards(source, self._weight_shards(), ranks, progress)
        self.session.part.store.gather_params()
        source = read_tensors.raise_on_all_ranks(
            ranks, lambda: tensor_index.checkpoint_source(folder)
        )
        return read_tensors.raise_on_all_ranks(
            ranks, lambda: steps_done(folder, dict(source.meta), plan)
        )

    def _load_base(self, base: Path, progress: Progress) -> None:
        """Load the weights that are fine-tuned, but those that a checkpoint brings."""
        done, total = 0, 0

        def report(now: int, of: int) -> None:
            nonlocal done, total
            done, total = now, of
            progress(now, of)

        with naming_field("finetune.base"):
            wanted = list(self._frozen_shards())
            if self.session.plan.lora is None and self.session.plan.checkpoint.load is None:
                wanted += self._weight_shards()
            quantized = list(self._quantized_boxes())
            if not wanted and not quantized:
                return
            source, ranks = self._weights(base), self._ranks()
            read_tensors.load_shards(source, wanted, ranks, report, located=quantized)
            with SliceReader(source, lambda nbytes: report(done + nbytes, total)) as read:
                work = partial(self.session.part.fill_stored, read)
                read_tensors.raise_on_all_ranks(ranks, work)

    def _load_initial(self, folder: Path, progress: Progress) -> None:
        """Load the adapters that training goes on from, under the names that the base has."""
        plan, ranks = self.session.plan, self._ranks()
        assert plan.finetune is not None and plan.lora is not None
        base, shape, lora = plan.finetune.base, plan.shape, plan.lora

        def read() -> TensorSource:
            with naming_field("finetune.base"):
                family = huggingface_names.family_of_weights(base, shape)
            return initial_adapters(folder, family, shape, lora)

        source = read_tensors.raise_on_all_ranks(ranks, read)
        read_tensors.load_shards(source, self._weight_shards(), ranks, progress)

    def _weights(self, path: Path) -> TensorSource:
        """The parameters of a folder, a GGUF file or a checkpoint."""
        ranks, shape = self._ranks(), self.session.plan.shape
        read: Callable[[], TensorSource] = partial(tensor_index.weights_of_checkpoint, path)
        if is_gguf(path):
            read = partial(gguf_tensors.gguf_source, path, shape)
        elif is_huggingface_folder(path):
            read = partial(huggingface_names.huggingface_source, path, shape)
        source = read_tensors.raise_on_all_ranks(ranks, read)
        if source.left_out and ranks.rank == 0:
            warnings.warn(source.left_out, stacklevel=2)
        return source

    def _weight_shards(self) -> list[Shard]:
        """What weights alone fill of what is trained; optimizer states are not among it."""
        kinds = huggingface_names.WEIGHT_KINDS
        return [shard for _, shard in self._shards() if shard.kind in kinds]

    def _frozen_shards(self) -> Iterator[Shard]:
        store = self.session.part.store
        in_four_bits = self.session.part.stored_parts
        for name, layout in store.frozen_layouts.items():
            if name not in in_four_bits:
                for part, slices in layout.parts(store.frozen_values[name]):
                    yield Shard(layout.name, "parameter", part, layout.shape, slices)

    def _quantized_boxes(self) -> Iterator[Shard]:
        """What this rank reads of weights in 4 bits, without memory for it."""
        dtype = self.session.part.dtype
        for matrix in self.session.part.stored_matrices():
            for box in matrix.boxes():
                extent = [stop - start for start, stop in box]
                values = torch.empty(extent, dtype=dtype, device="meta")
                weight = matrix.weight
                yield Shard(weight.name, "parameter", values, weight.shape, box)

    def _ranks(self) -> LoadingRanks:
        mesh = self.session.mesh
        return (
            LoadingRanks(mesh.rank, partial(all_gather_json, device=self.session.device))
            if mesh.world_size > 1
            else LoadingRanks()
        )

    def _replicated_tensors(self, axis: str) -> dict[str, Tensor]:
        """Tensors replicated along `axis`, by kind and name."""
        store, states = self.session.part.store, self.session.optimizer.state()
        return {
            f"{kind} of {name}": tensor
            for name, layout in store.layouts.items()
            if axis in layout.replicated_over
            for kind, tensor in {"parameter": store.values[name], **states[name]}.items()
        }

    def _should_save(self, name: str, shard: Shard) -> bool:
        """Whether this rank saves the shard: of replicas one does, of a step count its tensor's
        first entry's owner.
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
        """(local name, shard) for every box of a global tensor that this rank holds."""
        store, states = self.session.part.store, self.session.optimizer.state()
        delayed = self.session.delayed
        held = {} if delayed is None else delayed.gradients()
        for name, layout in store.layouts.items():
            tensors = {"parameter": store.values[name], **states[name]}
            if name in held:
                tensors["gradient"] = held[name]
            for kind, tensor in tensors.items():
                if kind == "step":
                    yield name, Shard(layout.name, kind, tensor, (), ())
                else:
                    for part, slices in layout.parts(tensor):
                        yield name, Shard(layout.name, kind, part, layout.shape, slices)
