-- Make a route the state of its endpoint, whole, unless a later generation of the same incarnation stands there.
-- This is the one place where a route changes, and so where queued entries move with it.
--
-- KEYS  route:{endpoint}, endpoints
-- ARGV  endpoint, incarnation, generation, then field and value of the whole route
-- reply 1 if it is the state now, 0 if it is older
local incarnation, generation = unpack(redis.call('HMGET', KEYS[1], 'incarnation', 'generation'))
if incarnation == ARGV[2] and tonumber(generation) > tonumber(ARGV[3]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'generation', ARGV[3], unpack(ARGV, 4))
redis.call('SADD', KEYS[2], ARGV[1])
return 1
