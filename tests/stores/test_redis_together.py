"""Several real processes on one Redis (LOG-2, LOG-5), and connections under TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from tests.conformance.support import append, contend, whole
from tests.conformance.tally import adding, tally_log
from tests.crew import crew
from tests.servers.redis import RedisCluster, RedisServer, server
from turnkeeper.errors import StoreUnavailable
from turnkeeper.stores.redis import RedisStore

PROCESSES = 4


@pytest.fixture(params=["one server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """A server, and a cluster, empty."""
    servers: RedisServer | RedisCluster = request.getfixturevalue(
        "redis_server" if request.param == "one server" else "redis_cluster"
    )
    servers.flush()
    return servers.url()


async def _append_many(number: int, url: str, count: int) -> list[tuple[int, bytes]]:
    """Append `count` records to the one key, whatever the others do; what was accepted, by sequence."""
    async with await RedisStore.open(url) as store:
        return await contend(store, "contended", str(number), count)


def test_contended_appends(url: str) -> None:
    """LOG-2, LOG-5: four processes append to one key: every accepted append has a sequence of its own; none is lost."""
    count = 50
    accepted = sorted(pair for pairs in crew(PROCESSES, _append_many, url, count) for pair in pairs)
    assert [seq for seq, _ in accepted] == list(range(1, PROCESSES * count + 1))

    async def look() -> list[tuple[int, bytes]]:
        async with await RedisStore.open(url) as store:
            return await whole(store, "contended")

    assert anyio.run(look) == accepted


async def _tally(number: int, url: str, tasks: int, count: int) -> int:
    async with await RedisStore.open(url) as store:
        log = tally_log(store)

        async def work(task: int) -> None:
            for entry in range(count):
                await log.ask(adding(1, f"{number}:{task}:{entry}"))

        async with anyio.create_task_group() as group:
            for task in range(tasks):
                group.start_soon(work, task)
        return log.appends


def test_a_log_shared_by_processes_and_tasks(url: str) -> None:
    """LOG-2: four processes with three tasks each put 120 different questions: each is in once, and folded alike by all."""
    assert crew(PROCESSES, _tally, url, 3, 10) == [30] * PROCESSES

    async def look() -> tuple[int, int]:
        async with await RedisStore.open(url) as store:
            state = await tally_log(store).read()
            return state.total, len(set(state.by))

    assert anyio.run(look) == (120, 120)


# --- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[RedisServer, Path]]:
    """A server that also listens under TLS, with a certificate of its own, and that certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1")
    extra = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate)
    subprocess.run([*request, *extra], check=True, capture_output=True)
    plain = {"tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-ca-cert-file": str(certificate)}
    with server(**plain, **{"tls-auth-clients": "no"}) as made:
        made.listen_encrypted()
        yield made, certificate


@pytest.mark.anyio
async def test_connections_under_tls(encrypted: tuple[RedisServer, Path]) -> None:
    """`rediss://` verifies the server's certificate; one that is not trusted is a typed error that says so."""
    made, certificate = encrypted
    url = f"rediss://127.0.0.1:{made.encrypted_port}"
    async with await RedisStore.open(f"{url}?ssl_ca_certs={certificate}") as store:
        position = await append(store, "k", b"x" * 3_000_000)
        await append(store, "k", b"2", expected=position)
        assert [len(body) for _, body in await whole(store, "k")] == [3_000_000, 1]
    with pytest.raises(StoreUnavailable, match="certificate") as raised:
        await RedisStore.open(url)
    assert raised.value.applied is False
