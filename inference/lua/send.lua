-- Send one step's frames, unless other slots took this consumer's entries over: what it computed since must not be heard.
--
-- KEYS  fenced:{consumer}, out:{gateway} of each
-- ARGV  frames kept, seconds frames are kept, then the frame of each
-- reply 1 if they were sent, 0 if the consumer is fenced
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 2, #KEYS do
  redis.call('XADD', KEYS[i], 'MAXLEN', '~', ARGV[1], '*', 'frame', ARGV[i + 1])
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
return 1
