"""Rendezvous of the ranks: on one node by a TCPStore that listens on the loopback address only.

A TCPStore serves whoever reaches it, without authentication, and torch's listens on all addresses.
On one node rank 0 therefore creates the store on a socket bound to the loopback address. On several
nodes torch's own store is used, and the network must be trusted.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.process_group.shared_folder import LOOK_SECONDS, check_shared_folder
from workbench.interop.export import LOOPBACK, PORT, START_DEADLINE
from workbench.interop.launch_environment import one_node
from workbench.plan.schema import Plan


def join_deadline(plan: Plan) -> timedelta:
    """Longest wait of this rank for the others to start, which on a loaded machine do so one after
    another.
    """
    seconds = os.environ.get(START_DEADLINE) or plan.telemetry.timeout_seconds
    return timedelta(seconds=float(seconds))


def join_store(plan: Plan, deadline: timedelta, run_dir: Path) -> tuple[dist.Store, int, int]:
    """Join the store of this launch, found in the launcher's environment (`env://`).

    Args:
        plan: Says whether the launch is on one node.
        deadline: Timeout of the rendezvous and of the store's operations.
        run_dir: The run directory, which all nodes must see.

    Returns:
        (store, this rank, world size).

    Raises:
        PlanError: On every rank, where a node does not see the run directory.
    """
    if not rank_0_makes_store(plan):
        store, rank, world = next(dist.rendezvous("env://", timeout=deadline))
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        port = int(os.environ.get(PORT) or os.environ["MASTER_PORT"])
        store = loopback_store(port, world, deadline, listens=rank == 0)
    store.set_timeout(deadline)
    store = dist.PrefixStore("default_pg", store)
    if not one_node(plan):
        per_node = max(1, world // (plan.cluster.nodes or 1))
        look = deadline.total_seconds() / 2
        check_shared_folder(run_dir, store, rank, world, per_node, min(LOOK_SECONDS, look))
    return store, rank, world


def rank_0_makes_store(plan: Plan) -> bool:
    """Whether rank 0 creates the store: on one node, unless torchrun has already created one."""
    return one_node(plan) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def loopback_store(port: int, world: int, deadline: timedelta, listens: bool) -> dist.Store:
    """A TCPStore on `port` of the loopback address.

    Args:
        port: The port.
        world: Number of ranks that join.
        deadline: Timeout of its operations.
        listens: Whether this rank serves the store.

    Raises:
        RuntimeError: The port is in use.
    """
    if not listens:
        return dist.TCPStore(LOOPBACK, port, world, False, deadline)
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((LOOPBACK, port))
    except OSError as error:
        bound.close()
        raise RuntimeError(
            f"ranks cannot rendezvous on {LOOPBACK}:{port}: {error.strerror}"
        ) from error
    bound.listen(world)
    listening = bound.detach()  # the store's to close
    return dist.TCPStore(
        LOOPBACK, port, world, True, deadline, wait_for_workers=False, master_listen_fd=listening
    )


def init_cpu_process_group(plan: Plan, run_dir: Path) -> None:
    """Join the process group over gloo; none in a process that no launcher started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        deadline = join_deadline(plan)
        store, rank, world = join_store(plan, deadline, run_dir)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=deadline)


def all_gather_json(item: Any, device: torch.device) -> list[Any]:
    """All-gather plain data as JSON: a pickle from another process could run code.

    Args:
        item: Plain data of this rank.
        device: Where the group's collectives take tensors. Lengths are gathered first, then the
            text, padded to the longest, as bytes.

    Returns:
        Every rank's item, in order of rank.
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
