"""Nodes that do not see the run directory of node 0 are named, on every rank, before training."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from workbench.engine.process_group.shared_folder import check_shared_folder
from workbench.errors import PlanError

PER_NODE = 2


def said(folders: Sequence[Path], absent: Sequence[int] = ()) -> list[str]:
    """What each rank says where the ranks of node i see `folders[i]`; "" where it goes on."""
    store, world = dist.HashStore(), PER_NODE * len(folders)
    store.set_timeout(timedelta(seconds=0.5))

    def work(rank: int) -> str:
        if rank in absent:
            return "absent"
        try:
            check_shared_folder(folders[rank // PER_NODE], store, rank, world, PER_NODE, 0.2)
        except (PlanError, RuntimeError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


def test_nodes_that_share_the_folder_go_on(tmp_path: Path) -> None:
    assert said([tmp_path, tmp_path]) == [""] * 4
    assert not list(tmp_path.iterdir())


def test_a_node_with_a_disk_of_its_own_is_named_on_every_rank(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    told = said([tmp_path, own, tmp_path])
    assert len(set(told)) == 1
    assert told[0].startswith("cluster.nodes: is 3, but node 1 (") and f":{own})" in told[0]
    assert f":{tmp_path})" in told[0] and "node 2" not in told[0]
    assert list(tmp_path.iterdir()) == [own]


def test_a_node_that_says_nothing_is_named(tmp_path: Path) -> None:
    assert said([tmp_path, tmp_path], absent=[2])[0].startswith("node 1 (ranks from 2) did not say")
