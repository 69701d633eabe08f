-- What the scripts of a log share; stands in front of each of them. KEYS[1] is the log's hash, the only key that any touches.
--
-- Fields of the hash: tk (schema version), life, tail, compacted, skew, kind, phase, attention, owner, labels, ttl_ms,
-- keep_until, size, created, updated; and one field a record, named by its sequence: "<at>:<body>".
-- A reply starts with what it is:
--   1 done, ...   2 tail, now, life, tail, restart, from, bodies...   3 guard failed, now
--   4 foreign     5 newer version, found                              6 rolled back, tail

local VERSION = 1
local PART = 1000 -- arguments of one call: Lua's stack holds some thousand
local GIVEN = {'phase', 'attention', 'owner', 'labels', 'ttl_ms', 'keep_until'} -- by the writer, with each append
local key = KEYS[1]

-- Lua's own tostring makes 1e+15 of a large number.
local function digits(number)
  return string.format('%.0f', number)
end

-- Two results: the log, or the reply that refuses to touch what is there.
local function look(offset)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000) + offset
  local found = redis.call('HMGET', key, 'tk', 'life', 'tail', 'compacted', 'skew', 'size', 'updated', unpack(GIVEN))
  if not found[1] then
    if redis.call('EXISTS', key) == 1 then
      return nil, {4}
    end
    return {now = now, life = '', tail = 0, compacted = 0, skew = 0, size = 0, found = found}
  end
  local version = tonumber(found[1])
  if not version or not found[2] or not tonumber(found[3]) then
    return nil, {4}
  end
  if version > VERSION then
    return nil, {5, version}
  end
  local log = {
    life = found[2],
    tail = tonumber(found[3]),
    compacted = tonumber(found[4]),
    skew = tonumber(found[5]),
    size = tonumber(found[6]),
    now = now + tonumber(found[5]),
    found = found, -- the fields of GIVEN from 8 on
  }
  local behind = tonumber(found[7]) - log.now
  if behind > 0 then
    -- The server's clock was set back, or another server took over whose clock is slower: the log's goes on from where it
    -- stands (LOG-3). A server that takes no writes says so when there is something to write.
    log.now = log.now + behind
    log.skew = log.skew + behind
    redis.pcall('HSET', key, 'skew', digits(log.skew))
  end
  return log
end

-- Every record behind a position (LOG-2), or the whole log where it does not continue that position.
local function tail_behind(log, life, seq)
  local restart = life ~= log.life or seq < log.compacted
  local from = seq
  if restart then
    from = log.compacted
  end
  local reply = {2, log.now, log.life, log.tail, restart and 1 or 0, from}
  for first = from + 1, log.tail, PART do
    local fields = {}
    for record = first, math.min(first + PART - 1, log.tail) do
      fields[#fields + 1] = digits(record)
    end
    local bodies = redis.call('HMGET', key, unpack(fields))
    for index = 1, #fields do
      reply[#reply + 1] = bodies[index]
    end
  end
  return reply
end

-- Appends that were confirmed are gone, by a failover or a restored copy: whoever knew them must not go on from here.
local function rolled_back(log, life, seq)
  return life == log.life and seq > log.tail
end

-- Write fields and values, in parts; the last part holds what makes the others count.
local function write(fields)
  for first = 1, #fields, 2 * PART do
    redis.call('HSET', key, unpack(fields, first, math.min(first + 2 * PART - 1, #fields)))
  end
end

-- A log that expires is kept at least until `keep_until`; one that does not has no time to live (LOG-9).
local function retain(log, offset, ttl, keep_until)
  if ttl ~= '0' then
    local expires = math.max(log.now + ttl, tonumber(keep_until)) - offset
    redis.call('PEXPIREAT', key, digits(math.min(expires, 9007199254740991)))
  elseif log.found[12] ~= '0' then
    redis.call('PERSIST', key)
  end
end
