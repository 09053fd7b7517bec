"""The cluster: checks of cluster.yaml, and both pools on one machine."""
