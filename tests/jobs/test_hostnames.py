"""The grammar of host names, users and jump hosts: no shell text, no options, no letters that look like others."""

import shlex
from collections.abc import Callable

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


TAKEN = {
    check_name: ["n1", "node0.lab.example.org", "10.0.0.1", "fd00::7", "fe80::1%eth0", "a_b-c", "_x"],
    check_user: ["alice", "a.b-c_d", "_apt", "A1", "u1234567", "1234567"],
    check_jump: [
        *("gate", "alice@gate:2222", "[::1]:2222", "::1", "alice@[fe80::1%eth0]:22", "a,b@c:22"),
        *("ssh://alice@gate:22", "none"),
    ],
    check_network: ["eth1", "ib0.8001", "eth0:1", "10.10.1.0/24", "10.10.1.7/24", "fd00::/64"],
}
REFUSED = {
    check_name: ["", "fe80::1%$(id)", "fe80::1%", "10.0.0.1%eth0", "1.2.3.\uff14", "n" * 254],
    check_user: ["", "user=;id;", "alice$", "a@b", "x" * 65, "DOM\\alice"],
    check_jump: ["", "gate:0", "gate:65536", "gate:\uff12", "a,,b", "$(x)@gate", "[$(x)]:22", "[::1"],
    check_network: ["10.0.0.0/99", "10.10.1.1", "a/b", "", "eth 1", "an-interface-of-more-than-15"],
}
WANTED = {
    check_name: "expected",
    check_user: "is not a user name; expected letters",
    check_jump: "expected",
    check_network: r"is neither an interface nor a network; expected a name such as eth1, or 10\.10\.1\.0",
}


@pytest.mark.parametrize(("check", "text"), [(check, text) for check, texts in TAKEN.items() for text in texts])
def test_names_as_the_programs_that_use_them_take_them_are_taken(check: Callable[[str], str], text: str) -> None:
    assert check(text) == text


@pytest.mark.parametrize(
    ("check", "text"),
    [(check, text) for check, texts in REFUSED.items() for text in (*texts, *SHELL_TEXT, *LOOKALIKES)],
)
def test_what_a_shell_or_a_reader_takes_for_more_is_refused(check: Callable[[str], str], text: str) -> None:
    with pytest.raises(UsageError, match=WANTED[check]):
        check(text)
    if check is check_name:
        assert not is_numeric(text)
    if check in (check_name, check_user):
        with pytest.raises(UsageError):
            Login(*([text] if check is check_name else ["n0", text]))


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
    with pytest.raises(UsageError, match=r"^node list: .* is not a user name"):
        from_nodelist("$(touch${IFS}/x)@h1")


@pytest.mark.parametrize("settings", [{"user": "user=;id;"}, {"user": "$(id)"}, {"jump": "$(id)"}, {"jump": "a b"}])
def test_a_site_file_with_shell_text_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        SshSettings(**settings)
