-- What hosts call: lease, renew, record, and the ways a lease ends.

-- A holder that is gone: the task is tried again, or dead after its last attempt.
local function lose(c, id, reason)
  redis.call('ZREM', c.P .. ':leases', id)
  local f = get(c, id, 'attempt', 'owner', 'tries', 'max', 'state', 'root', 'agent')
  if f[5] ~= 'leased' then return end
  remember(c, id, f[1], f[2], 'lost', reason)
  if tonumber(f[3]) >= tonumber(f[4]) then
    finish(c, id, 'dead', '', reason .. ' on attempt ' .. f[3] .. ' of ' .. f[4])
  else
    redis.call('HSET', c.P .. ':t:' .. id, 'updated', c.now)
    ready_again(c, id)
    state_event(c, f[6], id, f[7], f[1], 'queued', reason)
  end
end

local function due_by(c, name)
  return redis.call('ZRANGE', c.P .. ':' .. name, '-inf', c.now, 'BYSCORE', 'LIMIT', 0, 100)
end

-- What time has done: leases that ended, delays that are over, deadlines that passed.
local function sweep(c)
  local known = agenda[c.P]
  if known and c.now < known.due and c.now - known.looked < 1000 then return end
  for _, id in ipairs(due_by(c, 'leases')) do lose(c, id, 'lease expired') end
  for _, name in ipairs(due_by(c, 'recurring')) do occur(c, name) end
  for _, id in ipairs(due_by(c, 'delayed')) do
    redis.call('ZREM', c.P .. ':delayed', id)
    local f = get(c, id, 'agent', 'tenant', 'conversation', 'state')
    if f[4] and not TERMINAL[f[4]] then
      local head = id
      if f[3] ~= '' then
        head = redis.call('LINDEX', conversation_key(c, f[1], f[2], f[3]), 0)
      end
      if head == id then
        ready_again(c, id)
      else
        redis.call('HSET', c.P .. ':t:' .. id, 'state', 'queued')
      end
    end
  end
  for _, id in ipairs(due_by(c, 'deadlines')) do
    redis.call('ZREM', c.P .. ':deadlines', id)
    local f = get(c, id, 'state', 'attempt', 'owner')
    -- A leased task is its host's to end; the host knows the deadline too.
    if f[1] and not TERMINAL[f[1]] and f[1] ~= 'leased' then
      remember(c, id, f[2], f[3], 'deadline', 'deadline exceeded')
      finish(c, id, 'failed', '', 'deadline exceeded while ' .. f[1])
      cancel_tree(c, id, 'deadline exceeded')
    end
  end
  local due = math.huge
  for _, name in ipairs({'delayed', 'leases', 'deadlines', 'recurring'}) do
    local first = redis.call('ZRANGE', c.P .. ':' .. name, 0, 0, 'WITHSCORES')[2]
    if first then due = math.min(due, tonumber(first)) end
  end
  agenda[c.P] = {due = due, looked = c.now}
end

local function hand_out(c, id, agent, owner, expires)
  local key = c.P .. ':t:' .. id
  local f = redis.call('HMGET', key, 'envelope', 'deadline', 'root', 'begun', 'attempt', 'tries',
    'noted')
  local attempt, begun = tonumber(f[5]) + 1, f[4] or c.now
  redis.call('HSET', key, 'state', 'leased', 'owner', owner, 'updated', c.now, 'attempt', attempt,
    'tries', tonumber(f[6]) + 1, 'begun', begun)
  at(c, 'leases', expires, id)
  event(c, f[3], id, agent, attempt, '"event":"state","state":"leased"')
  local journal = (attempt > 1 or f[7]) and redis.call('HGETALL', c.P .. ':j:' .. id) or {}
  return {id, f[1], attempt, f[2], begun, journal}
end

-- owner, lease (ms), count, cap an agent, sleep (0: no; 1: be woken when there is work; 2: be handed
-- it), woken (turn of the wake that led here, or 0), 'all' then agent and room in pairs where room is below the cap, or
-- 'only' then agents → now, expires, leases, next due, whether there is more
function op.lease(c, a)
  local owner, lease_ms, wanted, cap = a[1], tonumber(a[2]), tonumber(a[3]), tonumber(a[4])
  local sleeps, woken, mode = a[5] ~= '0', tonumber(a[6]), a[7]
  redis.call('HDEL', c.P .. ':resting', owner)
  sweep(c)
  local agents, room, more = {}, {}, 0
  if mode == 'only' then
    for i = 8, #a do agents[#agents + 1] = a[i] end
  else
    for i = 8, #a, 2 do room[a[i]] = tonumber(a[i + 1]) end
    local most = wanted + (#a - 7) / 2
    agents = redis.call('ZRANGE', c.P .. ':ready', 0, most)
    if #agents > most then more = 1 end
  end
  local found, expires, left = {}, c.now + lease_ms, #agents
  repeat  -- each agent its share a round, so that a deep mailbox starves nobody
    local any = false
    local share = math.max(1, math.floor((wanted - #found) / #agents))
    for _, agent in ipairs(agents) do
      local most = math.min(share, room[agent] or cap, wanted - #found)
      if most > 0 then
        local popped = redis.call('ZPOPMIN', c.P .. ':r:' .. agent, most)
        for i = 1, #popped, 2 do
          found[#found + 1] = hand_out(c, popped[i], agent, owner, expires)
        end
        if #popped / 2 < most then  -- it has no more
          idle(c, agent)
          room[agent] = 0
          left = left - 1
        else
          any = true
          room[agent] = (room[agent] or cap) - most
          redis.call('ZADD', c.P .. ':ready', 'XX', c.now + #found / 1e4, agent)
        end
      end
    end
  until not any or #found >= wanted
  c.taken = c.taken + #found
  if left > 0 then more = 1 end
  if #found < wanted then
    -- What this host has no room for another may take; a wake is not handed on for ever.
    if #found == 0 and more == 1 and woken > 0 and woken < 8 then wake_one(c, woken + 1) end
    if sleeps then
      local any = a[5] == '2' and #a == 7 and '1' or '0'
      local free = wanted - #found
      redis.call('HSET', c.P .. ':resting', owner, free .. ' ' .. lease_ms .. ' ' .. any)
    end
  end
  local due = agenda[c.P].due
  return {c.now, expires, found, due < math.huge and string.format('%.0f', due) or '', more}
end

-- Work that nobody took in this call goes to hosts that rest: a task is leased to one and sent to it,
-- which spares a round trip; or a host is told to look.
local function serve(c)
  local resting = c.P .. ':resting'
  for _ = 1, math.min(c.lined - c.taken, 64) do
    local agent = redis.call('ZRANGE', c.P .. ':ready', 0, 0)[1]
    if not agent then
      if redis.call('EXISTS', c.P .. ':recurring') == 1 then wake_one(c, 1) end
      return
    end
    local owner = redis.call('HRANDFIELD', resting)
    if not owner then return end
    local free, lease_ms, any = redis.call('HGET', resting, owner):match('(%d+) (%d+) (%d)')
    if any == '0' then
      wake_one(c, 1)
    else
      free = tonumber(free) - 1
      if free > 0 then  -- no longer idle: of more it is told, and fetches it
        redis.call('HSET', resting, owner, free .. ' ' .. lease_ms .. ' 0')
      else
        redis.call('HDEL', resting, owner)
      end
      local id = redis.call('ZPOPMIN', c.P .. ':r:' .. agent)[1]
      if redis.call('EXISTS', c.P .. ':r:' .. agent) == 0 then
        idle(c, agent)
      end
      if id then
        local expires = c.now + tonumber(lease_ms)
        local item = hand_out(c, id, agent, owner, expires)
        local sent = redis.call('PUBLISH', c.P .. ':host:' .. owner,
          'lease ' .. cjson.encode({c.now, expires, item}))
        if sent == 0 then  -- it is gone; the task was in nobody's hands
          redis.call('HDEL', resting, owner)
          redis.call('ZREM', c.P .. ':leases', id)
          redis.call('HINCRBY', c.P .. ':t:' .. id, 'tries', -1)
          ready_again(c, id)
        end
      end
    end
  end
end

-- lease (ms), then id and attempt in pairs → expires, then each one's state
function op.renew(c, a)
  local expires = c.now + tonumber(a[1])
  local states = {expires}
  for i = 2, #a, 2 do
    local state = fence(c, a[i], a[i + 1])
    if state == 'ok' then at(c, 'leases', expires, a[i]) end
    states[#states + 1] = state
  end
  return states
end

-- id, attempt, name, value, usage
function op.record(c, a)
  local id = a[1]
  local held, t = fence(c, id, a[2])
  if held ~= 'ok' then return {held} end
  local journal = c.P .. ':j:' .. id
  note(c, id, a[3], a[4])
  if redis.call('HLEN', journal) > c.steps then
    redis.call('HDEL', journal, a[3])
    return {'steps'}
  end
  event(c, t.root, id, t.agent, a[2], '"event":"step","step":' .. cjson.encode(a[3]))
  if a[5] ~= '' then
    for name, amount in pairs(cjson.decode(a[5])) do
      redis.call('HINCRBYFLOAT', c.P .. ':t:' .. id, 'u:' .. name, amount)
    end
  end
  local limit = charge(c, t.root, a[5], 0)
  if limit then return {'budget', limit} end
  return {'ok'}
end

-- id, attempt, event (the inside of a JSON object)
function op.emit(c, a)
  local held, t = fence(c, a[1], a[2])
  if held ~= 'ok' then return {held} end
  event(c, t.root, a[1], t.agent, a[2], a[3])
  return {'ok'}
end

-- Steps that were still to be journalled when their task ended: names, with \0 between them.
local function tell_steps(c, t, id, attempt, steps)
  for name in steps:gmatch('%Z+') do
    event(c, t.root, id, t.agent, attempt, '"event":"step","step":' .. cjson.encode(name))
  end
end

-- A lease ends in waiting. A wait is no failure: the attempt does not count against the limit.
local function park(c, id, t, awaits, delegate, used)
  redis.call('ZREM', c.P .. ':leases', id)
  redis.call('HSET', c.P .. ':t:' .. id, 'state', 'waiting', 'owner', '', 'updated', c.now,
    'tries', t.tries - 1, 'awaits', awaits, 'delegate', delegate, 'used', used)
end

-- Decode children and refuse them if their root has not the means.
local function children_of(c, root, a, from)
  local children, fresh = {}, 0
  for i = from, #a do
    children[#children + 1] = cjson.decode(a[i])
    if redis.call('EXISTS', c.P .. ':t:' .. children[#children].id) == 0 then fresh = fresh + 1 end
  end
  return children, fresh > 0 and over(c, root, fresh) or nil
end

-- id, attempt, till (ms of the caller's clock or ''), signals (a JSON list or ''), children
function op.wait_on(c, a)
  local id, till, awaits = a[1], a[3], a[4]
  local held, t = fence(c, id, a[2])
  if held ~= 'ok' then return {held} end
  local children, limit = children_of(c, t.root, a, 5)
  if limit then return {'budget', limit} end
  for i, child in ipairs(children) do add(c, a[i + 4], child, '', '', nil, true) end
  park(c, id, t, awaits, '', '')
  state_event(c, t.root, id, t.agent, a[2], 'waiting')
  local heard = false
  for _, name in ipairs(awaits ~= '' and cjson.decode(awaits) or {}) do
    heard = heard or redis.call('HEXISTS', c.P .. ':j:' .. id, 'signal:' .. name) == 1
  end
  if heard or till == '' and awaits == '' and redis.call('EXISTS', c.P .. ':p:' .. id) == 0 then
    ready_again(c, id)
  elseif till ~= '' then
    at(c, 'delayed', tonumber(till) + c.shift, id)
  end
  return {'ok'}
end

-- id, attempt, usage, steps, child: whose end will be this task's
function op.delegate(c, a)
  local id = a[1]
  local held, t = fence(c, id, a[2])
  if held ~= 'ok' then return {held} end
  local child, f = cjson.decode(a[5]), {}
  -- An earlier attempt may have handed on already, and been lost before the store said so.
  if a[2] ~= '1' then f = get(c, child.id, 'state', 'result', 'error') end
  tell_steps(c, t, id, a[2], a[4])
  local limit = charge(c, t.root, a[3], f[1] and 0 or 1)
  if limit then return {'budget', limit} end
  if not f[1] then add(c, a[5], child, '', '', t, false) end
  park(c, id, t, '', child.id, a[3])
  if f[1] and TERMINAL[f[1]] then
    remember(c, id, a[2], '', f[1], f[3] ~= '' and f[3] or nil)
    finish(c, id, f[1], f[2], f[3], nil, a[3])
  end
  return {'ok'}
end

-- id, attempt, state, result, error, usage, steps, number of board writes, those, children
function op.complete(c, a)
  local id, attempt, state, result, err, usage = a[1], a[2], a[3], a[4], a[5], a[6]
  local held, t = fence(c, id, attempt)
  if held ~= 'ok' then return {held} end
  local writes, at = tonumber(a[8]), 9
  for i = 1, writes do  -- board writes: key, expected version or '', value or '', ttl or ''
    local key, expect = a[at], a[at + 1]
    local version = redis.call('HGET', key, 'version') or '0'
    if expect ~= '' and expect ~= version then return {'conflict', key, version} end
    at = at + 4
  end
  local children, limit = children_of(c, t.root, a, at)
  if limit then return {'budget', limit} end
  tell_steps(c, t, id, attempt, a[7])
  local spent = charge(c, t.root, usage, 0)
  if spent and state == 'done' then return {'budget', spent} end
  for i, child in ipairs(children) do add(c, a[at + i - 1], child, '', '', nil, true) end
  at = 9
  for i = 1, writes do
    local key, value, ttl = a[at], a[at + 2], a[at + 3]
    local version = redis.call('HINCRBY', key, 'version', 1)
    redis.call('HSET', key, 'value', value)
    if ttl ~= '' then redis.call('PEXPIRE', key, ttl) else redis.call('PERSIST', key) end
    redis.call('PUBLISH', c.P .. ':board', key .. '\0' .. version)
    at = at + 4
  end
  remember(c, id, attempt, t.owner, state, err ~= '' and err or nil)
  finish(c, id, state, result, err, nil, usage)
  return {'ok'}
end

-- id, attempt, error, delay (ms)
function op.retry(c, a)
  local id, attempt, err = a[1], a[2], a[3]
  local held, t = fence(c, id, attempt)
  if held ~= 'ok' then return {held} end
  remember(c, id, attempt, t.owner, 'retry', err)
  if t.tries >= t.max then
    finish(c, id, 'dead', '', err)
    return {'ok', 'dead'}
  end
  redis.call('ZREM', c.P .. ':leases', id)
  at(c, 'delayed', c.now + tonumber(a[4]), id)
  redis.call('HSET', c.P .. ':t:' .. id, 'state', 'scheduled', 'owner', '', 'updated', c.now,
    'error', err)
  state_event(c, t.root, id, t.agent, attempt, 'scheduled', err)
  return {'ok', 'scheduled'}
end

-- id, attempt, delay (ms), note or '': given back untouched; the attempt does not count
function op.release(c, a)
  local id, delay = a[1], tonumber(a[3])
  local held, t = fence(c, id, a[2])
  if held ~= 'ok' then return {held} end
  local key = c.P .. ':t:' .. id
  if a[4] ~= '' then remember(c, id, a[2], t.owner, 'released', a[4]) end
  redis.call('ZREM', c.P .. ':leases', id)
  redis.call('HSET', key, 'tries', t.tries - 1, 'owner', '', 'updated', c.now)
  if delay > 0 then
    redis.call('HSET', key, 'state', 'scheduled')
    at(c, 'delayed', c.now + delay, id)
  else
    ready_again(c, id)
  end
  state_event(c, t.root, id, t.agent, a[2], delay > 0 and 'scheduled' or 'queued', a[4])
  return {'ok'}
end
