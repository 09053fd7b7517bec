"""Thirty workloads: what each is, the answer, and the rules that must have led to it."""

from __future__ import annotations

from typing import Any

GIANT: dict[str, Any] = {"parameters": "405B", "tokens": "15T"}
CHAT: dict[str, Any] = {"weights": "api", "requests_per_s": 2}
SMALL: dict[str, Any] = {"parameters": "7B", "requests_per_s": 5}
LARGE: dict[str, Any] = {"parameters": "405B", "requests_per_s": 5}

Case = tuple[str, dict[str, Any], str, set[str]]
CASES: list[Case] = [
    # What practice knows
    ("one giant model", {"train": GIANT}, "cluster", {"train"}),
    ("serve one large model", {"serve": LARGE}, "cluster", {"large-model"}),
    ("multi-skill reasoning", {"serve": CHAT, "skills": 6, "steps": 4}, "agents", {"steps"}),
    ("new types daily", {"serve": SMALL, "changes_per_month": 30}, "agents", {"changes"}),
    ("spot budget", {"serve": SMALL, "budget": {"market": "spot"}}, "agents", {"spot-budget"}),
    ("under 500 ms", {"serve": SMALL, "skills": 3, "steps": 2, "latency": {"limit_ms": 300}},
     "cluster", {"steps", "latency"}),
    ("one transform", {"serve": SMALL}, "single", set()),
    ("a base, many specialists",
     {"train": {**GIANT, "specialists": 12}, "serve": LARGE, "steps": 3}, "hybrid",
     {"train", "large-model", "specialists", "steps"}),
    # Training
    ("a small base", {"train": {"parameters": "5M", "tokens": "1.4M"}}, "cluster", {"train"}),
    ("a base and one adapter", {"train": {**GIANT, "specialists": 1}}, "cluster", {"train"}),
    ("a base, specialists, nothing served", {"train": {**GIANT, "specialists": 3}}, "hybrid",
     {"train", "specialists"}),
    ("a base on spot machines", {"train": GIANT, "budget": {"usd": 1e6, "market": "spot"}},
     "cluster", {"train"}),
    ("a base whose types change", {"train": GIANT, "changes_per_month": 8}, "hybrid",
     {"train", "changes"}),
    ("train and answer at once", {"train": GIANT, "serve": LARGE}, "cluster",
     {"train", "large-model"}),
    ("a base, specialists, in 200 ms",
     {"train": {**GIANT, "specialists": 12}, "serve": SMALL, "latency": {"limit_ms": 200}},
     "cluster", {"train", "specialists", "latency"}),
    # Serving
    ("a model on an H200 that fits", {"serve": {"parameters": "50B", "requests_per_s": 1},
     "cluster": {"gpu": "H200"}}, "single", set()),
    ("the same on an L4", {"serve": {"parameters": "50B", "requests_per_s": 1},
     "cluster": {"gpu": "L4", "usd_per_hour": 6}}, "cluster", {"large-model"}),
    ("a transform in 100 ms", {"serve": SMALL, "latency": {"limit_ms": 100}}, "single",
     {"latency"}),
    ("a transform over an API", {"serve": CHAT}, "single", set()),
    ("skills without steps", {"serve": SMALL, "skills": 12}, "single", set()),
    ("busy replicas", {"serve": {**SMALL, "requests_per_s": 90, "calls_per_replica_s": 10}},
     "cluster", {"busy-replicas"}),
    ("one quiet replica", {"serve": {**SMALL, "calls_per_replica_s": 10}}, "single", set()),
    ("a large model on spot", {"serve": LARGE, "budget": {"market": "spot"}}, "cluster",
     {"large-model"}),
    ("a large model, many steps", {"serve": LARGE, "steps": 5, "skills": 5}, "hybrid",
     {"large-model", "steps"}),
    # Agents
    ("one skill in a loop", {"serve": CHAT, "steps": 8}, "agents", {"steps"}),
    ("weekly types", {"serve": CHAT, "changes_per_month": 4}, "agents", {"changes"}),
    ("quarterly types", {"serve": CHAT, "changes_per_month": 0.33}, "single", set()),
    ("hops over the limit", {"serve": CHAT, "steps": 2, "latency": {"limit_ms": 1000, "hops": [
        {"name": "search", "p50_ms": 400, "p99_ms": 1500},
        {"name": "model", "p50_ms": 900, "p99_ms": 4000}]}}, "cluster", {"steps", "chain-latency"}),
    ("hops within the limit", {"serve": CHAT, "steps": 2, "latency": {"limit_ms": 9000, "hops": [
        {"name": "search", "p50_ms": 400, "p99_ms": 1500},
        {"name": "model", "p50_ms": 900, "p99_ms": 4000}]}}, "agents", {"steps"}),
    ("only rented", {"cluster": {"gpus": 64}, "agents": {"nodes": 50}}, "hybrid",
     {"rented-gpus", "rented-nodes"}),
]  # fmt: skip
