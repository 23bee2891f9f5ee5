"""How ssh is called, and what its complaints mean: against a real ssh, a real sshd and a real shell."""

import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.spec.site import SshSettings
from muster.launch.transports.ssh_command import explain, ssh_argv
from support.sshd import Sshd, closed_port, make_key

pytestmark = pytest.mark.command

ALIAS = Host("n0", "10.10.1.1")
PLACED = Host("n0", "10.10.1.1", 4, Login("pc7.example.org", "alice", 2222))


def argv(host: Host = ALIAS, *, ssh_options: tuple[str, ...] = (), **ssh: object) -> list[str]:
    hosts = HostSet((host,), "hosts file", ssh_options)
    return ssh_argv(host, hosts, SshSettings.model_validate(ssh), ["/opt/python", "-I", "/srv/boot.py"])


# The argv -------------------------------------------------------------------------------------------------------------


def test_a_host_that_is_a_name_is_given_to_ssh_as_it_is_and_asked_nothing() -> None:
    assert argv() == [
        "ssh",
        *("-T", "-x", "-a"),
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=8"),
        *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"),
        *("--", "n0", "exec /opt/python -I /srv/boot.py"),
    ]


def test_a_login_says_where_by_which_port_and_as_whom() -> None:
    words = argv(PLACED, user="bob", port=22)
    assert words[-3:-1] == ["--", "pc7.example.org"]
    assert words[words.index("-l") + 1] == "alice"  # the host's own word counts
    assert words[words.index("-p") + 1] == "2222"


def test_the_site_says_what_the_host_does_not() -> None:
    words = argv(user="bob", port=2200, jump="gate", cheap_kex=True, connect_timeout_s=3)
    assert words[words.index("-l") + 1] == "bob"
    assert words[words.index("-p") + 1] == "2200"
    assert words[words.index("-J") + 1] == "gate"
    assert "KexAlgorithms=^curve25519-sha256" in words
    assert "ConnectTimeout=3" in words


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("Compression=yes", "Compression=yes"),
        ("Compression yes", "Compression=yes"),
        ("IdentityFile=~/my keys/id", "IdentityFile=~/my keys/id"),
        ("ProxyCommand=ssh -W %h:%p gate", "ProxyCommand=ssh -W %h:%p gate"),
        ("ProxyCommand ssh -o A=b -W %h:%p gate", "ProxyCommand=ssh -o A=b -W %h:%p gate"),
    ],
)
def test_an_option_keeps_its_value_whatever_stands_in_it(option: str, word: str) -> None:
    words = argv(options=[option])
    assert words[1:3] == ["-o", word]


def test_of_what_is_said_twice_ssh_takes_the_users_word_and_a_sets_file_comes_first() -> None:
    words = argv(ssh_options=("-F", "/box/ssh_config"), options=["ConnectTimeout=99"], connect_timeout_s=3)
    assert words[1:3] == ["-F", "/box/ssh_config"]
    assert words.index("ConnectTimeout=99") < words.index("ConnectTimeout=3")
    printed = subprocess.run([words[0], "-G", "-F", "none", *words[3:]], capture_output=True, text=True, check=True)
    assert "connecttimeout 99\n" in printed.stdout


def test_a_host_whose_name_begins_with_a_dash_is_no_option() -> None:
    words = argv(Host("-oProxyCommand=evil", ""))
    assert words[-3:-1] == ["--", "-oProxyCommand=evil"]


# Through a real shell -------------------------------------------------------------------------------------------------

PRINTER = '#!/bin/sh\nprintf \'%s\\0\' "$0" "$@"\n'
WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
FILE = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=30)
HARD = [
    "it's",
    '"',
    "a b",
    "$(touch no)",
    "`no`",
    "a;b",
    "#",
    "*",
    "~",
    "%h",
    "\\",
    "\n",
    "é",
    "🚀",
    "-n",
    "!",
    "&",
    "|",
    "=",
]


def through(shell: str, line: str) -> list[str]:
    """Return the arguments that a program gets when a shell, as sshd starts it, reads a line."""
    done = subprocess.run([shell, "-c", line], capture_output=True, timeout=20, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@settings(max_examples=40, deadline=None)
@given(
    name=(FILE | st.lists(st.sampled_from([each for each in HARD if "/" not in each]), min_size=1).map("".join)).filter(
        lambda name: name not in (".", "..") and len(name.encode()) < 200
    ),
    words=st.lists(WORD | st.sampled_from(HARD), max_size=4),
)
def test_any_interpreter_path_and_any_arguments_survive_the_remote_shell(
    tmp_path_factory: pytest.TempPathFactory, shell: str, name: str, words: list[str]
) -> None:
    python = tmp_path_factory.mktemp("bin") / name
    python.write_text(PRINTER)
    python.chmod(0o755)
    command = [*module_argv(str(python), "muster.launch.agent", "/co de/it's"), *words]
    line = ssh_argv(ALIAS, HostSet((ALIAS,), ""), SshSettings(), command)[-1]
    assert through(shell, line) == command


# What complaints mean -------------------------------------------------------------------------------------------------

# Recorded from OpenSSH 9.2 (Debian 12) and Python 3.6 to 3.12, where a test cannot bring them about.
CHANGED = """\
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Offending ED25519 key in /home/alice/.ssh/known_hosts:1
Host key for pc7.example.org has changed and you have requested strict checking.
Host key verification failed."""


@pytest.mark.parametrize(
    ("code", "said", "error", "message"),
    [
        (255, CHANGED, UnreachableError, "n0: its host key has changed: .*: ssh-keygen -R .*pc7"),
        (255, "ssh: connect to host n0 port 22: Connection timed out", UnreachableError, "n0: no answer; is it on"),
        (255, "ssh: connect to host n0 port 22: No route to host", UnreachableError, "n0: no route to it; is it on"),
        (255, "ssh: connect to host n0 port 22: Network is unreachable", UnreachableError, "n0: no route to it"),
        (
            255,
            "ssh: Could not resolve hostname n0: Temporary failure in name resolution",
            UnreachableError,
            "n0: no such host name; correct it in the hosts",
        ),
        (
            255,
            "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures",
            UnreachableError,
            "n0: it refused our key; try: ssh -p 2222 alice@pc7.example.org true, and copy a key with "
            "ssh-copy-id -p 2222 alice@pc7.example.org",
        ),
        (255, "Connection closed by 10.0.0.1 port 22", UnreachableError, "n0: it closed the connection at once"),
        # At LogLevel=ERROR, ssh is silent in most resets; it depends on when the reset arrives.
        (255, "", UnreachableError, "n0: it closed the connection at once"),
        (255, "?!", UnreachableError, "n0: ssh failed: ?!; try: ssh -p 2222 alice@pc7.example.org true"),
        (1, "This account is currently not available.", UnreachableError, "n0: the agent ended with code 1: This acc"),
        (1, "    def f(a, /):\nSyntaxError: invalid syntax", RefusedError, "n0: its Python is too old; Muster needs"),
        (1, "Traceback:\nImportError: No module named yaml", RefusedError, "n0: its Python lacks yaml; run ./setup.sh"),
        (
            127,
            "sh: 1: exec: /opt/python: not found",
            RefusedError,
            "n0: the interpreter is not there: sh: 1: exec: /opt",
        ),
        (127, "", RefusedError, "n0: the interpreter is not there"),
        (
            78,
            "muster agent on pc7 /usr/bin/python3 is Python 3.8.10, Muster needs 3.10 or newer; set interpreter in the "
            "site file",
            RefusedError,
            "n0: /usr/bin/python3 is Python 3.8.10, Muster needs 3.10 or newer; set interpreter in the site file",
        ),
        (
            69,  # not ssh's: the agent's own, which came home through ssh
            "muster agent on pc7: no supervisor at 10.0.0.9:61000 within 60 s: Connection refused",
            UnreachableError,
            "n0: no supervisor at 10.0.0.9:61000 within 60 s: Connection refused",
        ),
        (
            78,
            "muster agent on pc7: cannot read /runs/token: Permission denied; with this transport the run folder must",
            RefusedError,
            "n0: cannot read /runs/token: Permission denied; with this transport the run folder must",
        ),
    ],
)
def test_a_recorded_complaint_becomes_one_line_with_the_node_and_what_to_do(
    code: int, said: str, error: type[MusterError], message: str
) -> None:
    found = explain(PLACED, code, said.splitlines())
    assert type(found) is error
    assert "\n" not in str(found)
    start, _, end = message.partition(".*")
    assert str(found).startswith(start)
    assert all(part in str(found) for part in end.split(".*"))


def test_the_suggested_command_has_the_login_port_jump_and_options_of_the_command_line() -> None:
    ssh = SshSettings(user="eve", port=2200, jump="gate", options=["IdentityFile=~/my key"])
    found = explain(Host("n1", ""), 255, ["eve@n1: Permission denied (publickey)."], ssh)
    command = "-o 'IdentityFile=~/my key' -o ProxyJump=gate -p 2200 eve@n1"
    assert str(found).endswith(f"try: ssh {command} true, and copy a key with ssh-copy-id {command}")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "ssh: Could not resolve hostname gate: Name or service not known",
            "n1: its jump host al@gate:22: no such host name; correct it in --jump, or ssh.jump in the site file",
        ),
        (
            "ssh: connect to host gate port 22: Connection refused\nkex_exchange_identification: Connection closed by",
            "n1: its jump host al@gate:22: nothing listens on its ssh port",
        ),
        (
            "al@gate: Permission denied (publickey).\nConnection closed by UNKNOWN port 65535",
            "n1: its jump host al@gate:22: it refused our key; try: ssh ssh://al@gate:22 true",
        ),
        (
            "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\nhost gate",
            "n1: nothing listens on its ssh port",
        ),
        ("n1-gateway: Permission denied (publickey).", "n1: it refused our key"),
    ],
)
def test_a_jump_host_is_blamed_for_what_it_refuses_and_for_nothing_else(said: str, message: str) -> None:
    found = explain(Host("n1", ""), 255, said.splitlines(), SshSettings(jump="al@gate:22"))
    assert str(found).startswith(message)


@given(code=st.integers(0, 255), said=st.text(max_size=200))
def test_whatever_is_said_becomes_one_error_that_names_the_node(code: int, said: str) -> None:
    found = explain(PLACED, code, said.split("\n"))
    assert str(found).startswith("n0: ")
    assert "\n" not in str(found)


# Against a real sshd --------------------------------------------------------------------------------------------------


class Client:
    """The real ssh, as the transport calls it; what it says is explained as the transport does."""

    def __init__(self, sshd: Sshd) -> None:
        self.sshd = sshd

    def __call__(
        self,
        *command: str,
        target: str = "127.0.0.1",
        port: int | None = None,
        options: list[str] | None = None,
        **ssh: object,
    ) -> MusterError:
        host = Host("n0", "", None, Login(target, None, port or self.sshd.port))
        settings = {"options": self.sshd.options() if options is None else options, "connect_timeout_s": 1, **ssh}
        words = ssh_argv(host, HostSet((host,), ""), SshSettings.model_validate(settings), command or ("true",))
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
        return explain(host, done.returncode, done.stderr.splitlines(), SshSettings.model_validate(ssh))


@pytest.fixture
def client(sshd: Sshd) -> Client:
    return Client(sshd)


def said(error: MusterError, kind: type[MusterError], start: str) -> None:
    assert type(error) is kind, error
    assert str(error).startswith(f"n0: {start}")


def another_host_key(sshd: Sshd, folder: Path) -> list[str]:
    """Options of a client that knows another key of the host."""
    key = make_key(folder / "other").with_suffix(".pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{sshd.port} {key}")
    return sshd.options(known_hosts=folder / "known")


def no_host_key(sshd: Sshd, folder: Path) -> list[str]:
    (folder / "known").touch()
    return sshd.options(known_hosts=folder / "known")


def a_text(folder: Path) -> str:
    (folder / "python").write_text("a text")
    return str(folder / "python")


def lacks_a_part(folder: Path) -> str:
    """A copy of the code that has the boot file alone."""
    for package in (folder / "muster", folder / "muster" / "launch"):
        package.mkdir()
        (package / "__init__.py").touch()
    shutil.copy(module_argv("", "")[2], folder / "muster" / "launch" / "boot.py")
    return str(folder)


def agent_of(code: str) -> list[str]:
    return module_argv(sys.executable, "muster.launch.agent", code)


UNSEEN = "/no/such/runs/demo-20261122T194507.416Z-dde56a/code"
SSH_OPTION = "correct --ssh-opt, or ssh.options in the site file"
# A call of the client `c`, with the server `s` and the folder `f`, the error, and its parts: the first is its start.
REAL: list[tuple[Callable[[Client, Sshd, Path], MusterError], type[MusterError], list[str]]] = [
    (
        lambda c, s, f: c("sh", "-c", "echo it ran >&2; exit 3"),
        UnreachableError,
        ["the agent ended with code 3: it ran"],
    ),
    (lambda c, s, f: c(port=closed_port()), UnreachableError, ["nothing listens on its ssh port"]),
    (lambda c, s, f: c(target="no-such-host.invalid"), UnreachableError, ["no such host name"]),
    (
        lambda c, s, f: c(options=s.options(key=s.stranger)),
        UnreachableError,
        ["it refused our key; try: ssh -p {port} 127.0.0.1 true, and copy a key with"],
    ),
    (lambda c, s, f: c(user="no-such-user"), UnreachableError, ["it refused our key"]),
    (
        lambda c, s, f: c(options=no_host_key(s, f)),
        UnreachableError,
        ["its host key is not known here; check and accept it with: ssh -p {port} 127.0.0.1"],
    ),
    (
        lambda c, s, f: c(options=another_host_key(s, f)),
        UnreachableError,
        ["its host key has changed", "ssh-keygen ", " -R "],
    ),
    (
        lambda c, s, f: c("/no/such/python", "-I", "/srv/boot.py"),
        RefusedError,
        ["the interpreter is not there: ", "/no/such/python", "; correct `interpreter` in the site file"],
    ),
    (lambda c, s, f: c(a_text(f), "-I"), RefusedError, ["the interpreter cannot be run: "]),
    (
        lambda c, s, f: c(*agent_of("/no/such/code")),
        RefusedError,
        ["Muster's code is not there: /no/such/code/muster/launch/boot.py; run muster sync"],
    ),
    (lambda c, s, f: c(*agent_of(UNSEEN)), RefusedError, ["it does not see the run folder"]),
    (
        lambda c, s, f: c(*agent_of(lacks_a_part(f))),
        RefusedError,
        ["there is no muster.launch.agent in {folder}/muster; run muster sync"],
    ),
    (
        lambda c, s, f: c(sys.executable, "-I", "-c", "import no_such_library"),
        RefusedError,
        ["its Python lacks no_such_library; run ./setup.sh there"],
    ),
    (
        lambda c, s, f: c(options=[*s.options(), "NoSuchOption=1"]),
        RefusedError,
        [f"ssh does not know the option nosuchoption; {SSH_OPTION}"],
    ),
    *(
        (
            lambda c, s, f, option=option: c(options=[*s.options(), option]),  # type: ignore[misc]
            RefusedError,
            [f"ssh does not know an option or its value; {SSH_OPTION}"],
        )
        for option in ("Port=abc", "KexAlgorithms=foo")
    ),
    (
        lambda c, s, f: c(jump="localhost:9"),  # the discard port
        UnreachableError,
        ["its jump host localhost:9: nothing listens on its ssh port"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "parts"), REAL, ids=[parts[0][:30] for _, _, parts in REAL])
def test_a_complaint_of_a_real_ssh_becomes_one_line_with_what_to_do(
    client: Client, sshd: Sshd, tmp_path: Path, call: Any, kind: type[MusterError], parts: list[str]
) -> None:
    found = call(client, sshd, tmp_path)
    start, *more = (part.format(port=sshd.port, folder=tmp_path) for part in parts)
    said(found, kind, start)
    assert all(part in str(found) for part in more)


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Return a function that serves each connection with a function, on a port that it returns."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def begin(answer: Callable[[socket.socket], None]) -> int:
        server = socket.create_server(("127.0.0.1", 0))

        def work() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                answer(connection)

        thread = threading.Thread(target=work)
        thread.start()
        servers.append((server, thread))
        return int(server.getsockname()[1])

    yield begin
    for server, thread in servers:
        server.close()
        thread.join()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def wait_for_its_end(connection: socket.socket) -> None:
    connection.settimeout(30)
    while connection.recv(1000):
        pass


@pytest.mark.parametrize("answer", [lambda connection: None, reset], ids=["closes", "resets"])
def test_one_that_closes_the_connection_at_once(client: Client, serve, answer) -> None:
    said(
        client(port=serve(answer)), UnreachableError, "it closed the connection at once; its sshd may limit connections"
    )


def test_one_that_takes_the_connection_and_says_nothing(client: Client, serve) -> None:
    said(client(port=serve(wait_for_its_end)), UnreachableError, "no answer; is it on, and reachable from here?")
