-- Write the halves of copies that this consumer still owns, and end the copies. What was dropped before it was run is
-- counted as well.
--
-- KEYS  low:{endpoint}:{version}, answers
-- ARGV  consumer, endpoint, version, answers kept, ms they are kept, then of each: entry id, id, rollout, arm, answer,
--       why it was dropped or ""
-- reply how many were written
local consumer, endpoint, lane = ARGV[1], ARGV[2], ARGV[2] .. ':' .. ARGV[3]
local num_written = 0
for i = 6, #ARGV, 6 do
  local entry_id, id, rollout, arm, answer, dropped = unpack(ARGV, i, i + 5)
  if owns(KEYS[1], consumer, entry_id) then
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'answer', answer)
    redis.call('PEXPIRE', KEYS[2], ARGV[5])
    delete_copy(lane, entry_id, id)
    if dropped ~= '' then count_skip(endpoint, rollout, arm, dropped) end
    num_written = num_written + 1
  end
end
return num_written
