-- Put an entry in the queue; its id. OWN: key, body, delay in milliseconds.

local number = redis.call('HINCRBY', META, 'made', 1)
-- Ids sort by time; they are not given twice where the counter is lost, as time goes on.
local id = string.format('%013.0f-%08.0f-%s', now, number % 100000000, shard)
local entry = {id = id, key = ARGV[OWN], body = ARGV[OWN + 1], at = digits(now), n = 0, f = 0, h = '[]'}
local delay = tonumber(ARGV[OWN + 2])
if delay > 0 then
  park(entry, delay)
else
  enter(entry)
end
return id
