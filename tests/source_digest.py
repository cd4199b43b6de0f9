"""A digest of source, which tells results of other code from those of this one."""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_sha256(*folders: Path) -> str:
    """Digest of all Python files in `folders`, their names included: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
