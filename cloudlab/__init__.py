"""CloudLab: the RSpec that asks for nodes, the manifest that names them, their boot script; and the box."""
