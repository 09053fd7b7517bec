"""The inference engine: continuous batching over heterogeneous LoRA adapters, without Ray."""
