-- Give a slot copies to run, if no request waits in the lane of its version, and tell it which of those that it has are
-- not its own any more: their route changed, or another slot has taken them over.
--
-- A copy of a slot that died is handed on to one that has nothing else to do, alone: it may be what killed it.
--
-- KEYS  q:{endpoint}:{version}, low:{endpoint}:{version}
-- ARGV  consumer, most copies, "1" to take one over from a slot that died, then the entry ids of the copies it has
-- reply {{{entry id, deliveries, {field, value, ...}, body or false}, ...}, {entry id, ...}}
local queue, low, me, count = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local taken, lost = {}, {}

for i = 4, #ARGV do
  if not owns(low, me, ARGV[i]) then lost[#lost + 1] = ARGV[i] end
end

local function give(entry_id, num_delivered, entry)
  local body = redis.call('HGET', 'req:' .. field_of(entry, 'id'), 'body')
  taken[#taken + 1] = {entry_id, num_delivered, entry, body}
end

local function take_over_one()
  for _, consumer in ipairs(consumers_of(low)) do
    if consumer.name ~= me and not has_lease(consumer.name) then
      if consumer.pending == 0 then redis.call('XGROUP', 'DELCONSUMER', low, 'slots', consumer.name) end
      for _, row in ipairs(redis.call('XPENDING', low, 'slots', '-', '+', 1, consumer.name)) do
        local found = redis.call('XRANGE', low, row[1], row[1])[1]
        if found then
          redis.call('XCLAIM', low, 'slots', me, 0, row[1])
          give(row[1], row[4] + 1, found[2])
          return
        end
        redis.call('XACK', low, 'slots', row[1])
      end
    end
  end
end

local function take_new()
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'slots', me, 'COUNT', count, 'STREAMS', low, '>')
  if reply and reply.err then
    redis.call('XGROUP', 'CREATE', low, 'slots', '0')
    reply = redis.call('XREADGROUP', 'GROUP', 'slots', me, 'COUNT', count, 'STREAMS', low, '>')
  end
  for _, row in ipairs(reply and reply[1][2] or {}) do give(row[1], 1, row[2]) end
end

if redis.call('XLEN', low) > 0 and count_waiting(queue) == 0 then
  if ARGV[3] == '1' then take_over_one() end
  if #taken == 0 and count > 0 then take_new() end
end
return {taken, lost}
