-- What operators and the swarm call, and the one function the store knows.

-- owner, reason: everything it holds is another's to take → how many
function op.lost(c, a)
  local n = 0
  for _, id in ipairs(redis.call('ZRANGE', c.P .. ':leases', 0, -1)) do
    if get(c, id, 'owner')[1] == a[1] then
      lose(c, id, a[2])
      n = n + 1
    end
  end
  redis.call('HDEL', c.P .. ':resting', a[1])
  return {n}
end

-- → ready, leased, how long the oldest ready one waits (ms), how near the nearest deadline is (ms
-- or '')
function op.backlog(c, a)
  local ready, oldest = 0, 0
  for _, agent in ipairs(redis.call('ZRANGE', c.P .. ':ready', 0, -1)) do
    local r = c.P .. ':r:' .. agent
    ready = ready + redis.call('ZCARD', r)
    local first = redis.call('ZRANGE', r, 0, 0)[1]
    if first then
      oldest = math.max(oldest, c.now - tonumber(get(c, first, 'ready_at')[1]))
    end
  end
  local deadline = redis.call('ZRANGE', c.P .. ':deadlines', 0, 0, 'WITHSCORES')[2]
  return {ready, redis.call('ZCARD', c.P .. ':leases'), oldest,
    deadline and string.format('%.0f', tonumber(deadline) - c.now) or ''}
end

local function revive(c, id, deadline)
  local key = c.P .. ':t:' .. id
  local f = get(c, id, 'state', 'agent', 'tenant', 'delegate', 'attempt', 'root')
  if f[1] ~= 'dead' then return false end
  redis.call('ZREM', c.P .. ':dead:' .. f[2], id)
  redis.call('HSET', key, 'tries', 0, 'error', '', 'updated', c.now, 'deadline', deadline,
    'timed', deadline ~= '0' and '1' or '0',
    'since', c.now)
  redis.call('HDEL', key, 'begun')
  if deadline ~= '0' then at(c, 'deadlines', tonumber(deadline), id) end
  count(c, 'open', f[2], 1)
  if f[6] == id then count(c, 'tenants', f[3], 1) end
  for _, part in ipairs({'t', 'j', 'h', 'c', 'p'}) do redis.call('PERSIST', c.P .. ':' .. part .. ':' .. id) end
  for _, part in ipairs({'b', 'e'}) do redis.call('PERSIST', c.P .. ':' .. part .. ':' .. f[6]) end
  local below = text(f[4] or nil)
  if below ~= '' and revive(c, below, deadline) then  -- what it handed on to is what died
    redis.call('HSET', key, 'state', 'waiting')
    state_event(c, f[6], id, f[2], f[5], 'waiting', 'replayed')
  else
    redis.call('HSET', key, 'delegate', '')
    ready_again(c, id)
    state_event(c, f[6], id, f[2], f[5], 'queued', 'replayed')
  end
  return true
end

-- id, timeout (ms or ''): a dead task, and whatever ended with it, is tried again
function op.requeue(c, a)
  local id = a[1]
  local deadline = a[2] ~= '' and string.format('%.0f', c.now + tonumber(a[2])) or '0'
  local top = id
  while true do  -- the parents that handed on to it died with it
    local parent = get(c, top, 'parent')[1]
    if not parent or parent == '' then break end
    local p = get(c, parent, 'state', 'delegate')
    if p[1] ~= 'dead' or p[2] ~= top then break end
    top = parent
  end
  return {revive(c, top, deadline) and 'ok' or 'stale'}
end

-- KEYS: the prefix. ARGV: retain (ms), attempts, depth, tenant depth, events, steps, the caller's
-- time (ms); then operations: name, number of arguments, arguments. Returns a reply each.
local function batch(keys, args)
  local t = redis.call('TIME')
  local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  local c = {
    P = keys[1], now = now, retain = tonumber(args[1]), attempts = args[2], depth = tonumber(args[3]),
    tenant_depth = tonumber(args[4]), events = tonumber(args[5]), steps = tonumber(args[6]),
    shift = now - tonumber(args[7]), lined = 0, taken = 0, news = {}, ended = {}, lively = {},
    counts = {open = {}, tenants = {}}, purses = {}
  }
  local replies, at = {}, 8
  while at <= #args do
    local name, n = args[at], tonumber(args[at + 1])
    local a = {}
    for i = 1, n do a[i] = args[at + 1 + i] end
    at = at + 2 + n
    -- What one operation stumbles over is its own caller's affair, not its neighbours'.
    local fine, reply = pcall(op[name] or function() return {'unknown', name} end, c, a)
    if not fine then reply = {'error', type(reply) == 'table' and reply.err or tostring(reply)} end
    replies[#replies + 1] = reply
  end
  serve(c)
  settle(c)
  tell(c)
  return replies
end

redis.register_function('hybrid1_batch', batch)
redis.register_function{
  function_name = 'hybrid1_edition', callback = function() return EDITION end, flags = {'no-writes'}
}
