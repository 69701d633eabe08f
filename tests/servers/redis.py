"""Redis servers of the tests' own: alone, with replicas, or a cluster; on free loopback ports, in temporary folders."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest
import redis

PATIENCE: Final = 30.0
"""Seconds until a server that does not come up, or a cluster that does not agree, fails the test."""
NODES: Final = 3

_PLAIN: Final = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "no",
    "loglevel": "warning",
    "repl-diskless-sync-delay": "0",
}


def required() -> None:
    """Skip the test where redis-server is missing; in CI that is a failure, as CI has to have it."""
    if shutil.which("redis-server") is None:
        missing = "redis-server is not installed (Debian: apt-get install redis-server)"
        if "CI" in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Look again and again until it holds; fails after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain until {what}"
        time.sleep(0.01)


def free_port() -> int:
    """A port that nobody listens on, nor on the one 10,000 above it, which nodes of a cluster talk on."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            try:
                bus.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class RedisServer:
    """A server. Everything in it is the tests'."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.encrypted_port = 0
        self._settings = _PLAIN | settings
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None

    def start(self) -> None:
        """Start, and wait until it takes commands."""
        # Redis 6.2 takes each word of a setting as an argument of its own.
        arguments = [text for name, value in self._settings.items() for text in (f"--{name}", *(value.split() or [""]))]
        self._run(["redis-server", "--port", str(self.port), "--dir", str(self.folder), *arguments])

    def as_sentinel(self, configuration: Path) -> None:
        """Start it as a sentinel, which keeps what it learns in its configuration."""
        self._run(["redis-server", str(configuration), "--port", str(self.port), "--sentinel"])

    def _run(self, program: list[str]) -> None:
        with (self.folder / f"log {self.port}").open("ab") as log:
            self._process = subprocess.Popen(program, stdout=log, stderr=log, preexec_fn=_end_with_parent)
        wait_until(self._answers, "redis-server answers")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / f"log {self.port}").read_text()
        try:
            return self.run("PING") is True
        except redis.ResponseError:  # asks for a password, say
            return True
        except redis.ConnectionError:
            return False

    def kill(self) -> None:
        """Kill it, as a crash of its process would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it, if it runs. What it keeps is lost with the folder."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None

    def pause(self) -> None:
        """Let it do nothing, until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def listen_encrypted(self) -> None:
        """Listen under TLS too, on `encrypted_port`."""
        self.encrypted_port = free_port()
        self.run("CONFIG", "SET", "tls-port", self.encrypted_port)

    @property
    def client(self) -> redis.Redis:
        """A client to look into it, and to set it up."""
        if self._client is None:
            self._client = redis.Redis(port=self.port, protocol=2, socket_timeout=PATIENCE)
        return self._client

    def run(self, *command: str | int | bytes) -> Any:
        """One command, and its plain reply."""
        return cast("Any", self.client).execute_command(*command)

    def raw(self, *command: str) -> bytes:
        """One command on a connection of its own, and its reply as it comes: a text, or a line."""
        with (
            socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection,
            connection.makefile("rb") as lines,
        ):
            connection.sendall(" ".join(command).encode() + b"\r\n")
            first = lines.readline().rstrip()
            return lines.read(int(first[1:])) if first.startswith(b"$") else first

    def info(self, section: str) -> dict[str, Any]:
        """A section of what it tells about itself."""
        return self.run("INFO", section)

    def flush(self) -> None:
        """Empty it."""
        self.run("FLUSHALL")

    def url(self, query: str = "", *, database: int = 0) -> str:
        """The URL of a store on it."""
        return f"redis://127.0.0.1:{self.port}/{database}{'?' * bool(query)}{query}"


class RedisCluster:
    """Masters that share the slots in equal parts."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes

    def url(self, query: str = "") -> str:
        """The URL of a store on it."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}{'?' * bool(query)}{query}"

    def flush(self) -> None:
        """Empty every node."""
        for node in self.nodes:
            node.flush()

    def ids(self) -> list[str]:
        """The nodes' ids, in order."""
        return [cast("bytes", node.run("CLUSTER", "MYID")).decode() for node in self.nodes]

    def slot(self, key: str) -> int:
        """The slot of a key."""
        return int(self.nodes[0].run("CLUSTER", "KEYSLOT", key))

    def holder(self, slot: int) -> int:
        """The number of the node that has a slot, as the first node knows it."""
        for first, last, (_, port, *_rest), *_ in self.nodes[0].run("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(number for number, node in enumerate(self.nodes) if node.port == port)
        raise AssertionError(f"nobody has slot {slot}")

    def agrees(self) -> bool:
        """Whether all nodes see all slots served."""
        states = [node.raw("CLUSTER", "INFO") for node in self.nodes]
        return all(b"cluster_state:ok" in s and b"cluster_known_nodes:%d" % len(self.nodes) in s for s in states)

    def move(self, slot: int, target: int, *, before_keys: Callable[[], None] | None = None) -> None:
        """Move a slot to another node, key by key, as resharding does; `before_keys` is called while it is half done."""
        source = self.holder(slot)
        ids = self.ids()
        there, here = self.nodes[target], self.nodes[source]
        there.run("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        here.run("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        if before_keys is not None:
            before_keys()
        while keys := here.run("CLUSTER", "GETKEYSINSLOT", slot, 100):
            here.run("MIGRATE", "127.0.0.1", there.port, "", 0, 5000, "KEYS", *keys)
        for node in (there, here, *self.nodes):
            node.run("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def form(self) -> None:
        """Share out the slots, introduce the nodes, and wait until they agree."""
        share = -(-16384 // len(self.nodes))
        for number, node in enumerate(self.nodes):
            node.run("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            slots = range(number * share, min((number + 1) * share, 16384))
            node.run("CLUSTER", "ADDSLOTS", *slots)
            node.run("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        wait_until(self.agrees, "the cluster's nodes agree")


@contextmanager
def scratch() -> Generator[Path]:
    """A folder for a server."""
    folder = Path(tempfile.mkdtemp(prefix="turnkeeper-redis-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def server(**settings: str) -> Generator[RedisServer]:
    """A server that is started, and stopped at the end."""
    required()
    with scratch() as folder:
        made = RedisServer(folder, **settings)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@contextmanager
def cluster(*, node_timeout_ms: int = 15_000, **settings: str) -> Generator[RedisCluster]:
    """A cluster that is up, and stopped at the end. A node that says nothing for `node_timeout_ms` counts as away."""
    with ExitStack() as stack:
        settings |= {"cluster-enabled": "yes", "cluster-node-timeout": str(node_timeout_ms)}
        made = RedisCluster([stack.enter_context(server(**settings)) for _ in range(NODES)])
        made.form()
        yield made


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The server that the tests share; started by the first test that asks for it."""
    with server(appendonly="yes", appendfsync="always") as made:
        yield made


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """The cluster that the tests share; started by the first test that asks for it. Its slots stay where they are."""
    with cluster() as made:
        yield made


class Monitor:
    """Every command that a server executes while it is entered, with what its scripts call."""

    def __init__(self, watched: RedisServer) -> None:
        self._watched = watched
        self._socket = socket.create_connection(("127.0.0.1", watched.port), PATIENCE)
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Monitor:
        self._socket.sendall(b"MONITOR\r\n")
        assert self._lines.readline() == b"+OK\r\n"
        return self

    def __exit__(self, *exc: object) -> None:
        self._lines.close()
        self._socket.close()

    def seen(self) -> list[tuple[bool, list[bytes]]]:
        """What was executed since the last look: whether a script did it, and the command with its arguments."""
        marker = f"marker {time.monotonic_ns()}"
        self._watched.run("ECHO", marker)
        found: list[tuple[bool, list[bytes]]] = []
        while True:
            line = self._lines.readline()
            words = [ast.literal_eval("b" + word.decode("latin-1")) for word in _WORD.findall(line)]
            if words == [b"ECHO", marker.encode()]:
                return found
            found.append((b" lua]" in line.partition(b'"')[0], words))


_WORD: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
