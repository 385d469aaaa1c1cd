-- Place one request: read the route, choose a version, check its readiness and the cap, keep the body, queue the entry,
-- and the copies that the route asks for. All or nothing, and never between two halves of a route change. A copy that
-- cannot be made is counted, and changes nothing for the request.
--
-- KEYS  route:{endpoint}, req:{id}, gateway:{gateway}, lanes:{endpoint} (the names of queues follow from the route: one
--       server, no cluster)
-- ARGV  endpoint, id, gateway, body, sticky digest, deadline in ms, ms the body outlives it, gateway lease in ms,
--       ms a copy may wait, ms it may run at most, how many answers are asked for
-- reply {"ok", version, generation, arm, entry id, deadline in ms, 1 to store texts, rollout, the arms that its answer is
--       kept for} | {"unknown"} | {"empty"} while nothing is published | {"no_slot", seconds to wait}
--       | {"full", seconds to wait}
local endpoint, id, gateway = ARGV[1], ARGV[2], ARGV[3]
local live, candidate, canary_bp, salt, generation, queue_cap, longest_ms, store_texts = unpack(redis.call(
  'HMGET', KEYS[1], 'live', 'candidate', 'canary_bp', 'salt', 'generation', 'queue_cap', 'deadline_ms', 'store_texts'))
-- The desired residents are published after the routes: without them more routes are to come.
if not live then return {redis.call('EXISTS', 'desired') == 1 and 'unknown' or 'empty'} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Salted with the rollout: the same users are not the guinea pigs of every rollout.
local function bucket_of(text)
  return tonumber(string.sub(redis.sha1hex(salt .. ':' .. text), 1, 8), 16) % 10000
end

local version, arm = live, 'live'
if candidate ~= '' and bucket_of(ARGV[5]) < tonumber(canary_bp) and is_ready(endpoint, candidate) then
  version, arm = candidate, 'candidate'
elseif not is_ready(endpoint, live) then
  return {'no_slot', 5}
end

local lane = endpoint .. ':' .. version
local queue = 'q:' .. lane
local queued = count_waiting(queue)
if queued >= tonumber(queue_cap) then
  local ended = redis.call('XREVRANGE', 'ended:' .. lane, '+', '-', 'COUNT', 64)
  local wait_s = 5
  if #ended > 0 then
    local oldest = tonumber(string.match(ended[#ended][1], '^%d+'))
    wait_s = math.ceil(queued * (now - oldest) / 1000 / #ended)
  end
  return {'full', math.max(1, math.min(30, wait_s))}
end

local deadline_ms = math.min(tonumber(ARGV[6]), tonumber(longest_ms))
if gateway ~= '' then redis.call('SET', KEYS[3], '1', 'PX', ARGV[8]) end
local entry_id = redis.call('XADD', queue, '*', 'id', id, 'gateway', gateway, 'arrival_ms', string.format('%.0f', now),
  'deadline_ms', string.format('%.0f', now + deadline_ms), 'generation', generation, 'arm', arm)
redis.call('HSET', KEYS[2], 'body', ARGV[4], 'lane', lane, 'entry_id', entry_id)
redis.call('PEXPIRE', KEYS[2], string.format('%.0f', deadline_ms + ARGV[7]))
redis.call('SADD', KEYS[4], version)

local rollout, shadow_bp, self_bp, score_bp = unpack(redis.call(
  'HMGET', KEYS[1], 'rollout', 'shadow_bp', 'self_bp', 'score_bp'))
local kept_for = {}

-- By the request and not by its user: every conversation is compared now and then. Several answers are not one pair.
local function is_chosen(copy_arm, share_bp)
  return arm == 'live' and rollout and ARGV[11] == '1' and bucket_of(copy_arm .. ':' .. rollout .. ':' .. id) < tonumber(share_bp or 0)
end

local function copy_to(to, copy_arm, share_bp)
  if not is_chosen(copy_arm, share_bp) then return end
  local run_ms = math.min(deadline_ms, tonumber(ARGV[10]))
  local reason = make_copy({
    endpoint = endpoint, version = to, request_id = id, arm = copy_arm, rollout = rollout, generation = generation,
    body = ARGV[4], run_ms = run_ms, kept_ms = string.format('%.0f', ARGV[9] + run_ms + ARGV[7])
  }, queued)
  if not reason then kept_for[#kept_for + 1] = copy_arm end
end

copy_to(candidate, 'shadow', shadow_bp)
copy_to(live, 'self', self_bp)
if is_chosen('score', score_bp) then kept_for[#kept_for + 1] = 'score' end -- copied when its answer is known
return {'ok', version, generation, arm, entry_id, string.format('%.0f', deadline_ms), store_texts, rollout or '',
  table.concat(kept_for, ' ')}
