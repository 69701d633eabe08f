-- Record a stage of a trace's lifecycle behind its predecessor. KEYS[1] is the trace's lifecycle hash, the only key touched.
-- ARGV: predecessor or empty, stage, ttl_ms. 1 if the stage is recorded now or was before, else 0. Safe to repeat.

local found = redis.call('HGET', KEYS[1], 'stage') or ''
if found == ARGV[2] then
  return 1
end
if found ~= ARGV[1] then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'stage', ARGV[2], 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
