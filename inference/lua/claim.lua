-- Take over entries of consumers whose lease has ended. A consumer that lost an entry is fenced: should its process
-- wake up, it must not renew under that name, because its entries now run elsewhere.
--
-- Being delivered to a slot that dies counts as an attempt. So an entry on its last one comes alone, or one that
-- crashes the slot again would use up the last attempt of those that were only waiting beside it.
--
-- KEYS  q:{endpoint}:{version}
-- ARGV  claiming consumer, most entries to take, last attempt, seconds a fence stands
-- reply {{entry id, attempt, {field, value, ...}}, ...}
local queue, me, room, last_attempt = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local claimed = {}

local function claim(entry_id, attempt)
  local entry = redis.call('XCLAIM', queue, 'slots', me, 0, entry_id)[1]
  if entry and entry[2] then
    claimed[#claimed + 1] = {entry[1], attempt, entry[2]}
  else
    redis.call('XACK', queue, 'slots', entry_id) -- deleted meanwhile
  end
end

for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', queue, 'slots')) do
  local consumer = {}
  for i = 1, #row, 2 do consumer[row[i]] = row[i + 1] end
  if consumer.name ~= me and redis.call('EXISTS', 'slot:' .. consumer.name) == 0 then
    if consumer.pending == 0 then
      redis.call('XGROUP', 'DELCONSUMER', queue, 'slots', consumer.name)
    elseif #claimed < room then
      redis.call('SET', 'fenced:' .. consumer.name, '1', 'EX', ARGV[4])
      for _, entry in ipairs(redis.call('XPENDING', queue, 'slots', '-', '+', room - #claimed, consumer.name)) do
        local attempt = entry[4] + 1
        if attempt ~= last_attempt then
          claim(entry[1], attempt)
        elseif #claimed == 0 then
          claim(entry[1], attempt)
          if #claimed > 0 then return claimed end
        end
      end
    end
  end
end
return claimed
