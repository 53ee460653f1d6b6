"""Eight rank processes that live as long as the test session.

Importing torch and Megatron takes seconds of CPU time, so one server process imports them and forks the workers. A test
names a job, a function `job(start, **arguments)` of some module; it runs on as many workers as the topology needs, and
`start(config)` gives it a Rank that has been set up.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from megagent.config import Config

WORKERS = 8


class JobFailed(Exception):
    """A job raised, died or did not end in time."""


class RankPool:
    """run() gives each worker's result. After a failure the workers are killed; the next run starts new ones."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._count = workers
        self._server: Any = None
        self._workers: list[Connection] = []
        self._pids: list[int] = []

    def run(
        self, job: Callable[..., Any], world: int, *, seconds: float = 300.0, starts: int = 4, **arguments: Any
    ) -> list[Any]:
        """Run a job on the first `world` workers; their results by rank.

        job: a function at the top level of a module, job(start, **arguments); seconds: its deadline, generous because
        the machine may be busy; starts: how often it may call start(). Raises JobFailed with the first worker's
        traceback, who died, or who was late.
        """
        self._ensure_started()
        ports = free_ports(starts)
        for rank in range(world):
            self._workers[rank].send((job.__module__, job.__name__, rank, world, ports, arguments))
        try:
            return self._collect(world, seconds, job.__name__)
        except JobFailed:
            # The others may wait in a collective that the failed one will never join.
            self.close()
            raise

    def _collect(self, world: int, seconds: float, name: str) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(results) < world:
            waiting = {self._workers[rank]: rank for rank in range(world) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobFailed(f"{name}: ranks {sorted(waiting.values())} did not end within {seconds:.0f} s")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    succeeded, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise JobFailed(f"{name}: the process of rank {rank} died") from None
                if not succeeded:
                    raise JobFailed(f"{name}: rank {rank} raised\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(world)]

    def _ensure_started(self) -> None:
        if self._server is not None:
            return
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(self._count)]
        self._server = context.Process(target=_serve, args=([child for _, child in pairs],), name="rank-server")
        self._server.start()
        for _, child in pairs:
            child.close()
        self._workers = [parent for parent, _ in pairs]
        for connection in self._workers:
            if not connection.poll(300):
                self.close()
                raise JobFailed("the worker processes did not start within 300 s")
            self._pids.append(connection.recv())

    def close(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._workers:
            connection.close()
        if self._server is not None:
            self._server.kill()  # it only waits for the workers
            self._server.join()
        self._server, self._workers, self._pids = None, [], []


def _serve(connections: list[Connection]) -> None:
    """The server: import once, fork the workers, and wait for their end."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megagent.parallel import platform

    platform.install("cpu")
    import megagent.parallel.checkpoint
    import megagent.parallel.hf_io
    import megagent.parallel.policy  # noqa: F401

    children = []
    for mine in connections:
        pid = os.fork()
        if pid == 0:
            for other in connections:
                if other is not mine:
                    other.close()
            status = 0
            try:
                _work(mine)
            except (EOFError, KeyboardInterrupt, BrokenPipeError):
                status = 1  # the test session has gone
            os._exit(status)
        children.append(pid)
    for connection in connections:
        connection.close()
    for pid in children:
        os.waitpid(pid, 0)


def _work(connection: Connection) -> None:
    connection.send(os.getpid())
    while True:
        module, name, rank, world, ports, arguments = connection.recv()
        try:
            job = getattr(importlib.import_module(module), name)
            result = (True, _run(job, rank, world, ports, arguments))
        except Exception:
            result = (False, traceback.format_exc())
        connection.send(result)


def _run(job: Callable[..., Any], rank: int, world: int, ports: list[int], arguments: dict[str, Any]) -> Any:
    from megagent.parallel.rank import Rank

    started: list[Rank] = []

    def start(config: Config, task: Any = "rl") -> Rank:
        for earlier in started:
            earlier.close()
        started.append(Rank(config, rank, world, "127.0.0.1", ports[len(started)], task))
        started[-1].setup()
        return started[-1]

    try:
        return job(start, **arguments)
    finally:
        for each in started:
            each.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to connections (which Gloo makes by the dozen):
    a job may come to use the last of its ports long after they were found free."""
    probes: list[socket.socket] = []
    try:
        while len(probes) < count:
            probe = socket.socket()
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(15000, 32000)))
            except OSError:
                probe.close()
            else:
                probes.append(probe)
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
