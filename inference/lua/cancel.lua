-- Nobody waits for a request any more: take it out of the queue, or tell the slots that may be running it.
-- Without its body no slot will start it, however it is handed on meanwhile.
--
-- KEYS  q:{endpoint}:{version}, ctl:{endpoint}:{version}, req:{id}
-- ARGV  entry id, id
-- reply 1 if it never started, 0 if the slots were told
redis.call('UNLINK', KEYS[3])
local delivered = redis.pcall('XPENDING', KEYS[1], 'slots', ARGV[1], ARGV[1], 1)
if (delivered.err or #delivered == 0) and redis.call('XDEL', KEYS[1], ARGV[1]) == 1 then return 1 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'id', ARGV[2])
return 0
