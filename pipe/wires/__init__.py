"""Transports between the ranks of a pipeline, and the report of a failed rank to all others."""
