"""Ranks of one node meet on the loopback address alone, and tell each other nothing that could
run.
"""

import os
import re
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

import workbench
from workbench.engine.process_group import rendezvous
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.launch.rendezvous_ports import free_port

SOON = timedelta(seconds=10)


def listening(port: int | None = None) -> list[str]:
    """Addresses on which this process listens."""
    found = [
        c
        for c in psutil.Process(os.getpid()).net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    return [c.laddr.ip for c in found if port in (None, c.laddr.port)]


def plan(nodes: int = 1) -> ResolvedPlan:
    changes = {"cluster.nodes": nodes} if nodes > 1 else {}
    return Plan.of("tiny", gpu="local", gpus=2, strategy="ddp", set=changes).resolve()


def test_the_store_of_one_node_listens_on_the_loopback_address_alone() -> None:
    port = free_port()
    store = rendezvous.loopback_store(port, 2, SOON, listens=True)
    assert listening(port) == ["127.0.0.1"]
    other = rendezvous.loopback_store(port, 2, SOON, listens=False)
    store.set("key", "value")
    assert other.get("key") == b"value"


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    first = rendezvous.loopback_store(port, 1, SOON, listens=True)
    with pytest.raises(
        RuntimeError, match=rf"cannot rendezvous on 127\.0\.0\.1:{port}: Address already in use"
    ):
        rendezvous.loopback_store(port, 1, SOON, listens=True)
    del first


@pytest.mark.parametrize(
    "nodes, agent, own", [(1, None, True), (1, "False", True), (1, "True", False), (2, None, False)]
)
def test_a_store_that_the_launcher_made_is_taken(
    monkeypatch: pytest.MonkeyPatch, nodes: int, agent: str | None, own: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    made = plan().replace(**{"cluster.nodes": nodes, "cluster.gpus": 2 * nodes})
    assert rendezvous.rank_0_makes_store(made) is own


def test_ranks_gather_plain_data_of_any_length() -> None:
    given = [None, "a word of rank 1 – é", ["step-1/rank00000.safetensors"] * 300]
    for told in run_ranks(
        3, lambda rank: rendezvous.all_gather_json(given[rank], torch.device("cpu"))
    ):
        assert told == given


def test_forked_ranks_listen_on_the_loopback_address_alone() -> None:
    def heard(rank: int) -> list[str]:
        torch.distributed.barrier()
        return listening()

    assert {ip for ips in run_ranks(2, heard) for ip in ips} == {"127.0.0.1"}


def test_no_rank_is_sent_a_pickle() -> None:
    """torch's collectives of objects run whatever a peer sends."""
    for path in Path(workbench.__file__).parent.rglob("*.py"):
        assert not re.search(
            r"(gather|broadcast|scatter|send|recv)_object|pickle\.load", path.read_text()
        ), path
