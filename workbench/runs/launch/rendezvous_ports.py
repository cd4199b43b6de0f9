"""Ports of the loopback address on which the ranks of a run meet."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from workbench.errors import PlanError, Problem
from workbench.interop import export

LOWEST = 10_000
"""Below lie ports that services are known by."""
PROBES = 100
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses now, and that the system gives to nobody
    unasked.

    Rank 0 listens seconds later: a port of the range from which every outgoing connection of the
    machine takes one may be gone by then.
    """
    lowest, highest = _given_unasked()
    ports = [port for port in range(LOWEST, 65536) if not lowest <= port <= highest]
    tried = random.SystemRandom().sample(ports, min(PROBES, len(ports)))
    return next((port for port in tried if not _unusable(port)), 0) or _any_port()


def port_problem(port: int) -> Problem | None:
    """Why ranks cannot meet on `port`; None where they can."""
    if not 1024 <= port <= 65535:
        return Problem("port", f"port = {port} is outside 1024..65535")
    if reason := _unusable(port):
        return Problem(
            "port",
            f"port = {port} {reason}; leave it out and a free one is chosen (now {free_port()})",
        )
    return None


def checked_port(port: int | None) -> int:
    """`port` if ranks can meet there, or a free one. Raises `PlanError`."""
    if port is None:
        return free_port()
    problem = port_problem(port)
    if problem:
        raise PlanError([problem])
    return port


def _unusable(port: int) -> str:
    """Why nobody can listen on `port` of the loopback address; empty where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((export.LOOPBACK, port))
        except OSError as error:
            return (
                "is in use"
                if error.errno == errno.EADDRINUSE
                else f"cannot be used: {error.strerror}"
            )
    return ""


def _given_unasked() -> tuple[int, int]:
    """First and last port that the system chooses from for whoever names none."""
    try:
        lowest, highest = map(int, RANGE.read_text().split())
    except (OSError, ValueError):
        return 32768, 65535
    return lowest, highest


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind((export.LOOPBACK, 0))
        return int(probe.getsockname()[1])
