"""The environment variables with which an agent proves itself. Every agent imports this before it greets."""

SECRET = "MUSTER_SECRET"  # the run's: the key of every node follows from it
KEY = "MUSTER_KEY"  # this node's
