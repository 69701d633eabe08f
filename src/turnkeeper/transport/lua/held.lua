-- For scripts that settle; behind queue.lua. Who holds a delivery: a table, or nil and the reply. OWN: id, fence.

local GONE, REFUSED, DONE = -1, 0, 1

local function held_by()
  local raw = redis.call('HGET', HELD, ARGV[OWN])
  if not raw then
    return nil, GONE
  end
  local held = cjson.decode(raw)
  local ends = redis.call('ZSCORE', LEASES, ARGV[OWN])
  if held.f ~= tonumber(ARGV[OWN + 1]) or not ends or tonumber(ends) <= now then
    return nil, REFUSED
  end
  -- Somebody may have claimed it by hand: then nobody settles it from under them.
  local pending = redis.pcall('XPENDING', STREAM, GROUP, held.s, held.s, 1)
  if pending[1] and pending[1][2] ~= held.c then
    return nil, REFUSED
  end
  return held
end
