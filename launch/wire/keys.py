"""The environment variables that contain an agent's key. Every agent imports this module before it greets."""

SECRET = "MUSTER_SECRET"  # the run's secret, from which the key of every node is derived
KEY = "MUSTER_KEY"  # this node's key
