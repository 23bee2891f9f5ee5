"""By which address the nodes of a run find node 0, where neither hosts nor user say. Pure."""

from collections.abc import Sequence

from muster.jobs.basics.errors import RefusedError
from muster.jobs.machine import network


def own_address(host: str, greeted: str, addresses: Sequence[Sequence[str]], iface: str | None) -> str:
    """Return the address by which the other nodes reach node 0. Pure.

    `greeted` is the one that it was reached by from here, `addresses` what it has, `iface` the user's choice.

    Raises:
        RefusedError: there is none that the others could use.
    """
    if iface:
        chosen = network.choose(addresses, iface)
        if chosen is None:
            found = ", ".join(f"{name} {address}" for name, address in addresses) or "none"
            raise RefusedError(f"{host}: --iface {iface}: no such network here; it has {found}")
        return chosen[1]
    if not greeted or greeted.startswith("127.") or ":" in greeted:
        raise RefusedError(
            f"{host}: cannot tell by which address the other nodes reach it (found {greeted or 'none'}); give it with "
            "--master-addr, or write address=10.10.1.1 beside it in the hosts file"
        )
    return greeted
