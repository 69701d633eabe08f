-- Put a log there as it was in another store. See `RestoringStore.restore`.
-- ARGV: life, tail, compacted, offset, kind, size, created, updated, phase, attention, owner, labels, ttl_ms, keep_until (see
-- append.lua), then sequence, time and body of each record.

local FIRST = 15
local log, refusal = look(tonumber(ARGV[4]))
if refusal then
  return refusal
end
if log.life ~= '' then
  return {1, 0}
end
local fields = {}
local function set(name, value)
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
for index = FIRST, #ARGV, 3 do
  set(ARGV[index], ARGV[index + 1] .. ':' .. ARGV[index + 2])
end
set('tk', VERSION)
set('life', ARGV[1])
set('compacted', ARGV[3])
set('skew', '0')
set('kind', ARGV[5])
set('size', ARGV[6])
set('created', ARGV[7])
set('updated', ARGV[8])
for index, name in ipairs(GIVEN) do
  set(name, ARGV[8 + index])
end
set('tail', ARGV[2])
write(fields)
log.now = math.max(log.now, tonumber(ARGV[8]))
retain(log, tonumber(ARGV[4]), ARGV[13], ARGV[14])
return {1, 1}
