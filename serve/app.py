"""The endpoint for `serve run serve.app:build config=examples/legal/hybrid.yaml`."""

from hybrid.gateway.app import build

__all__ = ["build"]
