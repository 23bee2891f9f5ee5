"""Faults: how each is put into a running job by real means, and what has to come of it. See chaos.py beside."""
