-- Drop a log, if it ends where the caller says. See `Store.erase`.
-- ARGV: tail, or empty for any; the test clock's offset.

local log, refusal = look(tonumber(ARGV[2]))
if refusal then
  return refusal
end
if log.life == '' or (ARGV[1] ~= '' and tonumber(ARGV[1]) ~= log.tail) then
  return {1, 0}
end
redis.call('UNLINK', key)
return {1, 1}
