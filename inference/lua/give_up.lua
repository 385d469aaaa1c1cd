-- Nobody waits for the half of a copy any longer: delete it, and tell how far it came.
--
-- KEYS  req:{copy id}
-- ARGV  copy id
-- reply "dispatched" where a slot had it, "waiting" where none ever asked for it, "gone"
local lane, entry_id = unpack(redis.call('HMGET', KEYS[1], 'lane', 'entry_id'))
if not lane then return 'gone' end
local held = redis.pcall('XPENDING', 'low:' .. lane, 'slots', entry_id, entry_id, 1)
local was_dispatched = not held.err and #held > 0
delete_copy(lane, entry_id, ARGV[1])
return was_dispatched and 'dispatched' or 'waiting'
