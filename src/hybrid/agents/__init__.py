"""Agents: durable mailboxes, behaviours and the hosts that run them on cheap, reclaimable nodes."""
