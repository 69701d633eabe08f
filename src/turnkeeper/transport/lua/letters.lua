-- Dead letters behind an id. OWN: id or empty, how many. For each: id, key, body, published, attempts, reason, history, died.

local after = ARGV[OWN] == '' and '-' or '(' .. ARGV[OWN]
local reply = {}
for _, id in ipairs(redis.call('ZRANGEBYLEX', DEAD, after, '+', 'LIMIT', 0, ARGV[OWN + 1])) do
  local packed = redis.call('HGET', LETTERS, id)
  if packed then
    local entry = cmsgpack.unpack(packed)
    reply[#reply + 1] = {id, entry.key, entry.body, entry.at, entry.n, entry.reason, entry.h, entry.died}
  end
end
return reply
