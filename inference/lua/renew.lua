-- Renew a slot's lease, its readiness and its report in one step, unless another slot took its entries over.
-- A lease that ran out while nobody claimed (an outage of this server) is simply taken again.
--
-- KEYS  slot:{consumer}, fenced:{consumer}, slots, ready:{endpoint}:{version} or "" while it holds none
-- ARGV  slot, lease in ms, report, "1" if it is ready
-- reply {the server's clock in microseconds, or 0 if the lease is lost; 1 if the lease stood until now}
if redis.call('EXISTS', KEYS[2]) == 1 then return {0, 0} end
local stood = redis.call('EXISTS', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('HSET', KEYS[3], ARGV[1], string.format('%.0f', now) .. ' ' .. ARGV[3])
if KEYS[4] ~= '' then
  if ARGV[4] == '1' then
    redis.call('ZADD', KEYS[4], string.format('%.0f', now + ARGV[2]), ARGV[1])
    redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', string.format('%.0f', now))
    redis.call('PEXPIRE', KEYS[4], ARGV[2])
  else
    redis.call('ZREM', KEYS[4], ARGV[1])
  end
end
return {time[1] * 1000000 + time[2], stood}
