-- End entries that this consumer still owns: acknowledge them, delete them and their bodies, note the pace.
-- What another slot has taken over is left alone, so that a late end cannot take the entry from under it.
--
-- KEYS  q:{endpoint}:{version}, ended:{endpoint}:{version}
-- ARGV  consumer, then entry id and id of each
-- reply how many were ended
local num_ended = 0
for i = 2, #ARGV, 2 do
  if owns(KEYS[1], ARGV[1], ARGV[i]) then
    redis.call('XACK', KEYS[1], 'slots', ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
    redis.call('UNLINK', 'req:' .. ARGV[i + 1])
    redis.call('XADD', KEYS[2], 'MAXLEN', 64, '*', 'id', ARGV[i + 1])
    num_ended = num_ended + 1
  end
end
return num_ended
