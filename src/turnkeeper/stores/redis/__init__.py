"""Logs in Redis, Redis Cluster or Valkey: one hash a log, one script a mutation. Needs the extra `turnkeeper[redis]`."""

from turnkeeper.stores.redis.lifecycle import RedisLifecycle
from turnkeeper.stores.redis.store import RedisStore

__all__ = ["RedisLifecycle", "RedisStore", "from_client"]

from_client = RedisStore.from_client
