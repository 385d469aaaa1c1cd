-- What a slot of the live version does for requests in the hands of slots that hang or are dead: entries of lanes that
-- are not routed, whose consumer has no lease, go to the live lane, and being delivered there counts as attempts.
-- The old consumer is fenced. Whoever asked is told by a row -1 of the attempt to come, so that a stream which began
-- under another fingerprint ends now, and no late row of the old consumer counts.
--
-- KEYS  route:{endpoint}, lanes:{endpoint}
-- ARGV  endpoint, version, slot, fingerprint, seconds a fence stands, frames kept, seconds frames are kept
-- reply how many were moved
local endpoint, live = ARGV[1], ARGV[2]
if redis.call('HGET', KEYS[1], 'live') ~= live then return 0 end
local num_moved, notices = 0, {}

local function rescue(queue, entry_id, entry, num_delivered)
  local attempt = attempts_of(entry, num_delivered)
  if not move(queue, endpoint .. ':' .. live, entry_id, entry, attempt) then return end
  num_moved = num_moved + 1
  local gateway = field_of(entry, 'gateway')
  if gateway ~= '' then
    notices[gateway] = notices[gateway] or {}
    table.insert(notices[gateway], {field_of(entry, 'id'), attempt + 1, -1, ''})
  end
end

local function empty_hands(queue, consumer)
  redis.call('SET', 'fenced:' .. consumer, '1', 'EX', ARGV[5])
  for _, row in ipairs(redis.call('XPENDING', queue, 'slots', '-', '+', 1000, consumer)) do
    local found = redis.call('XRANGE', queue, row[1], row[1])[1]
    redis.call('XACK', queue, 'slots', row[1])
    if found then rescue(queue, row[1], found[2], row[4]) end
  end
end

for _, version in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if not is_routed(KEYS[1], version) then
    local queue = 'q:' .. endpoint .. ':' .. version
    for _, consumer in ipairs(consumers_of(queue)) do
      if not has_lease(consumer.name) then
        if consumer.pending > 0 then empty_hands(queue, consumer.name)
        else redis.call('XGROUP', 'DELCONSUMER', queue, 'slots', consumer.name) end
      end
    end
  end
end

for gateway, rows in pairs(notices) do
  local frame = cjson.encode({ARGV[3], live, ARGV[4], rows})
  redis.call('XADD', 'out:' .. gateway, 'MAXLEN', '~', ARGV[6], '*', 'frame', frame)
  redis.call('EXPIRE', 'out:' .. gateway, ARGV[7])
end
return num_moved
