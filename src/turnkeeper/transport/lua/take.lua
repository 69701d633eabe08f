-- Hand out entries. OWN: consumer, count, lease in milliseconds, reason where a lease ended, reason where the limit is reached,
-- milliseconds for which a consumer that is gone is remembered, and how many entries that were left the call has from other shards.
-- Reply: milliseconds until the next entry is due or -1, the last wake-up, whether the group was gone, ids that were lost, how many
-- others were lost, for each delivery id, key, body, attempt, fence, published, and how many that were left the call has now.

local consumer, count, lease = ARGV[OWN], tonumber(ARGV[OWN + 1]), tonumber(ARGV[OWN + 2])
local LEASE_ENDED, LIMIT_REACHED = ARGV[OWN + 3], ARGV[OWN + 4]
local FORGET_AFTER = tonumber(ARGV[OWN + 5])
local SWEEP_EVERY, TIDY_EVERY = 30000, 600000
local suspects = tonumber(ARGV[OWN + 6])
local handed, lost, others, group_gone = {}, {}, 0, 0

local again = false -- something became ready behind our look

-- The pending list says the same for people and their tools; what counts is `held`.
local function hold(entry, sid, held, ends)
  redis.call('XCLAIM', STREAM, GROUP, consumer, 0, sid, 'RETRYCOUNT', digits(held.a), 'FORCE', 'JUSTID')
  held.s, held.c, held.h = sid, consumer, entry.h
  redis.call('HSET', HELD, entry.id, cjson.encode(held))
  redis.call('ZADD', LEASES, digits(ends), entry.id)
end

local function hand(entry, sid, attempts, fence)
  if entry.l == '1' then
    if suspects > 0 then
      -- One of those is enough for a call: this one stays free, and comes first in the next.
      hold(entry, sid, {f = fence, a = attempts, r = true, l = '1'}, 0)
      again = true
      return
    end
    suspects = suspects + 1
  end
  hold(entry, sid, {f = fence + 1, a = attempts + 1}, now + lease)
  handed[#handed + 1] = {entry.id, entry.key, entry.body, attempts + 1, fence + 1, entry.at}
end

-- An entry whose consumer is gone: ready once more, behind the others, or dead.
local function left(entry, sid, attempts, fence, holder)
  entry.h = failed(entry.h, attempts, holder, LEASE_ENDED)
  entry.n, entry.f, entry.l = attempts, fence, '1'
  if attempts >= limit then
    bury(entry, sid, LIMIT_REACHED)
  else
    drop(entry.id, sid)
    enter(entry)
  end
end

local function miss(id, sid)
  drop(id, sid)
  lost[#lost + 1] = id
end

local summary = redis.pcall('XPENDING', STREAM, GROUP)
if summary.err then
  if not string.find(summary.err, 'NOGROUP', 1, true) then
    return summary
  end
  -- From the beginning: the stream holds nothing but what was not acknowledged, and `held` knows what is in somebody's hands.
  redis.call('XGROUP', 'CREATE', STREAM, GROUP, 0, 'MKSTREAM')
  group_gone = 1 - redis.call('HSET', META, 'group', 1)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', DELAYED, '-inf', digits(now), 'LIMIT', 0, 200)) do
  local packed = redis.call('HGET', PARKED, id)
  redis.call('ZREM', DELAYED, id)
  redis.call('HDEL', PARKED, id)
  if packed then
    enter(cmsgpack.unpack(packed))
  else
    lost[#lost + 1] = id
  end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', digits(now), 'LIMIT', 0, 100)) do
  local raw = redis.call('HGET', HELD, id)
  local held = raw and cjson.decode(raw)
  local entry = held and in_stream(held.s)
  if not held then
    redis.call('ZREM', LEASES, id) -- if it is in the stream still, it is a stray, below
  elseif not entry then
    miss(id, held.s)
  elseif held.r then
    if #handed < count then
      entry.h, entry.l = held.h, held.l
      hand(entry, held.s, held.a, held.f)
    end
  else
    entry.h = held.h
    left(entry, held.s, held.a, held.f, held.c)
  end
end

while #handed < count do
  local want = count - #handed
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', want, 'STREAMS', STREAM, '>')
  local read = reply and reply[1][2] or {}
  local fresh = 0
  for _, pair in ipairs(read) do
    local sid, entry = pair[1], parsed(pair[2])
    local raw = entry.id and redis.call('HGET', HELD, entry.id)
    if not (entry.id and entry.key and entry.body and entry.at and entry.n and entry.f and entry.h) then
      local text = {}
      for index = 1, #pair[2], 2 do
        text[#text + 1] = pair[2][index] .. '=' .. pair[2][index + 1]
      end
      local body = table.concat(text, '\n')
      bury({id = sid .. '-' .. shard, key = '', body = body, at = '0', n = 0, f = 0, h = '[]'}, sid, 'no entry of this queue')
    elseif raw then
      -- The group was made anew, and somebody holds this one: it stays theirs.
      local held = cjson.decode(raw)
      held.s = sid
      redis.call('XCLAIM', STREAM, GROUP, held.c, 0, sid, 'RETRYCOUNT', digits(held.a), 'JUSTID')
      redis.call('HSET', HELD, entry.id, cjson.encode(held))
    else
      fresh = fresh + 1
      if entry.n >= limit then
        bury(entry, sid, LIMIT_REACHED)
      else
        hand(entry, sid, entry.n, entry.f)
      end
    end
  end
  local waiting = redis.call('HINCRBY', META, 'waiting', digits(0 - fresh))
  if #read < want then
    if waiting ~= 0 then
      -- What others read by hand is in the pending list, and not lost.
      local by_hand = math.max(0, redis.call('XPENDING', STREAM, GROUP)[1] - redis.call('HLEN', HELD))
      others = math.max(0, waiting - by_hand)
      redis.call('HSET', META, 'waiting', 0)
    end
    break
  end
end

-- Strays are in the pending list, and nobody of ours holds them: read by hand, or `held` is lost.
if #handed == 0 or now - tonumber(redis.call('HGET', META, 'swept') or 0) > SWEEP_EVERY then
  redis.call('HSET', META, 'swept', digits(now))
  local known = nil
  for _, pending in ipairs(redis.call('XPENDING', STREAM, GROUP, 'IDLE', digits(lease), '-', '+', 100)) do
    local sid, holder, times = pending[1], pending[2], pending[4]
    local entry = in_stream(sid)
    if entry and entry.id and redis.call('HEXISTS', HELD, entry.id) == 0 then
      left(entry, sid, math.max(entry.n, times), entry.f + times, holder)
      again = true
    elseif not entry then
      if not known then
        known = {}
        for _, raw in ipairs(redis.call('HVALS', HELD)) do
          known[cjson.decode(raw).s] = true
        end
      end
      if not known[sid] then
        redis.call('XACK', STREAM, GROUP, sid)
        lost[#lost + 1] = sid
      end
    end
  end
end

-- Every process is a consumer of its own, and the group would remember all there ever were. One that comes again is made anew.
if now - tonumber(redis.call('HGET', META, 'tidied') or 0) > TIDY_EVERY then
  redis.call('HSET', META, 'tidied', digits(now))
  for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', STREAM, GROUP)) do
    local found = {}
    for index = 1, #fields, 2 do
      found[fields[index]] = fields[index + 1]
    end
    if found.pending == 0 and found.idle >= FORGET_AFTER then
      redis.call('XGROUP', 'DELCONSUMER', STREAM, GROUP, found.name)
    end
  end
end

local due = nil
for _, key in ipairs({LEASES, DELAYED}) do
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first[1] and (not due or tonumber(first[2]) < due) then
    due = tonumber(first[2])
  end
end
if again then
  due = now
end
local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)
local seen = last[1] and last[1][1] or '0-0'
return {due and math.max(0, due - now) or -1, seen, group_gone, lost, others, handed, suspects}
