"""A PostgreSQL server of the tests' own: on a free loopback port, in a temporary folder, as a user without rights."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import psycopg
import pytest
from psycopg import sql

PATIENCE: Final = 30.0
"""Seconds until a server that does not start, or does not stop, fails the test."""
PASSWORD: Final = "p@ss#w/rd:%41"
"""Of the role `locked`, which is the only one that needs one."""

_FAST: Final = {
    # Only a crash of the machine loses what was not synced; the tests kill servers, not machines.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "max_wal_senders": "4",
    "autovacuum": "off",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "fatal",
}
_ACCESS: Final = """
host all locked 127.0.0.1/32 scram-sha-256
host all stranger 127.0.0.1/32 reject
host all all 127.0.0.1/32 trust
host replication all 127.0.0.1/32 trust
"""


def programs() -> Path | None:
    """The folder of PostgreSQL's server programs, the newest if there are several; None if there are none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def required(what: str, there: bool) -> None:
    """Skip the test where a program is missing; in CI that is a failure, as CI has to have it."""
    if not there:
        missing = f"{what} is not installed (Debian: apt-get install postgresql pgbouncer)"
        if "CI" in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def owner() -> tuple[int, int]:
    """User and group that run the servers: not root, whom they refuse."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    user = pwd.getpwnam("postgres")
    return user.pw_uid, user.pw_gid


def start(arguments: Sequence[str | Path], output: IO[bytes], folder: Path) -> subprocess.Popen[bytes]:
    """Start a program as `owner`; it ends with the tests, however those end."""

    def run() -> subprocess.Popen[bytes]:
        if os.geteuid() != 0:
            return subprocess.Popen(arguments, stdout=output, stderr=output, cwd=folder, preexec_fn=_end_with_parent)
        user, group = owner()
        return subprocess.Popen(
            arguments,
            stdout=output,
            stderr=output,
            cwd=folder,
            user=user,
            group=group,
            extra_groups=[],
            preexec_fn=_end_with_parent,
        )

    # To the system the parent is a thread: one that is there until the tests end.
    return _PARENT.submit(run).result()


_PARENT: Final = ThreadPoolExecutor(1)
_LIBC: Final = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG


@contextmanager
def scratch(name: str) -> Generator[Path]:
    """A folder that an unprivileged server may use; pytest's own are the tests' user's alone."""
    folder = Path(tempfile.mkdtemp(prefix=f"turnkeeper-{name}-"))
    try:
        os.chown(folder, *owner())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """A server. Its databases and everything in them are the tests'."""

    def __init__(self, folder: Path, bin_: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self._bin = bin_
        self._settings = {**_FAST, **settings, "port": str(self.port)}
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = iter(range(1_000_000))

    def initialise(self) -> None:
        """Make an empty cluster."""
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        self.write("pg_hba.conf", _ACCESS)

    def copy(self, primary: Server) -> None:
        """Make a replica of another server, which follows it once it is started."""
        self._run("pg_basebackup", "-D", str(self.data), "-R", "-c", "fast", "-d", primary.url("postgres"))

    @property
    def data(self) -> Path:
        """Where the cluster is."""
        return self.folder / "data"

    def write(self, name: str, text: str) -> None:
        """Write a file of the cluster, as its owner."""
        path = self.data / name
        path.write_text(text)
        os.chown(path, self.data.stat().st_uid, self.data.stat().st_gid)

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        options = [argument for name, value in self._settings.items() for argument in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = process = start([self._bin / "postgres", "-D", self.data, *options], log, self.folder)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
            except psycopg.OperationalError as e:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self.folder / "log").read_text()) from e
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop: SIGQUIT like a crash, SIGINT in good order with every session cut."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None

    def url(self, database: str, user: str = "postgres", **options: str | float) -> str:
        """The URL of a database."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}{'?' if query else ''}{query}"

    def run(
        self, statement: str, parameters: Sequence[Any] = (), *, database: str = "postgres"
    ) -> list[tuple[Any, ...]]:
        """Run one statement in a session of its own, and give its rows. Waits for no lock longer than ten seconds."""
        with psycopg.connect(self.url(database), autocommit=True, options="-c lock_timeout=10s") as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description is not None else []

    def database(self, settings: str = "") -> str:
        """A new, empty database; its name."""
        name = f"test_{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name} TEMPLATE template0")
        if settings:
            self.run(f"ALTER DATABASE {name} {settings}")
        return name

    def drop(self, database: str) -> None:
        """Drop a database, with whoever is still connected to it."""
        self.run(f"DROP DATABASE {database} WITH (FORCE)")

    def wipe(self, database: str) -> None:
        """Make a database as empty as a new one, in less time; whoever is still connected to it is cut off."""
        self.run(f"ALTER DATABASE {database} RESET ALL")
        self.run("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [database])
        schemas = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"
        for (name,) in self.run(schemas, database=database):
            self.run(f'DROP SCHEMA "{name}" CASCADE', database=database)
        self.run("CREATE SCHEMA public", database=database)

    def _run(self, program: str, *arguments: str) -> None:
        with (self.folder / "log").open("ab") as log:
            done = start([self._bin / program, *arguments], log, self.folder).wait(PATIENCE)
        assert done == 0, (self.folder / "log").read_text()


@contextmanager
def server(**settings: str) -> Generator[Server]:
    """An empty cluster in a folder of its own, not started; stopped at the end."""
    found = programs()
    required("PostgreSQL", found is not None)
    assert found is not None
    with scratch("postgres") as folder:
        made = Server(folder, found, settings)
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The server that the tests share; started by the first test that asks for it."""
    with server() as made:
        made.initialise()
        made.start()
        yield made


@pytest.fixture(scope="session")
def _store_database(postgres: Server) -> str:
    """The database of the `store` fixture, which is emptied between the tests: faster than a new one for each."""
    return postgres.database()


@pytest.fixture
def postgres_database(postgres: Server, _store_database: str) -> Iterator[str]:
    """A database for one store, empty but perhaps for the store's own schema."""
    yield _store_database
    empty(postgres, _store_database)


def empty(server_: Server, database: str, schema: str = "turnkeeper") -> None:
    """Empty a store's tables, and drop what the test made beside them.

    Fails where a transaction was left open on one of them: that would be a leak of the test before.
    """
    with psycopg.connect(server_.url(database), autocommit=True, options="-c lock_timeout=5s") as connection:
        names = {name: sql.Identifier(schema, name) for name in ("head", "record", "meta", "queue_entry")}
        connection.execute(sql.SQL("TRUNCATE {head}, {record}, {queue_entry}").format(**names))
        connection.execute(sql.SQL("UPDATE {meta} SET value = 0 WHERE name = 'clock_offset_ms'").format(**names))
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
