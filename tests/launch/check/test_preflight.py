"""What is judged bad, what only worth a word, and what a user is told to do about it. Pure: answers in, rows out."""

import copy
from typing import Any

import pytest

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.launch.check.judges import BAD, GOOD, OF_SITE, UNKNOWN, WARNING, Answer, Expected, NodeProperty
from muster.launch.check.preflight import NodeRow, exit_code, remarks, rows, titles, without
from support.messages import hello

CODE = "0123456789ab"
EXPECTED = Expected(
    code=CODE,
    ranks=(2, 2, 2, 2),
    torch=True,
    python=OF_SITE,
    device="auto",
    master="10.10.1.1:20000",
    one_host=False,
    remote=True,
    run="/shared/runs",
)
FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "executable": "/opt/muster/.venv/bin/python",
    "root": "/opt/muster",
    "code": CODE,
    "commit": "a0d2852",
    "torch": "2.11.0+cpu",
    "cores": 8,
    "memory": {"total_mib": 65536, "available_mib": 60000},
    "gpus": [],
    "limits": {"open_files": 1_048_576, "open_files_hard": 1_048_576},
    "connect": "",
    "storage": {"where": "shared", "path": "/shared/runs/x", "why": "", "free_mib": 500_000},
    "failed": {},
}


def healthy(count: int = 4) -> list[Answer]:
    """Nodes n1, n2, ... with nothing wrong."""
    answers = []
    for node in range(count):
        facts = {**copy.deepcopy(FACTS), "route": ["eth1", f"10.10.1.{node + 1}"], "machine": f"boot-{node}"}
        answers.append(Answer(f"n{node + 1}", hello=hello(), facts=facts, ahead_s=0.01, marked=True))
    return answers


def judged(answers: list[Answer], expected: Expected = EXPECTED) -> list[NodeRow]:
    return rows(answers, expected)


def test_healthy_nodes_are_all_good_and_nothing_need_be_said() -> None:
    answers = healthy()
    found = judged(answers)
    assert {row.state for row in found} == {GOOD}
    assert all(cell.why == "" for row in found for cell in row.cells.values())
    assert (exit_code(found, answers), without(found)) == (0, "")
    assert (remarks(found, BAD), remarks(found, WARNING)) == ([], [])


#      what node n3 says instead, the column, its state, part of the words
WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"python": "3.12.1"}, "python", WARNING, "n3: runs Python 3.12.1, but most nodes run 3.11"),
    ({"python": "3.11.9"}, "python", GOOD, ""),
    ({"torch": None}, "torch", BAD, "has no torch, which the ranks need; run ./setup.sh there"),
    ({"torch": "2.12.0+cpu"}, "torch", BAD, "has torch 2.12.0+cpu, but most nodes have 2.11.0+cpu"),
    ({"torch": "2.11.0+cu126"}, "torch", WARNING, "different build of torch (2.11.0+cu126)"),
    (
        {"code": "ffffffffffff"},
        "code",
        BAD,
        "has a different version of Muster in /opt/muster (ffffffffffff, here 0123456789ab); run",
    ),
    ({"commit": "bbbbbbb+"}, "code", GOOD, ""),
    ({"route": None}, "network", BAD, "has no route to the master 10.10.1.1:20000; give an address"),
    ({"route": ["lo", "127.0.0.1"]}, "network", BAD, "through lo, which the other nodes cannot reach; give an a"),
    ({"route": ["ib0", "10.10.1.3"]}, "network", GOOD, ""),
    (
        {"connect": "Connection refused"},
        "master",
        BAD,
        "cannot reach the master at 10.10.1.1:20000: Connection refused; open",
    ),
    ({"storage": {"where": "none", "why": "/a: is full"}}, "runs", BAD, "cannot store the run: /a: is full; choose"),
    (
        {"storage": {"where": "apart", "path": "/tmp", "free_mib": 9999}},
        "runs",
        WARNING,
        "cannot see /shared/runs: logs",
    ),
    (
        {"storage": {"where": "apart", "path": "/tmp", "free_mib": 99}},
        "free",
        BAD,
        "has 99 MiB free in /tmp; free some",
    ),
    ({"storage": {"where": "shared", "path": "/tmp", "free_mib": 1023}}, "free", WARNING, "has 1023 MiB free in /tmp"),
    ({"cores": 1}, "cores", WARNING, "has 1 cores for 2 ranks"),
    ({"cores": 4}, "cores", WARNING, "has 4 cores, but most nodes have 8: the others will wait for it"),
    ({"cores": 16}, "cores", GOOD, ""),
    (
        {"memory": {"total_mib": 65536, "available_mib": 900}},
        "memory",
        WARNING,
        "has 900 MiB of memory free, but most nodes have",
    ),
    ({"gpus": ["H200"]}, "GPUs", BAD, "has GPUs, but most nodes have none"),
    ({"limits": {"open_files": 256, "open_files_hard": 512}}, "files", WARNING, "allows 256 open files"),
    ({"limits": {"open_files": -1, "open_files_hard": -1}}, "files", GOOD, ""),
]


@pytest.mark.parametrize(("facts", "column", "state", "words"), WRONG)
def test_one_node_that_differs_is_named_with_what_to_do(
    facts: dict[str, Any], column: str, state: str, words: str
) -> None:
    answers = healthy()
    answers[2].facts |= facts
    found = judged(answers)
    assert found[2].cells[column].state == state
    assert [row.state for row in found if row.host != "n3"] == [GOOD] * 3
    said = remarks(found, state) if state != GOOD else []
    assert len([line for line in said if words in line]) == len(said) == (state != GOOD)
    assert (exit_code(found, answers) == 0) == (state != BAD)
    assert without(found) == ("n3" if state == BAD else "")


@pytest.mark.parametrize(
    ("ahead_s", "text", "state"),
    [
        (0.3, "ok", GOOD),
        (-1.9, "-1.9 s", GOOD),
        (2.1, "+2.1 s", WARNING),
        (-59.0, "-59.0 s", WARNING),
        (61.0, "+61.0 s", BAD),
        (-7200.0, "-7200.0 s", BAD),
        (None, "?", WARNING),
    ],
)
def test_clocks_may_differ_by_seconds_not_by_minutes(ahead_s: float | None, text: str, state: str) -> None:
    answers = healthy()
    answers[1].ahead_s = ahead_s
    cell = judged(answers)[1].cells["clock"]
    assert (cell.text, cell.state) == (text, state)
    assert state == GOOD or "clock" in cell.why


def test_a_mark_that_is_not_seen_here_means_that_the_folder_is_not_the_same() -> None:
    answers = healthy()
    answers[3].marked = False
    found = judged(answers)
    assert found[3].cells["runs"] == NodeProperty(
        "one way",
        BAD,
        "reads /shared/runs, but its files there are not visible here; is it mounted from another place? choose a "
        "folder with --runs DIR that all share",
    )


@pytest.mark.parametrize(
    ("error", "code"), [(UnreachableError("n2: no answer"), 69), (RefusedError("n2: its Python is too old"), 78)]
)
def test_a_node_without_an_agent_is_bad_in_one_cell_and_unknown_in_the_others(error: MusterError, code: int) -> None:
    answers = healthy()
    answers[1] = Answer("n2", error=error)
    found = judged(answers)
    assert found[1].cells.pop("agent") == NodeProperty("failed", BAD, str(error).removeprefix("n2: "))
    assert {cell.state for cell in found[1].cells.values()} == {UNKNOWN}
    assert exit_code(judged(answers), answers) == code


def test_unreachable_weighs_more_than_any_other_fault() -> None:
    answers = healthy()
    answers[1] = Answer("n2", error=UnreachableError("n2: no answer"))
    answers[2].facts["code"] = "ffffffffffff"
    found = judged(answers)
    assert (exit_code(found, answers), without(found)) == (69, "n[2-3]")


def test_a_node_that_stops_answering_half_way_is_told_once() -> None:
    answers = healthy()
    answers[1].error = UnreachableError("n2: its agent has gone")
    answers[1].facts = {"failed": {}}
    said = remarks(judged(answers), BAD) + remarks(judged(answers), WARNING)
    assert said == ["n2: its agent has gone"]


def test_a_fact_that_could_not_be_found_carries_its_reason() -> None:
    answers = healthy()
    del answers[0].facts["gpus"]
    answers[0].facts["failed"] = {"gpus": "took longer than 4 s"}
    found = judged(answers)
    assert found[0].cells["GPUs"] == NodeProperty("?", WARNING, "cannot determine its gpus: took longer than 4 s")


def test_the_same_fault_of_many_nodes_is_one_line() -> None:
    answers = healthy()
    for answer in answers[1:]:
        answer.facts["torch"] = None
    assert remarks(judged(answers), BAD) == [
        "n[2-4]: /opt/muster/.venv/bin/python has no torch, which the ranks need; run ./setup.sh there, or set "
        "interpreter in the site file"
    ]


def test_when_no_node_reaches_node_0_it_is_node_0_that_is_left_out() -> None:
    answers = healthy()
    for answer in answers[1:]:
        answer.facts["connect"] = "no answer within 3 s"
    found = judged(answers)
    assert (without(found), exit_code(found, answers)) == ("n1", 69)
    assert remarks(found, BAD)[0].startswith("n1: no other node reaches it at 10.10.1.1:20000; open its firewall")


def test_of_two_nodes_the_one_that_does_not_reach_the_other_is_bad() -> None:
    answers = healthy(2)
    answers[1].facts["connect"] = "no answer within 3 s"
    assert without(judged(answers)) == "n2"


def test_without_a_master_address_only_node_0_is_to_blame() -> None:
    answers = healthy()
    answers[0].no_master = "--iface eth9: no such network here; it has eth1 10.10.1.1"
    for answer in answers:
        del answer.facts["route"], answer.facts["connect"]
    found = judged(answers, Expected(**{**vars(EXPECTED), "master": ""}))
    assert remarks(found, BAD) == ["n1: --iface eth9: no such network here; it has eth1 10.10.1.1"]
    assert remarks(found, WARNING) == []


def test_two_names_of_one_machine_are_noticed() -> None:
    answers = healthy()
    answers[2].facts["machine"] = answers[0].facts["machine"]
    assert remarks(judged(answers), WARNING) == [
        "n3: is the same machine as n1; remove one of the two names from the hosts"
    ]
    pretend = Expected(**{**vars(EXPECTED), "remote": False})
    assert remarks(judged(answers, pretend), WARNING) == []


def test_a_program_of_the_user_s_needs_neither_our_torch_nor_equal_gpus() -> None:
    answers = healthy()
    answers[0].facts["torch"] = None
    answers[1].facts["gpus"] = ["H200"]
    found = judged(answers, Expected(**{**vars(EXPECTED), "torch": False, "device": ""}))
    assert [row.state for row in found] == [GOOD, WARNING, GOOD, GOOD]


@pytest.mark.parametrize(("device", "state"), [("cuda", BAD), ("auto", GOOD), ("cpu", GOOD)])
def test_a_job_for_gpus_needs_them_on_every_node(device: str, state: str) -> None:
    found = judged(healthy(), Expected(**{**vars(EXPECTED), "device": device}))
    assert {row.state for row in found} == {state}


def test_gpus_of_another_number_or_kind_are_worth_a_word() -> None:
    answers = healthy()
    for answer in answers:
        answer.facts["gpus"] = ["H200"] * 8
    answers[2].facts["gpus"] = ["H200"] * 7
    assert remarks(judged(answers), WARNING) == ["n3: has 7 x H200, but most nodes have 8 x H200"]
    answers[2].facts["gpus"] = []
    assert "has no GPU, but most nodes have one; run nvidia-smi there" in remarks(judged(answers), BAD)[0]


def test_when_all_nodes_are_bad_there_is_nobody_to_go_on_with() -> None:
    answers = [Answer(f"n{node}", error=UnreachableError("no answer")) for node in range(4)]
    found = judged(answers)
    assert (without(found), exit_code(found, answers)) == ("", 69)


def test_columns_without_anything_in_them_are_not_shown() -> None:
    answers = healthy()
    assert not {"GPUs", "files"} & set(titles(judged(answers)))
    answers[0].facts["gpus"] = ["H200"]
    assert "GPUs" in titles(judged(answers))
