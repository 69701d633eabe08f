"""Where a PostgreSQL store is: its URL taken apart into what is libpq's, what is ours, and what may be shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from turnkeeper.errors import UnknownStoreUrl

SCHEMA: Final = "turnkeeper"
"""The schema of a store whose URL names none."""

_SCHEMA_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_DEFAULTS: Final = {
    "fallback_application_name": "turnkeeper",
    # A server that is gone without a word is noticed within half a minute, and not after the system's two hours.
    "connect_timeout": 5,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class Address(NamedTuple):
    """A store's place, and how it is used."""

    conninfo: str
    """For libpq; may hold a password, so it is never shown."""
    where: str
    """For people: hosts, database and schema."""
    schema: str = SCHEMA
    pool_size: int = 4
    """Connections of one event loop at the most; as many again for transactional tools while they run."""
    busy_timeout: float = 5.0
    """Seconds to wait for a connection, or for who holds a log, before `StoreBusy`."""
    pooler: bool | None = None
    """Whether a transaction pooler (PgBouncer, say) is in between; None to find out."""

    @property
    def patience_ms(self) -> int:
        """The busy timeout in milliseconds, one at the least: to PostgreSQL, 0 means for ever."""
        return max(1, round(self.busy_timeout * 1000))


def _schema(value: str) -> str:
    if not _SCHEMA_NAME.fullmatch(value) or value.startswith("pg_"):
        raise ValueError(value)
    return value


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(value)
    return number


def _seconds(value: str) -> float:
    number = float(value)
    if not 0 < number < 1_000_000:
        raise ValueError(value)
    return number


_OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "schema": (_schema, "lower case letters, digits and _, at most 63"),
    "pool_size": (_positive, "a number from 1"),
    "busy_timeout": (_seconds, "seconds, more than 0"),
    "pooler": ({"0": False, "1": True}.__getitem__, "0 or 1"),
}


def parse(url: str) -> Address:
    """The address that a `postgresql://` or `postgres://` URL names.

    Options of ours are `schema`, `pool_size`, `busy_timeout` and `pooler`; libpq's (`sslmode`, `application_name`, …) are
    handed on. What libpq takes from the environment (`PGPASSWORD`, a service or password file) counts as usual.

    Raises:
        UnknownStoreUrl: it is not such a URL, or an option is not known. The URL is not repeated: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _not_a_url() from None
    # A special character that was not encoded cuts the URL in the wrong place: half a password becomes a host or a database.
    if parts.scheme not in ("postgresql", "postgres") or parts.fragment or "@" in parts.path:
        raise _not_a_url()
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()} | {"ssl"}
    ours: dict[str, Any] = {}
    theirs: list[tuple[str, str]] = []
    for name, value in options:
        if name in _OPTIONS:
            convert, form = _OPTIONS[name]
            try:
                ours[name] = convert(value)
            except (KeyError, ValueError):
                raise UnknownStoreUrl(f"{name}={value} is not possible: {form}") from None
        elif name in known:
            theirs.append((name, value))
        else:
            raise UnknownStoreUrl(f"the option {name} is not known; known: {', '.join(_OPTIONS)}, and libpq's")
    try:
        parameters = conninfo_to_dict(urlunsplit(parts._replace(query=urlencode(theirs))))
    except psycopg.ProgrammingError:
        raise _not_a_url() from None
    conninfo = make_conninfo("", **{**_DEFAULTS, **parameters, "client_encoding": "utf8"})
    return Address(conninfo, _shown(parameters, ours.get("schema", SCHEMA)), **ours)


def _not_a_url() -> UnknownStoreUrl:
    return UnknownStoreUrl(
        "this is not a PostgreSQL URL: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, and special characters of user "
        "and password percent-encoded (@ as %40, # as %23, / as %2F)"
    )


def _shown(parameters: dict[str, Any], schema: str) -> str:
    host = parameters.get("host") or parameters.get("hostaddr") or "(default host)"
    port = parameters.get("port")
    database = parameters.get("dbname") or "(default database)"
    return f"postgresql {host}{f':{port}' if port else ''}/{database} schema {schema}"
