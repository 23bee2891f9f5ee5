"""`muster box` as people type it."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from muster.cloudlab.box.control import Box
from muster.jobs.basics import exits
from muster.launch.cli import main
from support.boxes import leftovers, muster, number_of

pytestmark = pytest.mark.command


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a `muster box` command to its end."""
    return subprocess.run(muster("box", *words), capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--nodes", "0"], "muster: box box: nodes must be from 1 to 250, got 0\n"),
        (
            ["up", "--rate", "fast"],
            "muster: 'fast' is not a rate; expected one from 8kbit to 400gbit, such as 100mbit, or none\n",
        ),
        (
            ["up", "--name", "a/b"],
            "muster: 'a/b' is not a valid name for a box; expected up to 32 letters, digits, dots, - and _\n",
        ),
        (["up", "--clock", "node1"], "muster: --clock node1: expected NODE=OFFSET, such as node2=+180s\n"),
        (
            ["down", "--name", "../../etc"],
            "muster: '../../etc' is not a valid name for a box; expected up to 32 letters, digits, dots, - and _\n",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_the_code_of_usage(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["box", *words]) == exits.USAGE
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("words", [[], ["fail", "node0", "--how", "fire"], ["rate"], ["ssh"], ["heal"]])
def test_what_argparse_refuses_has_the_code_of_usage(words: list[str]) -> None:
    assert main(["box", *words]) == exits.USAGE


def test_up_without_root_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for words in (["up"], ["down"]):
        assert main(["box", *words]) == exits.REFUSED
        assert f"muster: muster box {words[0]} needs root" in capsys.readouterr().err


@pytest.mark.cluster
def test_a_box_from_up_to_down(new_name: Callable[[], str]) -> None:
    name = new_name()
    up = run("up", "--name", name, "--nodes", "2", "--rate", "100mbit")
    assert (up.returncode, up.stderr) == (0, "")
    assert up.stdout.startswith(f"box {name}: 2 nodes in 10.10.")
    number = number_of(name)
    again = run("up", "--name", name)
    assert again.returncode == exits.REFUSED
    assert (
        again.stderr == f"muster: box {name} exists already; take it down first: sudo muster box down --name {name}\n"
    )
    status = status_of(name)
    assert [node["state"] for node in status["nodes"]] == ["up", "up"]
    assert status["rate"] == "100mbit"
    assert run("down", "--name", name).stdout == f"box {name}: removed\n"
    assert leftovers(name, number) == []
    down = run("down", "--name", name)
    assert (down.returncode, down.stdout.startswith(f"box {name}: does not exist")) == (0, True)


@pytest.mark.cluster
def test_commands_in_a_node(box: Box) -> None:
    out = run("exec", "--name", box.name, "node1", "--", "sh", "-c", "hostname; exit 3")
    assert (out.returncode, out.stdout, out.stderr) == (3, "node1\n", "")
    out = run("exec", "--name", box.name, "node1", "sh", "-c", "kill -9 $$")
    assert out.returncode == -9
    out = run("ssh", "--name", box.name, "node2", "hostname; exit 4")
    assert (out.returncode, out.stdout, out.stderr) == (4, "node2\n", "")
    out = run("exec", "--name", box.name, "node1")
    assert (out.returncode, out.stderr) == (
        2,
        "muster: exec node1: the command is missing; run muster box exec node1 -- CMD\n",
    )


@pytest.mark.cluster
def test_failing_and_healing_by_command(breakable: Box) -> None:
    assert run("fail", "--name", breakable.name, "node3", "--how", "unplug").returncode == 0
    assert states(breakable.name)["node3"] == "unplugged"
    assert run("heal", "--name", breakable.name, "node3").returncode == 0
    assert states(breakable.name)["node3"] == "up"
    out = run("heal", "--name", breakable.name, "node7")
    assert (out.returncode, out.stderr) == (
        2,
        f"muster: box {breakable.name} has no 'node7'; it has node0 to node3 and head\n",
    )


@pytest.mark.cluster
def test_rates_by_command_and_the_table(box: Box) -> None:
    assert run("rate", "--name", box.name, "100mbit").returncode == 0
    assert run("rate", "--name", box.name, "10mbit", "--between", "node0", "node2").returncode == 0
    shown = run("status", "--name", box.name).stdout
    assert "links 100mbit, 10mbit between node0 and node2\n" in shown
    assert "node0  10.10." in shown
    assert run("rate", "--name", box.name, "75mbit", "--of", "node3").returncode == 0
    assert "10mbit between node0 and node2, 75mbit of node3\n" in run("status", "--name", box.name).stdout
    assert run("rate", "--name", box.name, "none").returncode == 0
    assert status_of(box.name)["slow_pairs"] == status_of(box.name)["slow_nodes"] == []


def status_of(name: str) -> dict[str, Any]:
    """Return a box as `status --json` prints it."""
    (found,) = json.loads(run("status", "--json", "--name", name).stdout)["boxes"]
    return dict(found)


def states(name: str) -> dict[str, str]:
    """Return the states of nodes."""
    return {node["node"]: node["state"] for node in status_of(name)["nodes"]}
