"""Planning: what a workload needs, what it costs, and what was true of it afterwards."""
