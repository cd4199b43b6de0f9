"""Whether all nodes see the run directory of node 0, asked before the process group is formed.

Telemetry, checkpoints and the request to stop are files there: two disks of the same name would
otherwise show as a checkpoint that is never complete, or as ranks that never said hello.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from workbench.errors import PlanError, refuse

LOOK_SECONDS = 30.0
"""How long a node looks for the file of node 0, which a network file system may show late."""
READ_TIMEOUT = timedelta(seconds=10)
"""How long rank 0, which may hold the store, waits for the others to read its verdict."""
MARK, VERDICT = "folder/mark", "folder/verdict"


def check_shared_folder(
    folder: Path,
    store: dist.Store,
    rank: int,
    world: int,
    per_node: int,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Check that every node finds in `folder` the file that rank 0 writes there.

    Args:
        folder: The run directory, as this rank names it.
        store: The rendezvous store.
        rank: This rank.
        world: World size.
        per_node: Ranks of a node, which are consecutive.
        look_seconds: Deadline of a node's look for the file.

    Raises:
        PlanError: The same on every rank, naming the nodes that do not see it.
        RuntimeError: On rank 0, a node that did not answer within the store's timeout.
    """
    if rank == 0:
        mark = folder / f".shared-{uuid4().hex}"
        mark.write_bytes(b"")
        store.set(MARK, mark.name)
    if rank % per_node == 0:
        name = store.get(MARK).decode()
        store.set(_answer(rank), json.dumps([_finds(folder / name, look_seconds), _where(folder)]))
    if rank == 0:
        blind = _blind_nodes(store, range(0, world, per_node))
        mark.unlink(missing_ok=True)
        store.set(VERDICT, json.dumps([blind, _where(folder)]))
    blind, home = json.loads(store.get(VERDICT))
    store.set(_read_by(rank), "")
    if rank == 0:  # the store ends with this rank, which may hold it
        with suppress(dist.DistStoreError):
            store.wait([_read_by(each) for each in range(world)], READ_TIMEOUT)
    if blind:
        raise _not_shared(blind, home, world // per_node)


def _finds(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _blind_nodes(store: dist.Store, first_ranks: range) -> list[str]:
    """The nodes that do not see the folder, in words; asked of the first rank of each."""
    blind = []
    for node, rank in enumerate(first_ranks):
        try:
            sees, where = json.loads(store.get(_answer(rank)))
        except dist.DistStoreError:
            raise RuntimeError(
                f"node {node} (ranks from {rank}) did not say whether it sees the run directory"
            ) from None
        if not sees:
            blind.append(f"node {node} ({where})")
    return blind


def _not_shared(blind: list[str], home: str, nodes: int) -> PlanError:
    return refuse(
        "cluster.nodes",
        f"is {nodes}, but {', '.join(blind[:8])}{' and others' if len(blind) > 8 else ''} "
        f"{'does' if len(blind) == 1 else 'do'} not see the run directory of node 0 ({home}); "
        f"legal: a folder that all nodes mount, such as one on NFS or Lustre",
    )


def _where(folder: Path) -> str:
    return f"{socket.gethostname()}:{folder}"


def _answer(rank: int) -> str:
    return f"folder/{rank}"


def _read_by(rank: int) -> str:
    return f"folder/read/{rank}"
