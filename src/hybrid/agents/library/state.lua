-- A task's states and how it moves between them. The parts of the library are one text in the store.
--
-- Everything runs inside one `hybrid1_batch` call. `c` is what all of a call's operations share:
-- c.P    the partition's prefix, `hybrid:{hN}`: every key starts with it, so all of them share its
--        hash slot and a call is safe on a cluster
-- c.now  milliseconds of the server's clock; c.shift is what to add to the caller's clock
-- c.retain, c.attempts, c.depth, c.tenant_depth, c.events, c.steps: the caller's limits
--
--   t:ID   hash    envelope, state, attempt (fencing token), tries (counted attempts), owner, …
--   j:ID   hash    journal: finished steps, children's outcomes by child id, signals by name
--   h:ID   list    history: one JSON object an attempt
--   c:ID   set     children waited for      p:ID  set   those not finished yet
--   r:AGENT zset   ready, by priority then age
--   ready  zset    agents that have ready tasks, by when they were last served
--   delayed, leases, deadlines  zset  ids by time
--   q:…    list    one conversation's tasks in order; only the first may run
--   i:…    string  idempotency key → id
--   b:ROOT hash    what a root and all beneath it have spent, and may spend
--   e:ROOT stream  what happens to a root and all beneath it
--   open, tenants  hash  unfinished tasks an agent; unfinished root tasks a tenant
--   dead:AGENT zset the dead letter
--   recurring zset, recur:NAME hash  schedules by when they are next due
--   resting hash   hosts that wait for work: owner → free slots, lease (ms), whether it takes any
--                  agent's task (1) or has to look for itself what it has room for (0)
-- Channels: P:ended and P:ended:inner ("ID STATE" of roots and of children), P:host:OWNER
-- ("wake N", "lease JSON", "cancel ID"), P:to:WAITER (a finished task, whole, to who waits for it), P:board.

local TERMINAL = {done = true, failed = true, cancelled = true, dead = true}
local HISTORY = 100
local ANSWER = 16384  -- bytes of a result that is sent rather than fetched
local DEAD = 10000

local function get(c, id, ...)
  return redis.call('HMGET', c.P .. ':t:' .. id, ...)
end

local function text(value)
  if value == nil or value == cjson.null then return '' end
  return tostring(value)
end

local function number(value, default)
  if value == nil or value == cjson.null then return default end
  return tonumber(value)
end

-- Tell a root's listeners, at the end of the call. `more` is JSON: the rest of the event.
local function event(c, root, id, agent, attempt, more)
  if c.events == 0 then return end
  local news = c.news[root]
  if not news then
    news = {}
    c.news[root] = news
  end
  news[#news + 1] = '{"task":"' .. id .. '","agent":' .. cjson.encode(agent) .. ',"attempt":'
    .. attempt .. ',' .. more .. '}'
end

-- One entry a root and call, whatever happened in it.
local function tell(c)
  for root, news in pairs(c.news) do
    local key = c.P .. ':e:' .. root
    redis.call('XADD', key, 'MAXLEN', '~', c.events, '*', 'd', '[' .. table.concat(news, ',') .. ']')
    if c.ended[root] then redis.call('PEXPIRE', key, c.retain) end
  end
end

local function state_event(c, root, id, agent, attempt, state, err)
  local more = '"event":"state","state":"' .. state .. '"'
  if err and err ~= '' then more = more .. ',"error":' .. cjson.encode(err) end
  event(c, root, id, agent, attempt, more)
end

-- One sleeping host hears that there is work. `turn` counts how often this wake was handed on.
local function wake_one(c, turn)
  while true do
    local owner = redis.call('HRANDFIELD', c.P .. ':resting')
    if not owner then return end
    redis.call('HDEL', c.P .. ':resting', owner)
    if redis.call('PUBLISH', c.P .. ':host:' .. owner, 'wake ' .. turn) > 0 then return end
  end
end

local function conversation_key(c, agent, tenant, conversation)
  return c.P .. ':q:' .. agent .. '\0' .. tenant .. '\0' .. conversation
end

-- Put a task, whose state says so already, where a lease finds it.
local function line_up(c, id, agent, priority, since)
  redis.call('ZADD', c.P .. ':r:' .. agent, since - priority * 1e13, id)
  if not c.lively[agent] then
    c.lively[agent] = true
    redis.call('ZADD', c.P .. ':ready', 'NX', 0, agent)
  end
  c.lined = c.lined + 1  -- hosts are woken at the end, unless a lease in this call takes it
end

local function ready_again(c, id)
  local f = get(c, id, 'agent', 'priority', 'since')
  redis.call('HSET', c.P .. ':t:' .. id, 'state', 'queued', 'owner', '', 'ready_at', c.now)
  line_up(c, id, f[1], tonumber(f[2]), tonumber(f[3]))
end

-- An agent has no more ready tasks.
local function idle(c, agent)
  c.lively[agent] = nil
  redis.call('ZREM', c.P .. ':ready', agent)
end

local function leave_ready(c, id, agent)
  if redis.call('ZREM', c.P .. ':r:' .. agent, id) == 1
      and redis.call('EXISTS', c.P .. ':r:' .. agent) == 0 then
    idle(c, agent)
  end
end

local function remember(c, id, attempt, host, outcome, err)
  local key = c.P .. ':h:' .. id
  if redis.call('RPUSH', key, cjson.encode({
    attempt = tonumber(attempt), host = host or '', at = c.now / 1000, outcome = outcome,
    error = err or cjson.null
  })) > HISTORY then redis.call('LTRIM', key, -HISTORY, -1) end
end

-- Unfinished tasks, by agent (`open`) or tenant (`tenants`). What a call's operations add up to is
-- written once, at its end.
local function count(c, hash, field, by)
  c.counts[hash][field] = (c.counts[hash][field] or 0) + by
end

local function counted(c, hash, field)
  return tonumber(redis.call('HGET', c.P .. ':' .. hash, field) or 0) + (c.counts[hash][field] or 0)
end

-- What a root may spend and has spent: read once a call, and written once.
local function purse(c, root)
  local b = c.purses[root]
  if not b then
    local f = redis.call('HMGET', c.P .. ':b:' .. root, 'hops', 'tokens', 'usd', 'max_hops',
      'max_tokens', 'max_usd')
    b = {
      hops = tonumber(f[1] or 0), tokens = tonumber(f[2] or 0), usd = tonumber(f[3] or 0),
      max_hops = tonumber(f[4] or ''), max_tokens = tonumber(f[5] or ''),
      max_usd = tonumber(f[6] or '')
    }
    c.purses[root] = b
  end
  return b
end

local function put_back(c, root)
  local b = c.purses[root]
  if b and b.changed then
    b.changed = nil
    redis.call('HSET', c.P .. ':b:' .. root, 'hops', b.hops, 'tokens', b.tokens, 'usd', b.usd)
  end
end

-- The end of a call.
local function settle(c)
  for hash, counts in pairs(c.counts) do
    for field, by in pairs(counts) do
      if by ~= 0 then redis.call('HINCRBY', c.P .. ':' .. hash, field, by) end
    end
  end
  for root in pairs(c.purses) do put_back(c, root) end
end

-- When time next has something to do in a partition, as far as this server knows: never later
-- than the truth, but for what a former primary did, which a look each second finds.
local agenda = {}

local function at(c, set, score, member)
  redis.call('ZADD', c.P .. ':' .. set, score, member)
  local known = agenda[c.P]
  if known and score < known.due then known.due = score end
end

local finish

local function look(c, id)
  return get(c, id, 'agent', 'tenant', 'conversation', 'parent', 'root', 'state', 'owner', 'ikey',
    'attempt', 'timed', 'children', 'delegate', 'used', 'waiter', 'noted')
end

-- Keep an entry of a task's journal, if the name is new or may be replaced. Most tasks have none,
-- and nothing is asked about theirs.
local function note(c, id, name, value)
  local journal = c.P .. ':j:' .. id
  if redis.call('EXISTS', journal) == 0 then redis.call('HSET', c.P .. ':t:' .. id, 'noted', '1') end
  redis.call('HSET', journal, name, value)
end

-- The end of a task: out of every set, the next of its conversation in, its parent told. `f` is
-- what `look` saw of it. `used`: JSON of what was not charged to the task yet, or ''.
function finish(c, id, state, result, err, f, used)
  f = f or look(c, id)
  local P, key = c.P, c.P .. ':t:' .. id
  local agent, parent, before = f[1], f[4], f[6]
  redis.call('HSET', key, 'state', state, 'result', result, 'error', err, 'updated', c.now,
    'owner', '', 'used', used or '')
  if before == 'queued' then leave_ready(c, id, agent) end
  if before == 'leased' then redis.call('ZREM', P .. ':leases', id) end
  if before == 'scheduled' or before == 'waiting' and (f[12] or '') == '' then
    redis.call('ZREM', P .. ':delayed', id)
  end
  if f[10] == '1' then redis.call('ZREM', P .. ':deadlines', id) end
  count(c, 'open', agent, -1)
  if parent == '' then count(c, 'tenants', f[2], -1) end
  if state == 'dead' then
    local dead = P .. ':dead:' .. agent
    redis.call('ZADD', dead, c.now, id)
    redis.call('ZREMRANGEBYSCORE', dead, '-inf', c.now - c.retain)
    redis.call('ZREMRANGEBYRANK', dead, 0, -DEAD - 1)
  elseif state == 'cancelled' and before == 'leased' then
    redis.call('PUBLISH', P .. ':host:' .. f[7], 'cancel ' .. id)
  end
  if f[3] ~= '' then
    local q = conversation_key(c, agent, f[2], f[3])
    local first = redis.call('LINDEX', q, 0)
    redis.call('LREM', q, 1, id)
    local next_id = redis.call('LINDEX', q, 0)
    if first == id and next_id then
      if get(c, next_id, 'state')[1] == 'queued' then ready_again(c, next_id) end
    end
  end
  state_event(c, f[5], id, agent, f[9], state, err)
  redis.call('PEXPIRE', key, c.retain)
  if f[15] then redis.call('PEXPIRE', P .. ':j:' .. id, c.retain) end
  redis.call('PEXPIRE', P .. ':h:' .. id, c.retain)
  if f[11] then
    redis.call('PEXPIRE', P .. ':c:' .. id, c.retain)
    redis.call('PEXPIRE', P .. ':p:' .. id, c.retain)
  end
  if f[8] ~= '' then redis.call('PEXPIRE', f[8], c.retain) end
  if parent == '' then
    put_back(c, id)
    redis.call('PEXPIRE', P .. ':b:' .. id, c.retain)
    c.ended[id] = true
    redis.call('PUBLISH', P .. ':ended', id .. ' ' .. state)
    if f[14] and #result < ANSWER then
      redis.call('PUBLISH', P .. ':to:' .. f[14], cjson.encode({
        id, redis.call('HGETALL', key), redis.call('LRANGE', P .. ':h:' .. id, 0, -1)
      }))
    end
    return
  end
  redis.call('PUBLISH', P .. ':ended:inner', id .. ' ' .. state)
  local p = look(c, parent)
  local above = p[6]
  if not above or TERMINAL[above] then return end
  if above == 'waiting' and p[12] == id then  -- handed on: the child's end is the parent's
    remember(c, parent, p[9], '', state, err ~= '' and err or nil)
    finish(c, parent, state, result, err, p, p[13])
    return
  end
  redis.call('SREM', P .. ':p:' .. parent, id)
  local plain, ref = result, ''
  if result:sub(1, 1) == '@' then  -- kept as a blob: no JSON, but its reference
    plain, ref = '', ',"ref":' .. cjson.encode(result:sub(2))
  end
  note(c, parent, id, '{"state":"' .. state .. '"' .. ref .. ',"result":'
    .. (plain == '' and 'null' or plain) .. ',"error":'
    .. (err == '' and 'null' or cjson.encode(err)) .. '}')
  if above == 'waiting' and redis.call('EXISTS', P .. ':p:' .. parent) == 0 then
    redis.call('ZREM', P .. ':delayed', parent)
    ready_again(c, parent)
  end
end

-- The limit of a root that is reached, if one is, with `hops` more tasks beneath it.
local function over(c, root, hops)
  local b = purse(c, root)
  if b.max_hops and b.hops + hops > b.max_hops then return 'hops' end
  if b.max_tokens and b.tokens > b.max_tokens then return 'tokens' end
  if b.max_usd and b.usd > b.max_usd then return 'usd' end
  return nil
end

-- Charge a root; returns the limit that is passed, if one is, with `hops` more tasks beneath it.
local function charge(c, root, used, hops)
  if used ~= '' then
    local b = purse(c, root)
    for name, amount in pairs(cjson.decode(used)) do
      if name == 'tokens' or name == 'usd' then
        b[name] = b[name] + amount
        b.changed = true
      end
    end
  end
  return over(c, root, hops)
end

-- Store a new task, unless it is there. The envelope stays the text it came as. Times in it are of
-- the sender's clock; what counts is kept in the server's. `above` is the fence of a parent that
-- ends with it; `waited`: whether the parent needs to know its outcome.
local function add(c, envelope, task, fingerprint, ikey, above, waited)
  local P, id, agent, parent = c.P, task.id, task.agent, text(task.parent)
  local key, root = P .. ':t:' .. id, task.root
  if not above and redis.call('EXISTS', key) == 1 then return end
  local conversation = ''
  if parent == '' then
    conversation = text(task.conversation)
    redis.call('HSET', P .. ':b:' .. root, 'max_tokens', text(task.budget.tokens), 'max_usd',
      text(task.budget.usd), 'max_hops', text(task.budget.hops), 'hops', 1)
    c.purses[root] = nil
  elseif waited then
    redis.call('SADD', P .. ':c:' .. parent, id)
    redis.call('SADD', P .. ':p:' .. parent, id)
    redis.call('HSET', P .. ':t:' .. parent, 'children', '1')
  end
  if parent ~= '' then
    local b = purse(c, root)
    b.hops, b.changed = b.hops + 1, true
  end
  local priority = math.max(-100, math.min(100, number(task.priority, 0)))
  local deadline, timed = number(task.deadline, 0) * 1000, '0'
  if deadline > 0 then
    deadline = deadline + c.shift
    -- The deadline of who ends with it ends it too.
    if not above or above.deadline == 0 or deadline < above.deadline - 100 then
      at(c, 'deadlines', deadline, id)
      timed = '1'
    end
  end
  local due = number(task.not_before, 0) * 1000
  if due > 0 then due = due + c.shift end
  local state = due > c.now and 'scheduled' or 'queued'
  redis.call('HSET', key, 'envelope', envelope, 'agent', agent, 'tenant', task.tenant,
    'conversation', conversation, 'parent', parent, 'root', root, 'priority', priority,
    'since', c.now, 'attempt', 0, 'tries', 0, 'max', number(task.max_attempts, c.attempts),
    'deadline', deadline > 0 and string.format('%.0f', deadline) or '0', 'owner', '',
    'result', '', 'error', '', 'updated', c.now, 'state', state, 'ready_at', c.now,
    'fingerprint', fingerprint, 'ikey', ikey, 'timed', timed)
  count(c, 'open', agent, 1)
  if parent == '' then count(c, 'tenants', task.tenant, 1) end
  local first = true
  if conversation ~= '' then
    first = redis.call('RPUSH', conversation_key(c, agent, task.tenant, conversation), id) == 1
  end
  if state == 'scheduled' then
    at(c, 'delayed', due, id)
  elseif first then
    line_up(c, id, agent, priority, c.now)
  end
  event(c, root, id, agent, 0, '"event":"state","state":"' .. state .. '"')
end

-- 'ok' when the caller holds the lease, else why not; and what the caller needs of the task.
local function fence(c, id, attempt)
  local f = get(c, id, 'state', 'attempt', 'root', 'agent', 'owner', 'tries', 'max',
    'deadline')
  if not f[1] then return 'missing' end
  if f[1] == 'cancelled' then return 'cancelled' end
  if f[1] ~= 'leased' or f[2] ~= attempt then return 'stale' end
  return 'ok', {
    root = f[3], agent = f[4], owner = f[5], tries = tonumber(f[6]), max = tonumber(f[7]),
    deadline = tonumber(f[8])
  }
end
