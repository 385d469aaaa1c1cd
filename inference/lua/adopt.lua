-- Give a slot one of the desired residents: the one it holds, else the most wanted free one. A resident is free when no
-- slot with a live lease holds it; one that is desired n times has n places. One that could not be loaded is left alone
-- until its next try is due. After this server lost its memory, a version that another slot reports to have is not free,
-- though nobody holds it: that slot will ask for it by name.
--
-- Where slots are short, the reply tells a slot that holds something what else it might do. A slot that cannot load what
-- it holds has an alternative when something else that may well load is free: any live or previous version, or one as
-- wanted as its own. A slot with a candidate or a retired version is needed elsewhere when a live or previous one has
-- no slot at all; only the least wanted of these slots is told, so that one yields for one.
--
-- A report or a failure that cannot be read counts as none: one broken process must not keep all others from adopting.
--
-- KEYS  desired, residents, failures, slots
-- ARGV  consumer, "{endpoint}:{version}" to hold on to, or "" for any
-- reply {the desired list as published, index from 0 or -1 if there is none for this slot,
--        1 if it has an alternative, 1 if it is needed elsewhere}, or false if none was published
local RANKS = {live = 0, previous = 1, candidate = 2, retired = 3}
local PREVIOUS, CANDIDATE = 1, 2
local FRESH_MS = 2500
local text = redis.call('GET', KEYS[1])
if not text then return false end
local consumer, wish = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The table that a text holds as JSON, or nil.
local function read_table(text)
  local is_json, value = pcall(cjson.decode, text)
  return is_json and type(value) == 'table' and value or nil
end

local function read_failure(resident, name)
  local text = redis.call('HGET', KEYS[3], name)
  local failure = text and read_table(text)
  local is_known = failure and failure.artifact == resident.artifact and type(failure.retry_at_ms) == 'number'
  return is_known and failure or nil
end

-- By name: how many slots reported a moment ago that they have it, and are not about to leave it.
local function count_claims()
  local claims = {}
  for _, text in ipairs(redis.call('HVALS', KEYS[4])) do
    local at, report = string.match(text, '^(%d+) (.*)$')
    report = at and now - at <= FRESH_MS and read_table(report)
    local is_claim = report and type(report.endpoint) == 'string' and type(report.version) == 'string'
    if is_claim and report.version ~= '' and report.state ~= 'draining' then
      local name = report.endpoint .. ':' .. report.version
      claims[name] = (claims[name] or 0) + 1
    end
  end
  return claims
end

local copies, desired, free, claims = {}, {}, {}, count_claims()
local held, least_wanted = nil, nil
for index, resident in ipairs(cjson.decode(text)) do
  local name = resident.endpoint .. ':' .. resident.version
  copies[name] = (copies[name] or 0) + 1
  local place = {
    key = name .. ':' .. copies[name], name = name, index = index - 1, rank = RANKS[resident.role] or 0,
    failure = read_failure(resident, name)
  }
  desired[place.key], desired[name] = true, desired[name] or {}
  local holder = redis.call('HGET', KEYS[2], place.key)
  if holder == consumer and (wish == '' or wish == name) then held = place end
  if holder and redis.call('EXISTS', 'slot:' .. holder) == 1 then
    desired[name].is_held = true
    claims[name] = (claims[name] or 0) - 1
    if place.rank >= CANDIDATE then least_wanted = place end
  elseif holder ~= consumer then
    free[#free + 1] = place
  end
end
for _, key in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not desired[key] then redis.call('HDEL', KEYS[2], key) end
end
for _, name in ipairs(redis.call('HKEYS', KEYS[3])) do
  if not desired[name] then redis.call('HDEL', KEYS[3], name) end
end

if not held then
  for _, place in ipairs(free) do
    local is_claimed = (claims[place.name] or 0) > 0
    local is_due = not place.failure or place.failure.retry_at_ms <= now
    if wish == '' and is_claimed then
      claims[place.name] = claims[place.name] - 1
    elseif wish == place.name or wish == '' and is_due then
      redis.call('HSET', KEYS[2], place.key, consumer)
      return {text, place.index, 0, 0}
    end
  end
  return {text, -1, 0, 0}
end
local has_alternative, is_needed = 0, 0
for _, place in ipairs(free) do
  if not place.failure then
    if place.rank <= math.max(held.rank, PREVIOUS) then has_alternative = 1 end
    if place.rank <= PREVIOUS and not desired[place.name].is_held and held == least_wanted then is_needed = 1 end
  end
end
return {text, held.index, has_alternative, is_needed}
