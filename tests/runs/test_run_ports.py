"""The port that a run chooses for its ranks is still free when rank 0 listens on it, seconds
later.
"""

import socket
from pathlib import Path

import pytest

from workbench.interop.export import LOOPBACK
from workbench.runs.launch import rendezvous_ports


def test_a_chosen_port_is_none_that_an_outgoing_connection_takes() -> None:
    lowest, highest = map(int, rendezvous_ports.RANGE.read_text().split())
    assert all(not lowest <= rendezvous_ports.free_port() <= highest for _ in range(50))


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous_ports, "LOWEST", port)
        monkeypatch.setattr(rendezvous_ports, "RANGE", tmp_path / "range")
        rendezvous_ports.RANGE.write_text(f"{port + 2}\t65535\n")
        assert all(rendezvous_ports.free_port() != port for _ in range(5))


def test_where_the_system_gives_every_port_unasked_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rendezvous_ports, "RANGE", tmp_path / "range")
    rendezvous_ports.RANGE.write_text(f"{rendezvous_ports.LOWEST} 65535")
    with socket.socket() as own:
        own.bind((LOOPBACK, rendezvous_ports.free_port()))
