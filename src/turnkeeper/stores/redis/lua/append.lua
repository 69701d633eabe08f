-- One append: compare, judge the guard, write, set the retention. See `Store.append`.
-- ARGV: life, seq, offset, not_before, not_after, compact_through, life if new, kind, phase, attention, owner, labels, ttl_ms,
-- keep_until, bodies... Attention, owner and labels are JSON, so that null is none.

local FIRST = 15
local life, seq, offset = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local log, refusal = look(offset)
if refusal then
  return refusal
end
if rolled_back(log, life, seq) then
  return {6, log.tail}
end
if life ~= log.life or seq ~= log.tail then
  return tail_behind(log, life, seq)
end
if (ARGV[4] ~= '' and log.now < tonumber(ARGV[4])) or (ARGV[5] ~= '' and log.now > tonumber(ARGV[5])) then
  return {3, log.now}
end

local at = digits(log.now)
local size = log.size
local fields = {}
local count = 0
for index = FIRST, #ARGV do
  local body = ARGV[index]
  count = count + 1
  fields[2 * count - 1] = digits(seq + count)
  fields[2 * count] = at .. ':' .. body
  size = size + #body
end
local last = 2 * count
local function set(name, value)
  fields[last + 1], fields[last + 2] = name, value
  last = last + 2
end
if life == '' then
  set('tk', VERSION)
  set('life', ARGV[7])
  set('skew', '0')
  set('kind', ARGV[8])
  set('created', at)
  set('compacted', ARGV[6])
end
local found = log.found
for index = 1, 6 do
  if ARGV[8 + index] ~= found[7 + index] then
    set(GIVEN[index], ARGV[8 + index])
  end
end
local dropped = nil
if ARGV[6] ~= '0' and tonumber(ARGV[6]) > log.compacted then
  dropped = tonumber(ARGV[6])
  set('compacted', ARGV[6])
end
set('size', digits(size))
set('updated', at)
set('tail', digits(seq + count))
-- The first write of all: it is the one that a server without memory refuses, with nothing changed.
write(fields)
if dropped then
  for first = log.compacted + 1, dropped, PART do
    local names = {}
    for record = first, math.min(first + PART - 1, dropped) do
      names[#names + 1] = digits(record)
    end
    redis.call('HDEL', key, unpack(names))
  end
end
retain(log, offset, ARGV[13], ARGV[14])
return {1, log.now}
