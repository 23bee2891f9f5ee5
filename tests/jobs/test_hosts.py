"""Hosts files of every form, node lists as hosts, and the choice among them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.hostnames import is_numeric
from muster.jobs.hosts.hosts import choose, from_nodelist, hostfile_text, parse_hostfile, read_hostfile
from muster.jobs.hosts.placement import Host, Login


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("worker-0 slots=4\nworker-1 slots=2\n", [Host("worker-0", "", 4), Host("worker-1", "", 2)]),
        ("n0 slots=2 max_slots=4", [Host("n0", "", 2)]),
        ("n0 max-slots=8", [Host("n0", "")]),
        ("n0 slots = 3", [Host("n0", "", 3)]),
        ("n0:4\nn1:1", [Host("n0", "", 4), Host("n1", "", 1)]),
        ("# head\n\n  n0   # the first\n\tn1\n", [Host("n0", ""), Host("n1", "")]),
        ("b\na", [Host("b", ""), Host("a", "")]),
        ("a[08-10] slots=2", [Host("a08", "", 2), Host("a09", "", 2), Host("a10", "", 2)]),
        ("a,b slots=2", [Host("a", "", 2), Host("b", "", 2)]),
        ("alice@n[1-2]:3", [Host("n1", "", 3, Login("n1", "alice")), Host("n2", "", 3, Login("n2", "alice"))]),
        ("n0 user=alice port=2222", [Host("n0", "", None, Login("n0", "alice", 2222))]),
        ("n0 address=10.10.1.1", [Host("n0", "10.10.1.1")]),
        ("10.0.0.7 slots=1", [Host("10.0.0.7", "10.0.0.7", 1)]),
        ("10.0.0.7:2", [Host("10.0.0.7", "10.0.0.7", 2)]),
        ("fd00::7", [Host("fd00::7", "fd00::7")]),
        ("alice@10.0.0.7", [Host("10.0.0.7", "10.0.0.7", None, Login("10.0.0.7", "alice"))]),
        (
            "node0 address=10.10.1.1 ssh=pc1.example.org port=2222 user=alice slots=4",
            [Host("node0", "10.10.1.1", 4, Login("pc1.example.org", "alice", 2222))],
        ),
        ("n0\r\nn1\r\n", [Host("n0", ""), Host("n1", "")]),
    ],
)
def test_hosts_files_of_every_form_are_read(text: str, hosts: list[Host]) -> None:
    assert parse_hostfile(text, "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("", ["hosts: names no host; expected one per line, such as: node0 slots=4"]),
        ("# nothing\n\n", ["hosts: names no host; expected one per line, such as: node0 slots=4"]),
        ("n0\nn1\nn0 slots=2", ["hosts:3: n0 is already in line 1; list it once, with slots=N for several ranks"]),
        ("n[1-3]\nn2", ["hosts:2: n2 is already in line 1; list it once, with slots=N for several ranks"]),
        ("n0 slots=zwei", ["hosts:1: slots must be a number from 1 to 1000000, got 'zwei'"]),
        ("n0 slots=0", ["hosts:1: slots must be a number from 1 to 1000000, got '0'"]),
        ("n0 slots=-1", ["hosts:1: slots must be a number from 1 to 1000000, got '-1'"]),
        ("n0 slots=", ["hosts:1: slots= has no value; remove it, or give it one"]),
        ("n0 slots=1 slots=2", ["hosts:1: slots is given twice; keep one"]),
        ("n0:2 slots=2", ["hosts:1: slots is given twice: :2 and slots=2; keep one"]),
        ("n0 slots=4 max_slots=2", ["hosts:1: max_slots must be at least slots (4), got 2"]),
        ("n0 slotz=4", ["hosts:1: slotz: unknown key; did you mean 'slots'?"]),
        ("n0 gpus=4", ["hosts:1: gpus: unknown key; valid here: slots, max_slots, address, ssh, port, user"]),
        (
            "10.10.1.1 node0 node0-lan",
            [
                "hosts:1: 'node0' is not key=value; expected one host per line, then any of "
                "slots=, max_slots=, address=, ssh=, port=, user="
            ],
        ),
        (
            "n0:2222",
            ["hosts:1: 'n0:2222': 2222 after the colon means slots; for ssh's port write port=2222, else slots=2222"],
        ),
        ("n0:", ["hosts:1: 'n0:': expected a number of slots after the colon, as in node0:4, got ''"]),
        ("n0:four", ["hosts:1: 'n0:four': expected a number of slots after the colon, as in node0:4, got 'four'"]),
        ("n0 port=70000", ["hosts:1: port must be a number from 1 to 65535, got '70000'"]),
        (
            "n0 address=n0.lan",
            ["hosts:1: address must be numeric, such as 10.10.1.1, got 'n0.lan'; use ssh= for names"],
        ),
        (
            "n[1-2] address=10.0.0.1",
            ["hosts:1: address= applies to one host, but n[1-2] names 2; give each its own line"],
        ),
        ("a@n0 user=b", ["hosts:1: the user is given twice: a@ and user=b; keep one"]),
        ("@n0", ["hosts:1: '' is not a user name; expected letters, digits, dots, - and _, such as alice"]),
        (
            "-oProxyCommand=x",
            ["hosts:1: '-oProxyCommand=x' is not a host name; expected letters, digits, dots, - and _, such as node0"],
        ),
        ("n[1-", ["hosts:1: node list 'n[1-': the bracket at character 2 is unmatched, or inside another bracket"]),
        ("192.168.1.300", ["hosts:1: '192.168.1.300' is not an address; expected four numbers of at most 255"]),
        ("\n<rspec>\n<node/>", ["hosts: is XML, expected a hosts file; give a CloudLab manifest with --manifest"]),
        (
            "x y\n" * 13,
            [*(f"hosts:{line}: 'y' is not key=value" for line in range(1, 11)), "hosts: and 3 more wrong lines"],
        ),
        ("n0 x\nn1\nn2 y=1", ["hosts:1: 'x' is not key=value; expected", "hosts:3: y: unknown key; valid here: slots"]),
    ],
)
def test_every_wrong_line_is_named_with_what_was_wanted(text: str, mistakes: list[str]) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_hostfile(text, "hosts")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(mistakes)
    for line, mistake in zip(lines, mistakes, strict=True):
        assert line.startswith(mistake)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=re.escape(f"{tmp_path / 'none'}: no such file; expected a hosts file")):
        read_hostfile(tmp_path / "none")
    with pytest.raises(JobFileError, match="cannot be read: is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"n0\n\xff\xfe")
    with pytest.raises(JobFileError, match="byte 3 is not UTF-8 text"):
        read_hostfile(tmp_path / "binary")


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfn0 slots=1\n")
    assert read_hostfile(tmp_path / "hosts") == [Host("n0", "", 1)]


names = st.from_regex(r"[a-z_][a-z0-9_.-]{0,8}", fullmatch=True)
addresses = st.ip_addresses().map(str)
logins = st.builds(
    Login,
    names,
    st.none() | st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True),
    st.none() | st.integers(1, 65535),
)


@st.composite
def any_host(draw: st.DrawFn) -> Host:
    name = draw(names | addresses)
    address = draw(addresses) if draw(st.booleans()) else (name if is_numeric(name) else "")
    login = draw(st.none() | logins)
    if login is not None and draw(st.booleans()):
        login = Login(name, login.user, login.port)
    return Host(name, address, draw(st.none() | st.integers(1, 4096)), login)


@given(st.lists(any_host(), min_size=1, max_size=8, unique_by=lambda host: host.name))
def test_what_is_written_reads_back_as_the_same_hosts(hosts: list[Host]) -> None:
    assert parse_hostfile(hostfile_text(hosts), "hosts") == hosts


@given(st.text(max_size=80))
def test_any_text_is_either_hosts_or_refused_in_our_words(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "hosts")
    except JobFileError as error:
        assert all(line.startswith("hosts:") for line in str(error).split("\n"))  # noqa: PT017
    else:
        assert parse_hostfile(hostfile_text(hosts), "hosts") == hosts


def test_a_node_list_becomes_hosts() -> None:
    assert from_nodelist("n[01-02],alice@10.0.0.7") == [
        Host("n01", ""),
        Host("n02", ""),
        Host("10.0.0.7", "10.0.0.7", None, Login("10.0.0.7", "alice")),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n1,a@n1", "n1 is listed twice, in two spellings; list it once"),
        ("^hosts.txt", "'^hosts.txt' is not a host name"),
        ("-x", "'-x' is not a host name"),
        ("n[1-2]:22222", "22222 after the colon means slots"),
        ("", "is empty"),
    ],
)
def test_a_node_list_that_names_no_hosts_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        from_nodelist(text)


HOSTS = [Host(f"n0{number}", f"10.0.0.{number}") for number in (3, 1, 2, 4)]


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, ["n03", "n01", "n02", "n04"]),
        ("n[01-02]", None, ["n01", "n02"]),
        ("n04,n03", None, ["n03", "n04"]),
        ("n04@n03", None, ["n03", "n04"]),
        (None, "n03", ["n01", "n02", "n04"]),
        ("n[01-03]", "n01@n02", ["n03"]),
    ],
)
def test_hosts_are_chosen_in_their_own_order(include: str | None, exclude: str | None, left: list[str]) -> None:
    assert [host.name for host in choose(HOSTS, include, exclude)] == left


@pytest.mark.parametrize(
    ("include", "exclude", "problem"),
    [
        ("n05,n01", None, "--include: 'n05' is not one of the hosts; did you mean 'n04'? they are n[03,01-02,04]"),
        (None, "zebra", "--exclude: 'zebra' is not one of the hosts; they are n[03,01-02,04]"),
        ("n01:0,2", None, "--include: 'n01:0,2' selects slots of a host; Muster uses whole hosts, so write n01"),
        (None, "n[01-04]", "--exclude: no host of n[03,01-02,04] is left; exclude fewer"),
        ("n01", "n01", "--include and --exclude: no host of n[03,01-02,04] is left"),
        ("n[01", None, "is unmatched"),
    ],
)
def test_a_choice_that_cannot_be_made_says_why(include: str | None, exclude: str | None, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        choose(HOSTS, include, exclude)


def test_numeric_hosts_can_be_chosen_by_their_number_and_of_none_none() -> None:
    hosts = from_nodelist("10.0.0.1,fd00::2")
    assert choose(hosts, "fd00::2", None) == hosts[1:]
    assert choose([], None, None) == []
