"""Where the ranks of a run meet: on one node by the loopback address alone, whatever else the
machine is connected to.

A store for rendezvous answers whoever reaches it, without a password. torch's own listens on all
addresses; of one node rank 0 makes it, on a socket that is bound here. On several nodes torch's
stands, for a network that is trusted.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workbench.interop.export import LOOPBACK, PORT, one_node
from workbench.plan.schema import Plan


def meet(plan: Plan, deadline: timedelta) -> tuple[dist.Store, int, int]:
    """The store of this launch, this rank, and the number of ranks, from the launcher's environment
    (`env://`).
    """
    if not own_store(plan):
        store, rank, world = next(dist.rendezvous("env://", timeout=deadline))
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        port = int(os.environ.get(PORT) or os.environ["MASTER_PORT"])
        store = loopback_store(port, world, deadline, listens=rank == 0)
    store.set_timeout(deadline)
    return dist.PrefixStore("default_pg", store), rank, world


def own_store(plan: Plan) -> bool:
    """Whether rank 0 makes the store: on one node, unless the launcher (a torchrun by hand) has
    made one already.
    """
    return one_node(plan) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def loopback_store(port: int, world: int, deadline: timedelta, listens: bool) -> dist.Store:
    """A store on `port` of the loopback address, which the rank that `listens` makes for `world`
    ranks.

    Raises RuntimeError where the port is in use.
    """
    if not listens:
        return dist.TCPStore(LOOPBACK, port, world, False, deadline)
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((LOOPBACK, port))
    except OSError as error:
        bound.close()
        raise RuntimeError(f"ranks cannot meet on {LOOPBACK}:{port}: {error.strerror}") from error
    bound.listen(world)
    listening = bound.detach()  # the store's to close
    return dist.TCPStore(
        LOOPBACK, port, world, True, deadline, wait_for_workers=False, master_listen_fd=listening
    )


def join_cpus(plan: Plan) -> None:
    """Enter the process group over gloo; a process without a launcher is alone, and enters none."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        deadline = timedelta(seconds=plan.telemetry.timeout_seconds)
        store, rank, world = meet(plan, deadline)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=deadline)


def gather(item: Any, device: torch.device) -> list[Any]:
    """What every rank gives, in order of rank, as JSON: what another process sent is never run, as
    a pickle would be.

    `item` is plain data. Lengths go first, then the text in tensors of bytes on `device`.
    """
    text = json.dumps(item).encode()
    lengths = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device))
    sizes = [int(length) for length in torch.cat(lengths).tolist()]
    own = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    parts = [torch.zeros_like(own) for _ in sizes]
    dist.all_gather(parts, own)
    return [json.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes)]
