-- Records behind a position, the tail, and the time. See `Store.read`.
-- ARGV: life, seq, offset, confirm. With `confirm` 1 a field is written as it is, so that a WAIT behind this script covers
-- every append before it.

local life, seq = ARGV[1], tonumber(ARGV[2])
local log, refusal = look(tonumber(ARGV[3]))
if refusal then
  return refusal
end
if rolled_back(log, life, seq) then
  return {6, log.tail}
end
if ARGV[4] == '1' and log.tail > 0 then
  redis.call('HSET', key, 'tk', VERSION)
end
return tail_behind(log, life, seq)
