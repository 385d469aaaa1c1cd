-- Hand entries that this consumer still owns to the live lane, as if they had never been delivered here.
--
-- KEYS  q:{endpoint}:{version}, route:{endpoint}
-- ARGV  consumer, endpoint, then entry id and earlier attempts of each
-- reply how many were moved
local live = redis.call('HGET', KEYS[2], 'live')
local num_moved = 0
for i = 3, #ARGV, 2 do
  if live and owns(KEYS[1], ARGV[1], ARGV[i]) then
    local found = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
    redis.call('XACK', KEYS[1], 'slots', ARGV[i])
    if found and move(KEYS[1], ARGV[2] .. ':' .. live, ARGV[i], found[2], ARGV[i + 1]) then
      num_moved = num_moved + 1
    end
  end
end
return num_moved
