-- Leave entries that this consumer still owns for whoever claims them, with the number of deliveries that count.
--
-- KEYS  q:{endpoint}:{version}
-- ARGV  consumer, the consumer to leave them with, then entry id and deliveries of each
-- reply how many were left
local num_left = 0
for i = 3, #ARGV, 2 do
  if owns(KEYS[1], ARGV[1], ARGV[i]) then
    redis.call('XCLAIM', KEYS[1], 'slots', ARGV[2], 0, ARGV[i], 'RETRYCOUNT', ARGV[i + 1], 'JUSTID')
    num_left = num_left + 1
  end
end
return num_left
