-- The last step, all of it or nothing: acknowledge, record the last stage of the lifecycle, leave the active index (journal.md T4).
-- KEYS: the queue's, then lifecycle and active index. OWN: id, fence, trace, stage, ttl_ms. 2 where the stage may not follow.

local STAGE, ACTIVE = KEYS[10], KEYS[11]
local held, refusal = held_by()
if not held then
  return refusal
end
local stage = ARGV[OWN + 3]
local found = redis.call('HGET', STAGE, 'stage') or ''
local ended = found == 'COMPLETED' or found == 'FAILED' or found == 'QUARANTINED'
if found ~= stage then
  if ended or (stage == 'COMPLETED' and found ~= 'DELIVERED') then
    return 2
  end
  redis.call('HSET', STAGE, 'stage', stage, 'at', digits(now))
end
redis.call('PEXPIRE', STAGE, ARGV[OWN + 4])
redis.call('ZREM', ACTIVE, ARGV[OWN + 2])
drop(ARGV[OWN], held.s)
return DONE
