"""CloudLab: the RSpec that requests nodes, the manifest that lists them, and their boot script.

It also contains `muster box`, a cluster simulated on one machine.
"""
