-- Revive a dead letter, or forget it. OWN: id, revive or discard. 1 if it was dead.

local id = ARGV[OWN]
local packed = redis.call('HGET', LETTERS, id)
if not packed then
  redis.call('ZREM', DEAD, id)
  return 0
end
if ARGV[OWN + 1] == 'revive' then
  local entry = cmsgpack.unpack(packed)
  entry.n, entry.l = 0, nil
  enter(entry)
end
redis.call('ZREM', DEAD, id)
redis.call('HDEL', LETTERS, id)
return 1
