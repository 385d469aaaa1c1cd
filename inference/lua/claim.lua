-- Take over entries of consumers whose lease has ended. A consumer that lost an entry is fenced: should its process
-- wake up, it must not renew under that name, because its entries now run elsewhere.
--
-- Being delivered to a slot that dies counts as an attempt. So an entry on its last one comes alone, or one that
-- crashes the slot again would use up the last attempt of those that were only waiting beside it.
--
-- A lane that is no longer routed leaves its entries to the live version (rescue.lua), if a slot holds that ready.
--
-- KEYS  q:{endpoint}:{version}, route:{endpoint}
-- ARGV  claiming consumer, most entries to take, last attempt, seconds a fence stands, endpoint, version
-- reply {{entry id, attempt, {field, value, ...}}, ...}
local queue, me, room, last_attempt = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local claimed = {}

local live = redis.call('HGET', KEYS[2], 'live')
if live and not is_routed(KEYS[2], ARGV[6]) and is_ready(ARGV[5], live) then return claimed end

local function claim(entry_id, num_delivered)
  local found = redis.call('XRANGE', queue, entry_id, entry_id)[1]
  if not found then
    redis.call('XACK', queue, 'slots', entry_id) -- deleted meanwhile
    return
  end
  local attempt = attempts_of(found[2], num_delivered + 1)
  if attempt ~= last_attempt or #claimed == 0 then
    redis.call('XCLAIM', queue, 'slots', me, 0, entry_id)
    claimed[#claimed + 1] = {entry_id, attempt, found[2]}
  end
end

for _, consumer in ipairs(consumers_of(queue)) do
  if consumer.name ~= me and not has_lease(consumer.name) then
    if consumer.pending == 0 then
      redis.call('XGROUP', 'DELCONSUMER', queue, 'slots', consumer.name)
    elseif #claimed < room then
      redis.call('SET', 'fenced:' .. consumer.name, '1', 'EX', ARGV[4])
      for _, row in ipairs(redis.call('XPENDING', queue, 'slots', '-', '+', room - #claimed, consumer.name)) do
        claim(row[1], row[4])
        if #claimed == 1 and claimed[1][2] == last_attempt then return claimed end
      end
    end
  end
end
return claimed
