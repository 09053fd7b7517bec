#!lua name=hybrid_mailbox_v1
-- The mailbox's function library: every change of a task is one atomic call.
--
-- KEYS[1] is the partition's prefix, `hybrid:{hN}`; every other key starts with it, so all of them
-- share its hash slot and a call is safe on a cluster. Times are milliseconds of the server's clock.
--
--   t:ID   hash    envelope, state, attempt (fencing token), tries (counted attempts), owner, …
--   j:ID   hash    journal: finished steps by name, children's outcomes by child id
--   h:ID   list    history: one JSON object an attempt
--   c:ID   set     children           p:ID  set   children not finished yet
--   r:AGENT zset   ready, by priority then age
--   ready  zset    agents that have ready tasks, by when they were last served
--   delayed, leases, deadlines  zset  ids by time
--   q:…    list    one conversation's tasks in order; only the first may run
--   i:…    string  idempotency key → id
--   b:ROOT hash    what a root and all beneath it have spent, and may spend
--   open   hash    unfinished tasks an agent
--   dead:AGENT zset the dead letter
-- Channels: PREFIX:finished ("ID STATE"), PREFIX:wake (an agent has work).

local TERMINAL = {done = true, failed = true, cancelled = true, dead = true}

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function get(P, id, ...)
  return redis.call('HMGET', P .. ':t:' .. id, ...)
end

local function conversation_key(P, agent, tenant, conversation)
  return P .. ':q:' .. agent .. '\0' .. tenant .. '\0' .. conversation
end

-- Put a task where a lease finds it.
local function make_ready(P, id, agent, priority, created)
  redis.call('HSET', P .. ':t:' .. id, 'state', 'queued')
  redis.call('ZADD', P .. ':r:' .. agent, created - priority * 1e13, id)
  redis.call('ZADD', P .. ':ready', 'NX', 0, agent)
  redis.call('PUBLISH', P .. ':wake', agent)
end

local function ready_again(P, id)
  local f = get(P, id, 'agent', 'priority', 'created')
  make_ready(P, id, f[1], tonumber(f[2]), tonumber(f[3]))
end

local function leave_ready(P, id, agent)
  redis.call('ZREM', P .. ':r:' .. agent, id)
  if redis.call('EXISTS', P .. ':r:' .. agent) == 0 then
    redis.call('ZREM', P .. ':ready', agent)
  end
end

local function remember(P, id, attempt, host, now, outcome, err)
  redis.call('RPUSH', P .. ':h:' .. id, cjson.encode({
    attempt = tonumber(attempt), host = host or '', at = now / 1000, outcome = outcome, error = err or cjson.null
  }))
end

-- The end of a task: out of every set, the next of its conversation in, its parent told.
local function finish(P, id, state, result, err, now, retain)
  local key = P .. ':t:' .. id
  local f = get(P, id, 'agent', 'tenant', 'conversation', 'parent', 'root', 'state')
  local agent = f[1]
  redis.call('HSET', key, 'state', state, 'result', result, 'error', err, 'updated', now, 'owner', '')
  leave_ready(P, id, agent)
  redis.call('ZREM', P .. ':leases', id)
  redis.call('ZREM', P .. ':delayed', id)
  redis.call('ZREM', P .. ':deadlines', id)
  redis.call('HINCRBY', P .. ':open', agent, -1)
  if state == 'dead' then redis.call('ZADD', P .. ':dead:' .. agent, now, id) end
  if f[3] ~= '' then
    local q = conversation_key(P, agent, f[2], f[3])
    local first = redis.call('LINDEX', q, 0)
    redis.call('LREM', q, 1, id)
    local next_id = redis.call('LINDEX', q, 0)
    if first == id and next_id then
      if get(P, next_id, 'state')[1] == 'queued' then ready_again(P, next_id) end
    end
  end
  local parent = f[4]
  if parent ~= '' then
    local pstate = get(P, parent, 'state')[1]
    if pstate and not TERMINAL[pstate] then
      local outcome = '{"state":"' .. state .. '","result":' .. (result == '' and 'null' or result)
        .. ',"error":' .. (err == '' and 'null' or cjson.encode(err)) .. '}'
      redis.call('HSET', P .. ':j:' .. parent, id, outcome)
      redis.call('SREM', P .. ':p:' .. parent, id)
      if pstate == 'waiting' and redis.call('EXISTS', P .. ':p:' .. parent) == 0 then
        redis.call('ZREM', P .. ':delayed', parent)
        ready_again(P, parent)
      end
    end
  end
  for _, part in ipairs({'t', 'j', 'h', 'c', 'p'}) do
    redis.call('PEXPIRE', P .. ':' .. part .. ':' .. id, retain)
  end
  if f[5] == id then redis.call('PEXPIRE', P .. ':b:' .. id, retain) end
  redis.call('PUBLISH', P .. ':finished', id .. ' ' .. state)
end

local function text(value)
  if value == nil or value == cjson.null then return '' end
  return tostring(value)
end

local function number(value, default)
  if value == nil or value == cjson.null then return default end
  return tonumber(value)
end

-- Store a new task; returns an error pair or nil. The envelope stays the text it came as.
local function add(P, envelope, max_attempts, now)
  local task = cjson.decode(envelope)
  local id, agent, parent = task.id, task.agent, text(task.parent)
  if redis.call('EXISTS', P .. ':t:' .. id) == 1 then return nil end
  local budget = P .. ':b:' .. task.root
  if parent == '' then
    redis.call('HSET', budget, 'max_tokens', text(task.budget.tokens), 'max_usd', text(task.budget.usd),
      'max_hops', text(task.budget.hops))
  end
  redis.call('HINCRBY', budget, 'hops', 1)
  local conversation = text(task.conversation)
  if parent ~= '' then
    conversation = ''
    redis.call('SADD', P .. ':c:' .. parent, id)
    redis.call('SADD', P .. ':p:' .. parent, id)
  end
  local created = math.floor(number(task.created, now / 1000) * 1000)
  local priority = math.max(-100, math.min(100, number(task.priority, 0)))
  redis.call('HSET', P .. ':t:' .. id, 'envelope', envelope, 'agent', agent, 'tenant', task.tenant,
    'conversation', conversation, 'parent', parent, 'root', task.root, 'priority', priority,
    'created', created, 'attempt', 0, 'tries', 0, 'max', number(task.max_attempts, max_attempts),
    'owner', '', 'result', '', 'error', '', 'updated', now, 'state', 'queued')
  redis.call('HINCRBY', P .. ':open', agent, 1)
  local deadline = number(task.deadline, 0)
  if deadline > 0 then redis.call('ZADD', P .. ':deadlines', deadline * 1000, id) end
  local first = true
  if conversation ~= '' then
    first = redis.call('RPUSH', conversation_key(P, agent, task.tenant, conversation), id) == 1
  end
  local due = number(task.not_before, 0) * 1000
  if due > now then
    redis.call('HSET', P .. ':t:' .. id, 'state', 'scheduled')
    redis.call('ZADD', P .. ':delayed', due, id)
  elseif first then
    make_ready(P, id, agent, priority, created)
  end
  return nil
end

local function hops_left(P, root, wanted)
  local b = redis.call('HMGET', P .. ':b:' .. root, 'hops', 'max_hops')
  if not b[2] or b[2] == '' then return true end
  return tonumber(b[1] or 0) + wanted <= tonumber(b[2])
end

-- 'ok' when the caller holds the lease, else why not.
local function fence(P, id, attempt)
  local f = get(P, id, 'state', 'attempt')
  if not f[1] then return 'missing' end
  if f[1] == 'cancelled' then return 'cancelled' end
  if f[1] ~= 'leased' or f[2] ~= attempt then return 'stale' end
  return 'ok'
end

local function submit(keys, args)
  local P, now = keys[1], now_ms()
  local envelope, max_attempts, max_depth, retain = args[1], args[2], tonumber(args[3]), args[4]
  local task = cjson.decode(envelope)
  local idempotency = text(task.idempotency_key)
  local ikey = P .. ':i:' .. task.tenant .. '\0' .. task.agent .. '\0' .. idempotency
  if idempotency ~= '' then
    local known = redis.call('GET', ikey)
    if known and redis.call('EXISTS', P .. ':t:' .. known) == 1 then return {'ok', known} end
  end
  if redis.call('EXISTS', P .. ':t:' .. task.id) == 1 then return {'ok', task.id} end
  local depth = tonumber(redis.call('HGET', P .. ':open', task.agent) or 0)
  if depth >= max_depth then return {'full', tostring(depth)} end
  if task.root ~= task.id and not hops_left(P, task.root, 1) then return {'budget', 'hops'} end
  add(P, envelope, max_attempts, now)
  if idempotency ~= '' then redis.call('SET', ikey, task.id, 'PX', retain) end
  return {'ok', task.id}
end

-- What time has done: leases that ended, delays that are over, deadlines that passed.
local function sweep(P, now, retain)
  for _, id in ipairs(redis.call('ZRANGE', P .. ':leases', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    local f = get(P, id, 'attempt', 'owner', 'tries', 'max')
    redis.call('ZREM', P .. ':leases', id)
    if f[1] then
      remember(P, id, f[1], f[2], now, 'lost', 'lease expired')
      if tonumber(f[3]) >= tonumber(f[4]) then
        finish(P, id, 'dead', '', 'lease expired on attempt ' .. f[3] .. ' of ' .. f[4], now, retain)
      else
        redis.call('HSET', P .. ':t:' .. id, 'owner', '', 'updated', now)
        ready_again(P, id)
      end
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', P .. ':delayed', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    redis.call('ZREM', P .. ':delayed', id)
    local f = get(P, id, 'agent', 'tenant', 'conversation', 'state')
    if f[4] and not TERMINAL[f[4]] then
      local head = id
      if f[3] ~= '' then head = redis.call('LINDEX', conversation_key(P, f[1], f[2], f[3]), 0) end
      if head == id then ready_again(P, id) else redis.call('HSET', P .. ':t:' .. id, 'state', 'queued') end
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', P .. ':deadlines', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    redis.call('ZREM', P .. ':deadlines', id)
    local f = get(P, id, 'state', 'attempt', 'owner')
    -- A leased task is its host's to end; the host knows the deadline too.
    if f[1] and not TERMINAL[f[1]] and f[1] ~= 'leased' then
      remember(P, id, f[2], f[3], now, 'deadline', 'deadline exceeded')
      finish(P, id, 'failed', '', 'deadline exceeded while ' .. f[1], now, retain)
    end
  end
end

local function lease_one(P, agent, owner, expires, now)
  local popped = redis.call('ZPOPMIN', P .. ':r:' .. agent)
  if not popped[1] then
    redis.call('ZREM', P .. ':ready', agent)
    return nil
  end
  local id = popped[1]
  local key = P .. ':t:' .. id
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HINCRBY', key, 'tries', 1)
  redis.call('HSET', key, 'state', 'leased', 'owner', owner, 'updated', now)
  redis.call('ZADD', P .. ':leases', expires, id)
  return {redis.call('HGET', key, 'envelope'), attempt, redis.call('HGETALL', P .. ':j:' .. id)}
end

local function lease(keys, args)
  local P, now = keys[1], now_ms()
  local owner, lease_ms, count, retain = args[1], tonumber(args[2]), tonumber(args[3]), args[4]
  sweep(P, now, retain)
  local agents = {}
  if #args > 4 then
    for i = 5, #args do agents[#agents + 1] = args[i] end
  else
    agents = redis.call('ZRANGE', P .. ':ready', 0, -1)
  end
  local found, served = {}, 0
  local expires = now + lease_ms
  repeat  -- one of each agent a round, so that a deep mailbox starves nobody
    local any = false
    for _, agent in ipairs(agents) do
      if #found < count then
        local one = lease_one(P, agent, owner, expires, now)
        if one then
          found[#found + 1] = one
          any = true
          served = served + 1
          redis.call('ZADD', P .. ':ready', 'XX', now + served / 1e4, agent)
        end
      end
    end
  until not any or #found >= count
  local due = redis.call('ZRANGE', P .. ':delayed', 0, 0, 'WITHSCORES')
  return {now, expires, found, due[2] and tostring(due[2]) or ''}
end

local function renew(keys, args)
  local P, now = keys[1], now_ms()
  local state = fence(P, args[1], args[2])
  if state ~= 'ok' then return {state} end
  local expires = now + tonumber(args[3])
  redis.call('ZADD', P .. ':leases', expires, args[1])
  return {'ok', tostring(expires)}
end

-- Charge a root; returns which limit is passed, if one is.
local function charge(P, id, usage)
  if usage == '' then return nil end
  local root = get(P, id, 'root')[1]
  local b = P .. ':b:' .. root
  for name, amount in pairs(cjson.decode(usage)) do
    redis.call('HINCRBYFLOAT', b, name, amount)
    redis.call('HINCRBYFLOAT', P .. ':t:' .. id, 'u:' .. name, amount)
  end
  for _, name in ipairs({'tokens', 'usd'}) do
    local f = redis.call('HMGET', b, name, 'max_' .. name)
    if f[1] and f[2] and f[2] ~= '' and tonumber(f[1]) > tonumber(f[2]) then return name end
  end
  return nil
end

local function record(keys, args)
  local P, id = keys[1], args[1]
  local state = fence(P, id, args[2])
  if state ~= 'ok' then return {state} end
  redis.call('HSET', P .. ':j:' .. id, args[3], args[4])
  local over = charge(P, id, args[5])
  if over then return {'budget', over} end
  return {'ok'}
end

local function wait_on(keys, args)
  local P, now = keys[1], now_ms()
  local id, attempt, till, max_attempts = args[1], args[2], args[3], args[4]
  local state = fence(P, id, attempt)
  if state ~= 'ok' then return {state} end
  local fresh = 0
  for i = 5, #args do
    if redis.call('EXISTS', P .. ':t:' .. cjson.decode(args[i]).id) == 0 then fresh = fresh + 1 end
  end
  if not hops_left(P, get(P, id, 'root')[1], fresh) then return {'budget', 'hops'} end
  for i = 5, #args do add(P, args[i], max_attempts, now) end
  local key = P .. ':t:' .. id
  redis.call('ZREM', P .. ':leases', id)
  -- A wait is no failure: the attempt it ends does not count against the limit.
  redis.call('HINCRBY', key, 'tries', -1)
  redis.call('HSET', key, 'state', 'waiting', 'owner', '', 'updated', now)
  local open = redis.call('EXISTS', P .. ':p:' .. id) == 1
  if till ~= '' then
    redis.call('ZADD', P .. ':delayed', tonumber(till) * 1000, id)
  elseif not open then
    ready_again(P, id)
  end
  return {'ok'}
end

local function complete(keys, args)
  local P, now = keys[1], now_ms()
  local id, attempt, state = args[1], args[2], args[3]
  local result, err, usage, retain, max_attempts = args[4], args[5], args[6], args[7], args[8]
  local held = fence(P, id, attempt)
  if held ~= 'ok' then return {held} end
  local writes, at = tonumber(args[9]), 10
  for i = 1, writes do  -- board writes: key, expected version or '', value or '', ttl or ''
    local key, expect = args[at], args[at + 1]
    local version = redis.call('HGET', key, 'version') or '0'
    if expect ~= '' and expect ~= version then return {'conflict', key, version} end
    at = at + 4
  end
  at = 10
  for i = 1, writes do
    local key, value, ttl = args[at], args[at + 2], args[at + 3]
    local version = redis.call('HINCRBY', key, 'version', 1)
    redis.call('HSET', key, 'value', value)
    if ttl ~= '' then redis.call('PEXPIRE', key, ttl) else redis.call('PERSIST', key) end
    redis.call('PUBLISH', P .. ':board', key .. '\0' .. version)
    at = at + 4
  end
  for i = at, #args do add(P, args[i], max_attempts, now) end
  charge(P, id, usage)
  remember(P, id, attempt, get(P, id, 'owner')[1], now, state, err ~= '' and err or nil)
  finish(P, id, state, result, err, now, retain)
  return {'ok'}
end

local function retry(keys, args)
  local P, now = keys[1], now_ms()
  local id, attempt, err, delay, retain = args[1], args[2], args[3], tonumber(args[4]), args[5]
  local held = fence(P, id, attempt)
  if held ~= 'ok' then return {held} end
  local f = get(P, id, 'tries', 'max', 'owner')
  remember(P, id, attempt, f[3], now, 'retry', err)
  if tonumber(f[1]) >= tonumber(f[2]) then
    finish(P, id, 'dead', '', err, now, retain)
    return {'ok', 'dead'}
  end
  redis.call('ZREM', P .. ':leases', id)
  redis.call('ZADD', P .. ':delayed', now + delay, id)
  redis.call('HSET', P .. ':t:' .. id, 'state', 'scheduled', 'owner', '', 'updated', now, 'error', err)
  return {'ok', 'scheduled'}
end

local function release(keys, args)
  local P, id = keys[1], args[1]
  local held = fence(P, id, args[2])
  if held ~= 'ok' then return {held} end
  redis.call('ZREM', P .. ':leases', id)
  redis.call('HINCRBY', P .. ':t:' .. id, 'tries', -1)
  redis.call('HSET', P .. ':t:' .. id, 'owner', '')
  ready_again(P, id)
  return {'ok'}
end

local function cancel_tree(P, id, reason, now, retain)
  local f = get(P, id, 'state', 'attempt', 'owner')
  if not f[1] then return end
  if not TERMINAL[f[1]] then
    remember(P, id, f[2], f[3], now, 'cancelled', reason)
    finish(P, id, 'cancelled', '', reason, now, retain)
  end
  for _, child in ipairs(redis.call('SMEMBERS', P .. ':c:' .. id)) do
    cancel_tree(P, child, reason, now, retain)
  end
end

local function cancel(keys, args)
  cancel_tree(keys[1], args[1], args[2], now_ms(), args[3])
  return {'ok'}
end

local function requeue(keys, args)
  local P, now = keys[1], now_ms()
  local f = get(P, args[1], 'state', 'agent')
  if f[1] ~= 'dead' then return {'stale'} end
  local key = P .. ':t:' .. args[1]
  redis.call('ZREM', P .. ':dead:' .. f[2], args[1])
  redis.call('HSET', key, 'tries', 0, 'error', '', 'updated', now)
  redis.call('HINCRBY', P .. ':open', f[2], 1)
  for _, part in ipairs({'t', 'j', 'h', 'c', 'p'}) do
    redis.call('PERSIST', P .. ':' .. part .. ':' .. args[1])
  end
  ready_again(P, args[1])
  return {'ok'}
end

redis.register_function('hybrid1_submit', submit)
redis.register_function('hybrid1_lease', lease)
redis.register_function('hybrid1_renew', renew)
redis.register_function('hybrid1_record', record)
redis.register_function('hybrid1_wait_on', wait_on)
redis.register_function('hybrid1_complete', complete)
redis.register_function('hybrid1_retry', retry)
redis.register_function('hybrid1_release', release)
redis.register_function('hybrid1_cancel', cancel)
redis.register_function('hybrid1_requeue', requeue)
