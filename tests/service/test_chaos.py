"""A service of real processes, killed and started again at random: every acknowledged message is answered once, in order."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.servers.postgres import server as postgres_of
from tests.servers.redis import cluster as cluster_of
from tests.servers.redis import server as redis_of
from tests.service.app import LEDGER
from tests.service.ledger import Ledger

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE: Final = 90.0
"""Seconds for what is left once the killing has ended."""


class Process:
    """A part of the service, started again whenever it is killed."""

    talks = False
    """Whether it is talked to through its pipes."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self.starts = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        self.starts += 1
        with self._log.open("a") as log:
            self._before = log.tell()
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE if self.talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.talks else subprocess.DEVNULL,
                stderr=log,
                text=True,
                bufsize=1,
            )

    def kill(self, how: signal.Signals) -> None:
        """Kill it (or tell it to stop), and start the next one at once."""
        old = self.process
        old.send_signal(how)
        if how is signal.SIGKILL:
            self._gone(old)
        self.process = self._start()
        if how is not signal.SIGKILL:
            self._gone(old)

    def _gone(self, process: subprocess.Popen[str]) -> int:
        """Its exit status, once it is gone."""
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        return process.wait(timeout=60)

    def end(self) -> int:
        """Tell it to stop; its exit status."""
        began = time.monotonic()
        while "takes from" not in self._log.read_text()[self._before :] and not self.talks:
            # Before it listens to signals it ends by them at once; nothing is in its hands yet.
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.05)
        self.process.send_signal(signal.SIGTERM)
        return self._gone(self.process)


class FrontEnd(Process):
    """A front end, and what it has acknowledged."""

    talks = True

    def __init__(self, environment: dict[str, str], log: Path, acknowledged: Callable[[str], None]) -> None:
        self._acknowledged = acknowledged
        super().__init__([sys.executable, "-m", "tests.service.front"], environment, log)

    def _start(self) -> subprocess.Popen[str]:
        started = super()._start()
        self._listener = threading.Thread(target=self._listen, args=(started,), daemon=True)
        self._listener.start()
        return started

    def _gone(self, process: subprocess.Popen[str]) -> int:
        status = super()._gone(process)
        if process is self.process:
            self._listener.join()
        return status

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if not line.startswith("!"):
                    self._acknowledged(line.strip())

    def take(self, conversation: str, event: str, text: str) -> None:
        """Hand it a message; whether it gets it, only its acknowledgement tells."""
        assert self.process.stdin is not None
        with suppress(ValueError, OSError):  # it was killed just now: the message comes again
            self.process.stdin.write(json.dumps([conversation, event, text]) + "\n")


class World:
    """The whole of it: workers, front ends, a platform that delivers again what was not acknowledged."""

    def __init__(
        self, url: str, folder: Path, *, conversations: int, workers: int, fronts: int, chance: random.Random
    ) -> None:
        self.chance = chance
        self.ledger = Ledger(folder / "ledger.db")
        environment = {**os.environ, "TURNKEEPER_STORE": url, LEDGER: str(folder / "ledger.db")}
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, str]] = {}
        self.numbers: Counter[str] = Counter()
        self.conversations = [f"chat:{number}" for number in range(conversations)]
        main = "from turnkeeper.cli.app import main; main()"
        worker = [sys.executable, "-c", main, "worker", "tests.service.app:service"]
        worker += ["--concurrency", "8", "--lease", "3s", "--sweep", "2s", "--drain", "5s"]
        self.workers = [Process(worker, environment, folder / f"worker-{number}.log") for number in range(workers)]
        self.fronts = [
            FrontEnd(environment, folder / f"front-{number}.log", self._acknowledged) for number in range(fronts)
        ]

    def _acknowledged(self, event: str) -> None:
        with self._lock:
            self._open.pop(event, None)

    @property
    def unacknowledged(self) -> int:
        """Messages that the platform still has to deliver."""
        with self._lock:
            return len(self._open)

    def say(self) -> None:
        """Somebody says the next thing in a conversation, once what he said before is acknowledged: so order is defined."""
        with self._lock:
            waiting = {conversation for conversation, _ in self._open.values()}
        conversation = self.chance.choice(self.conversations)
        if conversation in waiting:
            return
        self.numbers[conversation] += 1
        number = self.numbers[conversation]
        event = f"{conversation}-{number}"
        with self._lock:
            self._open[event] = (conversation, str(number))
        self.deliver(event)

    def deliver(self, event: str) -> None:
        """Deliver it to one front end, and now and then to two at once."""
        with self._lock:
            found = self._open.get(event)
        if found is not None:
            for front in self.chance.sample(self.fronts, 2 if self.chance.random() < 0.2 else 1):
                front.take(found[0], event, found[1])

    def redeliver(self) -> None:
        """Deliver everything again that was not acknowledged."""
        with self._lock:
            events = list(self._open)
        for event in events:
            self.deliver(event)

    def kill_something(self, more: list[Callable[[], None]]) -> str:
        """Kill or stop one part at random."""
        parts: list[Any] = [*self.workers, *self.fronts, *more]
        part = self.chance.choice(parts)
        if not isinstance(part, Process):
            part()
            return "server"
        part.kill(self.chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        return "worker" if part in self.workers else "front end"

    def run(
        self, seconds: float, *, a_second: float, kill_every: float, more: list[Callable[[], None]]
    ) -> Counter[str]:
        """Talk and kill for so long; what was killed."""
        killed: Counter[str] = Counter()
        began = time.monotonic()
        next_kill, next_redelivery = began + kill_every, began + 1.0
        while (now := time.monotonic()) < began + seconds:
            self.say()
            if now >= next_kill:
                killed[self.kill_something(more)] += 1
                next_kill = time.monotonic() + self.chance.uniform(0.5, 1.5) * kill_every
            if now >= next_redelivery:
                self.redeliver()
                next_redelivery = now + 1.0
            time.sleep(1 / a_second)
        return killed

    def settle(self) -> None:
        """Wait until everything that was said is answered."""
        began = time.monotonic()
        while self.unacknowledged or self.ledger.sent() < self.numbers.total():
            if time.monotonic() - began > PATIENCE:
                pytest.fail(
                    f"{self.unacknowledged} not acknowledged, {self.ledger.sent()} of {self.numbers.total()} answered"
                )
            self.redeliver()
            time.sleep(0.25)

    def check(self) -> None:
        """Every message was answered once, in order, and had its effect once."""
        effects = Counter(self.ledger.effects())
        assert {key: times for key, times in effects.items() if times > 1} == {}
        for conversation, number in self.numbers.items():
            expected = [f"{n} counted" for n in range(1, number + 1)]
            assert self.ledger.texts()[conversation] == expected
            assert all(effects[conversation, n] == 1 for n in range(1, number + 1))

    def end(self) -> list[int]:
        """Stop all workers; their exit statuses."""
        for front in self.fronts:
            front.end()
        return [worker.end() for worker in self.workers]


@contextmanager
def place(name: str, folder: Path, chance: random.Random) -> Generator[tuple[str, list[Callable[[], None]]]]:
    """A store of its own: its URL, and what else may be killed."""
    with ExitStack() as stack:
        if name == "sqlite":
            yield f"sqlite:///{folder}/t.db", []
        elif name == "postgres":
            database = stack.enter_context(postgres_of())
            database.initialise()
            database.start()

            def crash() -> None:
                database.stop(signal.SIGQUIT)
                database.start()

            yield database.url(database.database()), [crash]
        else:
            if name == "redis cluster":
                cluster = stack.enter_context(cluster_of(appendonly="yes", appendfsync="always"))
                url, nodes = cluster.url(), cluster.nodes
            else:
                nodes = [stack.enter_context(redis_of(appendonly="yes", appendfsync="always"))]
                url = nodes[0].url()

            def restart() -> None:
                node = chance.choice(nodes)
                node.kill()
                node.start()

            yield url, [restart]


def chaos(
    name: str,
    folder: Path,
    *,
    seconds: float,
    conversations: int,
    a_second: float,
    kill_every: float,
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with place(name, folder, chance) as (url, more):
        world = World(url, folder, conversations=conversations, workers=3, fronts=2, chance=chance)
        try:
            killed = world.run(seconds, a_second=a_second, kill_every=kill_every, more=more)
            world.settle()
            world.check()
        finally:
            statuses = world.end()
        print(f"{name}: {world.numbers.total()} messages in {len(world.numbers)} conversations, killed {dict(killed)}")
        assert statuses == [0, 0, 0]
        assert killed.total() > 2


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["redis cluster", "sqlite", "postgres", pytest.param("redis", marks=pytest.mark.soak)])
def test_killed_and_restarted(name: str, tmp_path: Path) -> None:
    """J1 to J4, O1, R1: ten seconds on each store, where every part dies, the servers of the store too."""
    chaos(name, tmp_path, seconds=10, conversations=500, a_second=25, kill_every=1.5)


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", ["sqlite", "redis", "redis cluster", "postgres"])
def test_killed_and_restarted_for_five_minutes(name: str, tmp_path: Path) -> None:
    """The same for as long as issue E asks."""
    chaos(name, tmp_path, seconds=300, conversations=500, a_second=25, kill_every=2.0)
