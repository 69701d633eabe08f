-- Ready, delayed, in flight, dead.

local in_flight = redis.call('ZCOUNT', LEASES, '(' .. digits(now), '+inf')
local delayed = redis.call('ZCOUNT', DELAYED, '(' .. digits(now), '+inf')
local due = redis.call('ZCARD', DELAYED) - delayed
local ready = math.max(0, redis.call('XLEN', STREAM) - in_flight)
return {ready + due, delayed, in_flight, redis.call('ZCARD', DEAD)}
