"""A run's reference log-probabilities on disk, beside its checkpoints, for runs that resume."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from workbench.plan.resolved_plan import ResolvedPlan

FILE = "reference.safetensors"
"""Its name in a folder of checkpoints."""
OF, SHA256 = "of", "sha256"
"""What its metadata says: `reference_identity`, and the hash of its tensors."""


def reference_identity(plan: ResolvedPlan) -> str | None:
    """Hash of all that log-probabilities of the reference, and their order, depend on but the
    mesh; None where the plan does not name the text or the base by hash.
    """
    tune = plan.finetune
    assert tune is not None
    hashes = plan.corpus.sha256, tune.base_sha256 if tune.base is not None else ""
    if None in hashes:
        return None
    written = {
        "model": plan.shape.model_dump(mode="json"),
        "base": tune.base_sha256,
        "precision": plan.strategy.precision,
        "corpus": plan.corpus.model_dump(mode="json"),
        "sequence_length": tune.sequence_length,
        "seed": tune.seed,
    }
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def write_reference(folder: Path, identity: str, tables: Mapping[str, Tensor]) -> None:
    """Write the file in a folder, atomically.

    Raises:
        OSError: The disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE}.{os.getpid()}.writing"
    try:
        draft.write_bytes(save(dict(tables), {OF: identity, SHA256: _digest(tables)}))
        os.replace(draft, folder / FILE)
    finally:
        draft.unlink(missing_ok=True)


def read_reference(folder: Path, identity: str) -> dict[str, Tensor]:
    """What `write_reference` wrote in a folder; nothing where the file is missing, damaged, or of
    another `identity`: all of it can be computed again.
    """
    try:
        with safe_open(folder / FILE, "pt") as file:
            metadata = file.metadata() or {}
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}
    intact = metadata.get(OF) == identity and metadata.get(SHA256) == _digest(tables)
    return tables if intact else {}


def _digest(tables: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tables):
        total.update(name.encode() + tables[name].contiguous().numpy().tobytes())
    return total.hexdigest()
