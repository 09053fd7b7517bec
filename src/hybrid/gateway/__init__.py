"""The gateway: the HTTP endpoint, and the only room that knows both serving and agents."""
