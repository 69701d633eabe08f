-- Hand out entries. OWN: consumer, count, lease in milliseconds, reason where a lease ended, reason where the limit is reached.
-- Reply: milliseconds until the next entry is due or -1, the last wake-up, whether the group was gone, ids that were lost, how many
-- others were lost, and for each delivery: id, key, body, attempt, fence, published.

local consumer, count, lease = ARGV[OWN], tonumber(ARGV[OWN + 1]), tonumber(ARGV[OWN + 2])
local LEASE_ENDED, LIMIT_REACHED = ARGV[OWN + 3], ARGV[OWN + 4]
local SWEEP_EVERY = 30000
local handed, lost, others, group_gone, suspects = {}, {}, 0, 0, 0

local function hand(entry, sid, attempt, fence)
  -- The pending list says the same for people and their tools; what counts is `held`.
  redis.call('XCLAIM', STREAM, GROUP, consumer, 0, sid, 'RETRYCOUNT', digits(attempt), 'FORCE', 'JUSTID')
  redis.call('HSET', HELD, entry.id, cjson.encode({f = fence, a = attempt, s = sid, c = consumer, h = entry.h}))
  redis.call('ZADD', LEASES, digits(now + lease), entry.id)
  handed[#handed + 1] = {entry.id, entry.key, entry.body, attempt, fence, entry.at}
end

-- An entry whose consumer is gone: once more, or dead.
local function left(entry, sid, attempt, fence, holder)
  entry.h = failed(entry.h, attempt, holder, LEASE_ENDED)
  entry.n, entry.f = attempt, fence
  if attempt >= limit then
    bury(entry, sid, LIMIT_REACHED)
  else
    suspects = suspects + 1
    hand(entry, sid, attempt + 1, fence + 1)
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
  if #handed == count then
    break
  end
  local raw = redis.call('HGET', HELD, id)
  local held = raw and cjson.decode(raw)
  local entry = held and in_stream(held.s)
  if not held then
    redis.call('ZREM', LEASES, id) -- if it is in the stream still, it is a stray, below
  elseif not entry then
    miss(id, held.s)
  elseif held.r then
    entry.h = held.h
    hand(entry, held.s, held.a + 1, held.f + 1)
  elseif suspects == 0 then
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
        hand(entry, sid, entry.n + 1, entry.f + 1)
      end
    end
  end
  local waiting = redis.call('HINCRBY', META, 'waiting', digits(0 - fresh))
  if #read < want then
    if waiting ~= 0 then
      others = math.max(0, waiting)
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
      if suspects == 0 and #handed < count then
        left(entry, sid, math.max(entry.n, times), entry.f + times, holder)
      end
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

local due = nil
for _, key in ipairs({LEASES, DELAYED}) do
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first[1] and (not due or tonumber(first[2]) < due) then
    due = tonumber(first[2])
  end
end
local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)
local seen = last[1] and last[1][1] or '0-0'
return {due and math.max(0, due - now) or -1, seen, group_gone, lost, others, handed}
