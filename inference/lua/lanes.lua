-- Put before every script that hands entries from lane to lane: which lanes are routed, and one entry's way over.
--
-- 'attempt' of an entry is how often it was delivered in lanes it has left. Where that is not 0 the entry is a suspect,
-- and its first delivery does not count: it is only its way to claim.lua, which hands out suspects a few at a time.

local function field_of(entry, name)
  for i = 1, #entry, 2 do
    if entry[i] == name then return entry[i + 1] end
  end
end

local function set_field(entry, name, value)
  for i = 1, #entry, 2 do
    if entry[i] == name then
      entry[i + 1] = value
      return
    end
  end
  entry[#entry + 1] = name
  entry[#entry + 1] = value
end

local function attempts_of(entry, num_delivered)
  local carried = tonumber(field_of(entry, 'attempt') or 0)
  return carried > 0 and carried + num_delivered - 1 or num_delivered
end

local function is_routed(route_key, version)
  local live, candidate, canary_bp = unpack(redis.call('HMGET', route_key, 'live', 'candidate', 'canary_bp'))
  return version == live or (version == candidate and tonumber(canary_bp) > 0)
end

local function is_ready(endpoint, version)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  return redis.call('ZCOUNT', 'ready:' .. endpoint .. ':' .. version, '(' .. string.format('%.0f', now), '+inf') > 0
end

local function has_lease(consumer)
  return redis.call('EXISTS', 'slot:' .. consumer) == 1
end

-- The consumers of a queue by name, with how many entries each holds.
local function consumers_of(queue)
  local consumers = {}
  local rows = redis.pcall('XINFO', 'CONSUMERS', queue, 'slots')
  for _, row in ipairs(rows.err and {} or rows) do
    local consumer = {}
    for i = 1, #row, 2 do consumer[row[i]] = row[i + 1] end
    consumers[#consumers + 1] = consumer
  end
  return consumers
end

-- A fenced consumer may not even end what nobody has taken yet: its last rows were not heard.
local function owns(queue, consumer, entry_id)
  if redis.call('EXISTS', 'fenced:' .. consumer) == 1 then return false end
  local rows = redis.pcall('XPENDING', queue, 'slots', entry_id, entry_id, 1)
  return not rows.err and rows[1] ~= nil and rows[1][2] == consumer
end

-- Take an entry that is no consumer's out of its queue and put it at the end of another; nil if nobody waits for it
-- any more. Its id, arrival and deadline stay, and so does its body.
local function move(queue, lane, entry_id, entry, attempt)
  redis.call('XDEL', queue, entry_id)
  local request = 'req:' .. field_of(entry, 'id')
  if redis.call('EXISTS', request) == 0 then return nil end
  set_field(entry, 'attempt', attempt)
  local moved_id = redis.call('XADD', 'q:' .. lane, '*', unpack(entry))
  redis.call('HSET', request, 'lane', lane, 'entry_id', moved_id)
  return moved_id
end
