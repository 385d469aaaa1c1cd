-- Nobody waits for a request any more: take it out of the queue where it is now, or tell the slots that may be running
-- it. Without its body no slot will start it, however it is handed on meanwhile.
--
-- KEYS  req:{id} (where the request is stands there)
-- ARGV  id
-- reply 1 if it never started, 0 if the slots were told or it was over
local lane, entry_id = unpack(redis.call('HMGET', KEYS[1], 'lane', 'entry_id'))
if not lane then return 0 end
redis.call('UNLINK', KEYS[1])
local delivered = redis.pcall('XPENDING', 'q:' .. lane, 'slots', entry_id, entry_id, 1)
if (delivered.err or #delivered == 0) and redis.call('XDEL', 'q:' .. lane, entry_id) == 1 then return 1 end
redis.call('XADD', 'ctl:' .. lane, 'MAXLEN', '~', 1000, '*', 'id', ARGV[1])
return 0
