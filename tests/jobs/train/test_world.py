import pytest

from jobs.errors import RefusedError
from jobs.train.world import check_interfaces


def test_an_interface_that_is_not_there_is_refused_before_gloo_fails_over_it() -> None:
    with pytest.raises(
        RefusedError, match=r"^environment: GLOO_SOCKET_IFNAME=nope0: .* has no interface 'nope0'; .*lo"
    ):
        check_interfaces("nope0")
    with pytest.raises(RefusedError, match="nope1"):
        check_interfaces("lo,nope1")


@pytest.mark.parametrize("named", ["lo", "lo,lo", ""])
def test_interfaces_that_are_there_pass(named: str) -> None:
    check_interfaces(named)
