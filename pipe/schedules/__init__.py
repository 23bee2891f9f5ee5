"""Pipeline schedules as pure tables: the order of actions on each rank, messages, simulated times. No torch."""
