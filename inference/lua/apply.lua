-- Make a route the state of its endpoint, whole, unless a later one stands there: a later generation of the same
-- incarnation, or an incarnation that this one gave way to. This is the one place where a route changes, and so where
-- entries that no slot has yet move with it: from every lane that is not routed to the live one. What runs is told the
-- policy where the lane loses its route here and now; a lane that lost it earlier was told then, or was to finish. Copies
-- that the route does not ask for are dropped, wherever they are.
--
-- KEYS  route:{endpoint}, endpoints, lanes:{endpoint}
-- ARGV  endpoint, incarnation, generation, policy for what runs on lanes that lose their route, seconds an incarnation that
--       ended is remembered, then field and value of the whole route
-- reply {1 if it is the state now, entries moved, entries that run on lanes that are not routed}
local endpoint, policy = ARGV[1], ARGV[4]
local incarnation, generation = unpack(redis.call('HMGET', KEYS[1], 'incarnation', 'generation'))
local is_known = incarnation == ARGV[2]
if is_known and tonumber(generation) > tonumber(ARGV[3]) then return {0, 0, 0} end
if incarnation and not is_known then
  if redis.call('EXISTS', 'gone:' .. endpoint .. ':' .. ARGV[2]) == 1 then return {0, 0, 0} end
  redis.call('SET', 'gone:' .. endpoint .. ':' .. incarnation, '1', 'EX', ARGV[5])
end
local was_routed = {}
for _, version in ipairs(redis.call('SMEMBERS', KEYS[3])) do was_routed[version] = is_routed(KEYS[1], version) end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'generation', ARGV[3], unpack(ARGV, 6))
redis.call('SADD', KEYS[2], endpoint)
local live = redis.call('HGET', KEYS[1], 'live')
redis.call('SADD', KEYS[3], live)
drop_copies(endpoint, KEYS[1])

local function move_waiting(queue)
  local first = '-'
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', queue)) do
    if field_of(row, 'name') == 'slots' then first = '(' .. field_of(row, 'last-delivered-id') end
  end
  local num_moved = 0
  for _, row in ipairs(redis.call('XRANGE', queue, first, '+')) do
    local attempt = field_of(row[2], 'attempt') or 0
    if move(queue, endpoint .. ':' .. live, row[1], row[2], attempt) then num_moved = num_moved + 1 end
  end
  return num_moved
end

local num_requeued, num_in_flight = 0, 0
for _, version in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  local lane = endpoint .. ':' .. version
  if not is_routed(KEYS[1], version) then
    if redis.call('XLEN', 'q:' .. lane) > 0 then num_requeued = num_requeued + move_waiting('q:' .. lane) end
    local num_running = redis.call('XLEN', 'q:' .. lane) -- what ends is deleted, what waited has moved
    num_in_flight = num_in_flight + num_running
    if num_running == 0 then
      redis.call('SREM', KEYS[3], version)
    elseif policy ~= 'finish' and was_routed[version] then
      redis.call('XADD', 'ctl:' .. lane, 'MAXLEN', '~', 1000, '*', 'in_flight', policy, 'generation', ARGV[3])
    end
  end
end
return {1, num_requeued, num_in_flight}
