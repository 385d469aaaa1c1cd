-- Place a copy that the control plane makes of a request that has ended, once, if the route asks for it.
--
-- KEYS  route:{endpoint}, made:{copy id} (remembers that it was decided on)
-- ARGV  endpoint, version, id of the request, arm, rollout, body, ms it may run, ms its body is kept
-- reply "queued", "repeated", or the reason why there is none
local copy = {
  endpoint = ARGV[1], version = ARGV[2], request_id = ARGV[3], arm = ARGV[4], rollout = ARGV[5], body = ARGV[6],
  run_ms = ARGV[7], kept_ms = ARGV[8]
}
if not redis.call('SET', KEYS[2], '1', 'NX', 'PX', copy.kept_ms) then return 'repeated' end
if not is_asked_for(KEYS[1], copy.version, copy.arm, copy.rollout) then
  count_skip(copy.endpoint, copy.rollout, copy.arm, 'route_changed')
  return 'route_changed'
end
local live
live, copy.generation = unpack(redis.call('HMGET', KEYS[1], 'live', 'generation'))
return make_copy(copy, count_waiting('q:' .. copy.endpoint .. ':' .. live)) or 'queued'
