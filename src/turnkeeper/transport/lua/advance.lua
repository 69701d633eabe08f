-- Record a stage of a trace's lifecycle behind its predecessor, and with the first one enter the trace in the active index.
-- KEYS: lifecycle, active index. ARGV: trace, predecessor or empty, stage, ttl_ms. 1 if it is recorded now or was before, else 0.

local found = redis.call('HGET', KEYS[1], 'stage') or ''
if found == ARGV[3] then
  return 1
end
if found ~= ARGV[2] then
  return 0
end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], 'stage', ARGV[3], 'at', now)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if ARGV[2] == '' then
  redis.call('ZADD', KEYS[2], 'NX', now, ARGV[1])
end
return 1
