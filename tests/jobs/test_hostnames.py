"""The grammar of host names, users and jump hosts: no shell text, no options, no letters that look like others."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.hostnames import check_jump, check_name, check_network, check_user, is_numeric
from muster.jobs.hosts.hosts import from_nodelist, parse_hostfile
from muster.jobs.hosts.placement import Login
from muster.jobs.spec.site import SshSettings

SHELL_TEXT = ["$(touch${IFS}/x)", ";id;", "a b", "a;b", "`id`", "-oProxyCommand=x", "a\nb", "a&b", "x|y", "~", "*", "'"]
LOOKALIKES = ["node\uff11", "n\u0661", "nöde", "\u202enode", "no\u200bde", "node\x1b[0m", "\u0430dmin"]


@pytest.mark.parametrize("name", ["n1", "node0.lab.example.org", "10.0.0.1", "fd00::7", "fe80::1%eth0", "a_b-c", "_x"])
def test_names_and_addresses_are_host_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", *SHELL_TEXT, *LOOKALIKES, "fe80::1%$(id)", "fe80::1%", "10.0.0.1%eth0", "1.2.3.\uff14", "n" * 254]
)
def test_what_a_shell_or_a_reader_takes_for_more_is_no_host_name(name: str) -> None:
    with pytest.raises(UsageError, match="wanted"):
        check_name(name)
    assert not is_numeric(name)
    with pytest.raises(UsageError):
        Login(name)


@pytest.mark.parametrize("user", ["alice", "a.b-c_d", "_apt", "A1", "u1234567", "1234567"])
def test_names_of_users_are_taken(user: str) -> None:
    assert check_user(user) == user


@pytest.mark.parametrize("user", ["", *SHELL_TEXT, *LOOKALIKES, "user=;id;", "alice$", "a@b", "x" * 65, "DOM\\alice"])
def test_what_a_shell_or_a_reader_takes_for_more_is_no_user(user: str) -> None:
    with pytest.raises(UsageError, match="is no user name; wanted letters"):
        check_user(user)
    with pytest.raises(UsageError):
        Login("n0", user)


@pytest.mark.parametrize(
    "jump",
    [
        "gate",
        "alice@gate:2222",
        "[::1]:2222",
        "::1",
        "alice@[fe80::1%eth0]:22",
        "a,b@c:22",
        "ssh://alice@gate:22",
        "none",
    ],
)
def test_hosts_to_go_through_are_taken_as_ssh_takes_them(jump: str) -> None:
    assert check_jump(jump) == jump


@pytest.mark.parametrize(
    "jump",
    ["", *SHELL_TEXT, *LOOKALIKES, "gate:0", "gate:65536", "gate:\uff12", "a,,b", "$(x)@gate", "[$(x)]:22", "[::1"],
)
def test_what_a_shell_takes_for_more_is_no_jump_host(jump: str) -> None:
    with pytest.raises(UsageError, match="wanted"):
        check_jump(jump)


@given(st.text(max_size=30) | st.from_regex(r"[a-z@:\[\]%./0-9,-]{1,30}", fullmatch=True))
def test_every_accepted_name_is_one_word_to_a_shell_and_no_option(text: str) -> None:
    for check in (check_name, check_user, check_jump):
        try:
            check(text)
        except UsageError:
            continue
        words = shlex.split(text.replace("[", "").replace("]", ""))  # brackets of IPv6 are no file names here
        assert words == [text.replace("[", "").replace("]", "")]
        assert not text.startswith("-")
        assert text.isascii()


@pytest.mark.parametrize(
    "line",
    ["$(touch${IFS}/x)@h1", "h1 user=;id;", "h1 ssh=$(id)", "h\uff11", "h1 address=fe80::1%$(id)", "h1 port=\uff12"],
)
def test_a_hosts_file_with_shell_text_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(JobFileError, match=r"^hosts:2: [^\n]*$"):
        parse_hostfile(f"h0\n{line}\n", "hosts")


def test_a_node_list_with_shell_text_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^node list: .* is no user name"):
        from_nodelist("$(touch${IFS}/x)@h1")


@pytest.mark.parametrize("settings", [{"user": "user=;id;"}, {"user": "$(id)"}, {"jump": "$(id)"}, {"jump": "a b"}])
def test_a_site_file_with_shell_text_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        SshSettings(**settings)


@pytest.mark.parametrize("given", ["eth1", "ib0.8001", "eth0:1", "10.10.1.0/24", "10.10.1.7/24", "fd00::/64"])
def test_interfaces_and_cidrs_are_networks(given: str) -> None:
    assert check_network(given) == given


@pytest.mark.parametrize("given", ["10.0.0.0/99", "10.10.1.1", "a/b", "", "eth 1", "an-interface-of-more-than-15"])
def test_anything_else_is_no_network(given: str) -> None:
    with pytest.raises(
        UsageError, match=r"is no interface and no network; wanted a name such as eth1, or 10\.10\.1\.0"
    ):
        check_network(given)
