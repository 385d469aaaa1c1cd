-- Give a slot one of the desired residents: the one it holds, else a free one. A resident is free when no slot with a
-- live lease holds it. A resident that is desired n times has n places.
--
-- KEYS  desired, residents
-- ARGV  consumer, "{endpoint}:{version}" to hold on to, or "" for any
-- reply {the desired list as published, index from 0 or -1 if there is none for this slot}, or false if none was published
local text = redis.call('GET', KEYS[1])
if not text then return false end
local consumer, wish = ARGV[1], ARGV[2]
local copies, places, free = {}, {}, nil
local held = -1
for index, resident in ipairs(cjson.decode(text)) do
  local name = resident.endpoint .. ':' .. resident.version
  copies[name] = (copies[name] or 0) + 1
  local place = name .. ':' .. copies[name]
  places[place] = true
  if wish == '' or wish == name then
    local holder = redis.call('HGET', KEYS[2], place)
    if holder == consumer then held = index - 1
    elseif not free and (not holder or redis.call('EXISTS', 'slot:' .. holder) == 0) then free = {place, index - 1} end
  end
end
for _, place in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not places[place] then redis.call('HDEL', KEYS[2], place) end
end
if held < 0 and free then
  redis.call('HSET', KEYS[2], free[1], consumer)
  held = free[2]
end
return {text, held}
