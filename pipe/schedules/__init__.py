"""Schedules of pipelines as pure tables: who does what in which order, what is sent, how long it takes. No torch."""
