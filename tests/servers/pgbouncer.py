"""PgBouncer in transaction mode, in front of the tests' PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager

import psycopg

from tests.servers.postgres import PATIENCE, Server, free_port, owner, required, scratch, start


@contextmanager
def pgbouncer(server: Server, *, pool_size: int) -> Generator[int]:
    """A pooler that gives all clients together `pool_size` sessions of the server, one for each transaction; its port."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    required("PgBouncer", program is not None)
    assert program is not None
    port = free_port()
    with scratch("pgbouncer") as folder:
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = user=postgres host=127.0.0.1 port={server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 200\n"
            "server_round_robin = 1\n"
        )
        os.chown(settings, *owner())
        with (folder / "log").open("ab") as log:
            process = start([program, settings], log, folder)
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    psycopg.connect(server.url("postgres").replace(str(server.port), str(port))).close()
                except psycopg.OperationalError as e:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise AssertionError((folder / "log").read_text()) from e
                    time.sleep(0.02)
                else:
                    break
            yield port
        finally:
            process.kill()
            process.wait(PATIENCE)
