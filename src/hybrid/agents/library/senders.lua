-- What senders call: submit, view, cancel, signal, recurring schedules.

local op = {}  -- operations by name: function (c, arguments) → reply

-- envelope, fingerprint, waiter or '' → ok ID | full DEPTH WHOSE | budget LIMIT | mismatch ID
function op.submit(c, a)
  local envelope, fingerprint = a[1], a[2]
  local task = cjson.decode(envelope)
  local idempotency, ikey = text(task.idempotency_key), ''
  if idempotency ~= '' then
    ikey = c.P .. ':i:' .. task.tenant .. '\0' .. task.agent .. '\0' .. idempotency
    local known = redis.call('GET', ikey)
    if known then
      local print_of = get(c, known, 'fingerprint')[1]
      if print_of == fingerprint then return {'ok', known} end
      if print_of then return {'mismatch', known} end
    end
  end
  if redis.call('EXISTS', c.P .. ':t:' .. task.id) == 1 then return {'ok', task.id} end
  local depth = counted(c, 'open', task.agent)
  if depth >= c.depth then return {'full', tostring(depth), 'agent'} end
  depth = counted(c, 'tenants', task.tenant)
  if depth >= c.tenant_depth then return {'full', tostring(depth), 'tenant'} end
  if task.root ~= task.id then
    local limit = over(c, task.root, 1)
    if limit then return {'budget', limit} end
  end
  add(c, envelope, task, fingerprint, ikey)
  if a[3] ~= '' then redis.call('HSET', c.P .. ':t:' .. task.id, 'waiter', a[3]) end
  if ikey ~= '' then redis.call('SET', ikey, task.id) end
  return {'ok', task.id}
end

-- id → fields, history | missing
function op.view(c, a)
  local fields = redis.call('HGETALL', c.P .. ':t:' .. a[1])
  if #fields == 0 then return {'missing'} end
  return {'ok', fields, redis.call('LRANGE', c.P .. ':h:' .. a[1], 0, -1)}
end

local function cancel_tree(c, id, reason)
  local f = get(c, id, 'state', 'attempt', 'owner', 'delegate')
  if not f[1] then return end
  if not TERMINAL[f[1]] then
    remember(c, id, f[2], f[3], 'cancelled', reason)
    finish(c, id, 'cancelled', '', reason)
  end
  for _, child in ipairs(redis.call('SMEMBERS', c.P .. ':c:' .. id)) do
    cancel_tree(c, child, reason)
  end
  if f[4] and f[4] ~= '' then cancel_tree(c, f[4], reason) end
end

-- id, reason
function op.cancel(c, a)
  cancel_tree(c, a[1], a[2])
  return {'ok'}
end

-- id, name, value → ok | missing | over STATE. The first value of a name stands.
function op.signal(c, a)
  local id, name = a[1], a[2]
  local f = get(c, id, 'state', 'awaits', 'root', 'agent', 'attempt')
  if not f[1] then return {'missing'} end
  if TERMINAL[f[1]] then return {'over', f[1]} end
  if redis.call('HLEN', c.P .. ':j:' .. id) >= c.steps then return {'steps'} end
  if redis.call('HEXISTS', c.P .. ':j:' .. id, 'signal:' .. name) == 0 then
    note(c, id, 'signal:' .. name, a[3])
    event(c, f[3], id, f[4], f[5], '"event":"signal","name":' .. cjson.encode(name))
  end
  if f[1] == 'waiting' and f[2] and f[2] ~= '' then  -- it looks for itself whether it was meant
    redis.call('ZREM', c.P .. ':delayed', id)
    ready_again(c, id)
  end
  return {'ok'}
end

-- name, every (ms), first (ms of the caller's clock), timeout (ms or ''), the envelope's rest
function op.recur(c, a)
  local key = c.P .. ':recur:' .. a[1]
  redis.call('HSET', key, 'every', a[2], 'timeout', a[4], 'rest', a[5])
  at(c, 'recurring', tonumber(a[3]) + c.shift, a[1])
  c.lined = c.lined + 1
  return {'ok'}
end

function op.unrecur(c, a)
  redis.call('DEL', c.P .. ':recur:' .. a[1])
  return {redis.call('ZREM', c.P .. ':recurring', a[1]) == 1 and 'ok' or 'missing'}
end

-- → name, next (ms), every (ms), rest; each
function op.recurring(c, a)
  local found = {}
  for _, name in ipairs(redis.call('ZRANGE', c.P .. ':recurring', 0, -1)) do
    local f = redis.call('HMGET', c.P .. ':recur:' .. name, 'every', 'rest')
    found[#found + 1] = {name, redis.call('ZSCORE', c.P .. ':recurring', name), f[1], f[2]}
  end
  return found
end

-- An occurrence is a task like any other; its id is made of name and time, so it is one task.
-- Occurrences missed while nothing ran collapse into one.
local function occur(c, name)
  local f = redis.call('HMGET', c.P .. ':recur:' .. name, 'every', 'timeout', 'rest')
  local due = tonumber(redis.call('ZSCORE', c.P .. ':recurring', name))
  if not f[1] then
    redis.call('ZREM', c.P .. ':recurring', name)
    return
  end
  local every = tonumber(f[1])
  local latest = due + math.floor((c.now - due) / every) * every
  at(c, 'recurring', latest + every, name)
  local id = redis.sha1hex(name .. '\0' .. string.format('%.0f', latest)):sub(1, 32)
  local deadline = 'null'
  if f[2] ~= '' then
    deadline = string.format('%.3f', (c.now - c.shift + tonumber(f[2])) / 1000)
  end
  local envelope = '{"id":"' .. id .. '","root":"' .. id .. '","created":'
    .. string.format('%.3f', (c.now - c.shift) / 1000) .. ',"deadline":' .. deadline .. ',' .. f[3]
  local task = cjson.decode(envelope)
  if counted(c, 'open', task.agent) >= c.depth then return end
  add(c, envelope, task, '', '')
end
