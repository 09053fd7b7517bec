"""Serving: the Backend protocol, and the deployment that puts one behind Ray Serve."""
