"""Find the address of node 0 for the other nodes, if neither the hosts file nor the user gives one. Pure."""

from collections.abc import Sequence

from muster.jobs.basics.errors import RefusedError
from muster.jobs.machine import network


def own_address(host: str, greeted: str, addresses: Sequence[Sequence[str]], iface: str | None) -> str:
    """Return the address at which the other nodes reach node 0. Pure.

    `greeted`: the address at which the supervisor reached node 0; `addresses`: (interface, address) pairs of node 0;
    `iface`: the interface or network that the user chose.

    Raises:
        RefusedError: if node 0 has no address that the other nodes could use.
    """
    if iface:
        chosen = network.choose(addresses, iface)
        if chosen is None:
            found = ", ".join(f"{name} {address}" for name, address in addresses) or "none"
            raise RefusedError(f"{host}: --iface {iface}: this host has no such network; it has {found}")
        return chosen[1]
    if not greeted or greeted.startswith("127.") or ":" in greeted:
        raise RefusedError(
            f"{host}: its address for the other nodes is unknown (found {greeted or 'none'}); set it with "
            "--master-addr, or write address=10.10.1.1 beside the host in the hosts file"
        )
    return greeted
