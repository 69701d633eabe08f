"""The commands on the server stores: the demo survives its kills, logs move between stores, doctor and migrate tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.command import turnkeeper

if TYPE_CHECKING:
    from tests.servers.postgres import Server
    from tests.servers.redis import RedisCluster, RedisServer


def _url(name: str, request: pytest.FixtureRequest) -> str:
    if name == "postgres":
        server: Server = request.getfixturevalue("postgres")
        return server.url(request.getfixturevalue("postgres_database"))
    if name == "redis cluster":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        cluster.flush()
        return cluster.url()
    redis: RedisServer = request.getfixturevalue("redis_server")
    redis.flush()
    return redis.url()


@pytest.mark.parametrize("name", ["postgres", "redis cluster"])
def test_demo_survives_kills(name: str, request: pytest.FixtureRequest) -> None:
    done = turnkeeper("demo", "--store", _url(name, request), "--kills", "10", "--seed", "3", "--json")
    assert done.status == 0, done.err
    verdict = done.document
    assert (verdict["duplicates"], verdict["lost"], verdict["transcripts_wrong"]) == (0, 0, 0)
    assert verdict["kills"] >= verdict["kills_in_a_turn"] == 10


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["postgres", "redis", "redis cluster"])
def test_demo_survives_200_kills(name: str, request: pytest.FixtureRequest) -> None:
    from tests.conftest import SHARED

    source = SHARED / "data/airline/conversations.jsonl"
    url = _url(name, request)
    done = turnkeeper("demo", "--store", url, "--conversations", source, "--kills", "200", "--json", timeout=890)
    assert done.status == 0, done.err
    assert (done.document["duplicates"], done.document["lost"]) == (0, 0)
    assert done.document["kills_in_a_turn"] == 200


@pytest.mark.parametrize("name", ["postgres", pytest.param("redis", marks=pytest.mark.soak), "redis cluster"])
def test_logs_move_there_and_back(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("moving")
    url = _url(name, request)
    first, second = f"sqlite:///{folder}/first.db", f"sqlite:///{folder}/second.db"
    assert turnkeeper("demo", "--store", first, "--kills", "0", "--json").status == 0
    assert turnkeeper("copy", first, url, "--json").document["copied"] == 23
    assert turnkeeper("copy", url, second, "--json").document["copied"] == 23
    listed = [turnkeeper("list", "--store", where, "--limit", "0", "--json").document for where in (first, url, second)]
    keys = ("turn", "phase", "records", "bytes", "created", "updated")
    shown = [sorted(tuple(turn[key] for key in keys) for turn in turns) for turns in listed]
    assert shown[0] == shown[1] == shown[2]


def test_doctor_tells_what_a_plain_redis_does_not_promise(request: pytest.FixtureRequest) -> None:
    done = turnkeeper("doctor", _url("redis", request), "--json")
    promises = {promise["name"]: promise for promise in done.document}
    assert done.status == (0 if all(promise["holds"] for promise in promises.values()) else 1)
    assert {"durable", "eviction"} <= promises.keys()


def test_migrate(request: pytest.FixtureRequest) -> None:
    url = _url("postgres", request)
    assert turnkeeper("migrate", url, "--json").document["after"] >= 1
    assert "is up to date" in turnkeeper("migrate", url).out
    assert turnkeeper("migrate", "sqlite:///x.db").status == 2
