-- Put before every script that makes or drops copies: requests that nobody waits for, which a version answers a second
-- time for comparison. They stand in its low lane, `low:{endpoint}:{version}`; slots take from it when nothing waits in
-- the lane itself. What is not made, and what is dropped before a slot has run it, is counted by its reason.

local COPIES_KEPT = 32 -- in one low lane, waiting or running
local BUSY = 8 -- with more requests than this waiting for the live version, no copies are made
local SKIPS_KEPT_S = 30 * 86400

local function count_skip(endpoint, rollout, arm, reason)
  local skips = 'skips:' .. endpoint .. ':' .. rollout
  redis.call('HINCRBY', skips, arm .. '.' .. reason, 1)
  redis.call('EXPIRE', skips, SKIPS_KEPT_S)
end

-- Entries are deleted when they end, so what is neither delivered nor ended is length minus pending.
local function count_waiting(queue)
  local pending = redis.pcall('XPENDING', queue, 'slots')
  return redis.call('XLEN', queue) - (pending.err and 0 or pending[1])
end

local function why_no_copy(copy, num_waiting)
  if copy.version == '' or not is_ready(copy.endpoint, copy.version) then return 'not_ready' end
  if redis.call('XLEN', 'low:' .. copy.endpoint .. ':' .. copy.version) >= COPIES_KEPT then return 'full' end
  return num_waiting > BUSY and 'busy' or nil
end

-- Queue a copy, with its body, or count why not; the reason, or nil. `run_ms` is how long it may run, `kept_ms` how long
-- its body is kept. Times are texts, because Lua would write large numbers with an exponent.
local function make_copy(copy, num_waiting)
  local reason = why_no_copy(copy, num_waiting)
  if reason then
    count_skip(copy.endpoint, copy.rollout, copy.arm, reason)
    return reason
  end
  local lane = copy.endpoint .. ':' .. copy.version
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local id = copy.request_id .. '~' .. copy.arm
  local entry_id = redis.call('XADD', 'low:' .. lane, '*', 'id', id, 'gateway', '',
    'arrival_ms', string.format('%.0f', now), 'deadline_ms', string.format('%.0f', now + copy.run_ms),
    'generation', copy.generation, 'arm', copy.arm, 'rollout', copy.rollout)
  redis.call('HSET', 'req:' .. id, 'body', copy.body, 'lane', lane, 'entry_id', entry_id)
  redis.call('PEXPIRE', 'req:' .. id, copy.kept_ms)
  redis.call('SADD', 'copied:' .. copy.endpoint, copy.version)
  return nil
end

local function delete_copy(lane, entry_id, id)
  redis.call('XACK', 'low:' .. lane, 'slots', entry_id)
  redis.call('XDEL', 'low:' .. lane, entry_id)
  redis.call('UNLINK', 'req:' .. id)
end

-- Whether the route asks for such copies in the lane of `version`: of its own rollout, and while the version has its role.
local function is_asked_for(route_key, version, arm, rollout)
  local live, candidate, current = unpack(redis.call('HMGET', route_key, 'live', 'candidate', 'rollout'))
  if arm == 'golden' then return version == live or version == candidate end
  return rollout == (current or '') and version == (arm == 'self' and live or candidate)
end

-- Delete the copies that the route does not ask for, wherever they are; whoever runs one finds that it is gone.
local function drop_copies(endpoint, route_key)
  for _, version in ipairs(redis.call('SMEMBERS', 'copied:' .. endpoint)) do
    local lane = endpoint .. ':' .. version
    for _, row in ipairs(redis.call('XRANGE', 'low:' .. lane, '-', '+')) do
      local arm, rollout = field_of(row[2], 'arm'), field_of(row[2], 'rollout') or ''
      if not is_asked_for(route_key, version, arm, rollout) then
        delete_copy(lane, row[1], field_of(row[2], 'id'))
        count_skip(endpoint, rollout, arm, 'route_changed')
      end
    end
    if redis.call('XLEN', 'low:' .. lane) == 0 then redis.call('SREM', 'copied:' .. endpoint, version) end
  end
end
