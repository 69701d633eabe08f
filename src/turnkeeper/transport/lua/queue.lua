-- What the scripts of a queue share; stands in front of each of them. All keys of a script have the tag of one shard, so they lie
-- in one slot.
--
-- stream    entries that are ready or held: id, key, body, at (published), n (attempts), f (fence), h (history, JSON), l (1: was
--           left by its consumer)
-- leases    held entries by the end of their lease; 0 for what is free again
-- held      of each held entry, as JSON: f, a (attempt), s (its id in the stream), c (consumer), h (history), r (is free again), l
-- delayed   entries by the time at which they become ready
-- parked    the delayed entries themselves
-- dead      dead letters, in the order of their ids
-- letters   the dead letters themselves
-- meta      made: entries so far; waiting: in the stream and not read yet; group: was there; swept: when strays were looked for;
--           tidied: when consumers that are gone were
-- wake      a stream of one entry, which changes when there is a reason to look
--
-- ARGV: offset of the test clock, attempts at the most, failures remembered, shard, then the script's own from OWN on.

local STREAM, LEASES, HELD, DELAYED, PARKED, DEAD, LETTERS, META, WAKE = unpack(KEYS)
local GROUP = 'workers'
local OWN = 5
local limit, remembered, shard = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])

-- Lua's own tostring makes 1e+15 of a large number.
local function digits(number)
  return string.format('%.0f', number)
end

local function wake()
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', 1)
end

-- An entry is a table: id, key, body, at, n, f, h, as in the stream.
local function enter(entry)
  redis.call('XADD', STREAM, '*', 'id', entry.id, 'key', entry.key, 'body', entry.body, 'at', entry.at,
    'n', digits(entry.n), 'f', digits(entry.f), 'h', entry.h, 'l', entry.l or '0')
  redis.call('HINCRBY', META, 'waiting', 1)
  wake()
end

local function park(entry, delay)
  redis.call('HSET', PARKED, entry.id, cmsgpack.pack(entry))
  redis.call('ZADD', DELAYED, digits(now + delay), entry.id)
  wake()
end

-- An entry from the stream, by its id there; nil where it is not in it.
local function parsed(fields)
  local entry = {}
  for index = 1, #fields, 2 do
    entry[fields[index]] = fields[index + 1]
  end
  entry.n, entry.f = tonumber(entry.n), tonumber(entry.f)
  return entry
end

local function in_stream(sid)
  local found = redis.call('XRANGE', STREAM, sid, sid)
  return found[1] and parsed(found[1][2])
end

-- Take an entry out of the stream, and out of its holder's hands.
local function drop(id, sid)
  redis.call('XACK', STREAM, GROUP, sid)
  redis.call('XDEL', STREAM, sid)
  redis.call('ZREM', LEASES, id)
  redis.call('HDEL', HELD, id)
end

local function failed(history, attempt, consumer, reason)
  local list = cjson.decode(history)
  list[#list + 1] = {at = now, attempt = attempt, consumer = consumer, reason = reason}
  while #list > remembered do
    table.remove(list, 1)
  end
  return cjson.encode(list)
end

local function bury(entry, sid, reason)
  entry.reason, entry.died = reason, digits(now)
  redis.call('HSET', LETTERS, entry.id, cmsgpack.pack(entry))
  redis.call('ZADD', DEAD, 0, entry.id)
  drop(entry.id, sid)
end
