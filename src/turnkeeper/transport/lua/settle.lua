-- Settle a delivery. OWN: id, fence, what, milliseconds of the lease or delay, reason. Reply: see held.lua.

local held, refusal = held_by()
if not held then
  return refusal
end
local id, what, length, reason = ARGV[OWN], ARGV[OWN + 2], tonumber(ARGV[OWN + 3]), ARGV[OWN + 4]

if what == 'acknowledge' then
  drop(id, held.s)
  return DONE
elseif what == 'extend' then
  redis.call('ZADD', LEASES, digits(now + length), id)
  -- It looks as fresh as it is to who reclaims by idle time. Where the group is gone, who takes next makes it anew.
  redis.pcall('XCLAIM', STREAM, GROUP, held.c, 0, held.s, 'RETRYCOUNT', digits(held.a), 'JUSTID')
  return DONE
elseif what == 'release' and length == 0 then
  held.a, held.r = held.a - 1, true
  redis.call('HSET', HELD, id, cjson.encode(held))
  redis.call('ZADD', LEASES, 0, id)
  wake()
  return DONE
end

local entry = in_stream(held.s)
if not entry then
  drop(id, held.s)
  return GONE
end
entry.n, entry.f, entry.h, entry.l = held.a, held.f, held.h, nil
if what == 'release' then
  entry.n = held.a - 1
  drop(id, held.s)
  park(entry, length)
  return DONE
end
entry.h = failed(held.h, held.a, held.c, reason)
if what == 'kill' or held.a >= limit then
  bury(entry, held.s, reason)
else
  drop(id, held.s)
  if length > 0 then
    park(entry, length)
  else
    enter(entry)
  end
end
return DONE
