"""`muster bench compare`, `plot` and `show`: of result files and of runs, and what is wrong with them."""

import json
from pathlib import Path

import pytest

from muster.collectives_bench.records import Result
from muster.collectives_bench.results.files import write_result
from muster.jobs.basics.errors import RunFolderError, StorageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch import cli
from muster.launch.bench import report
from muster.launch.bench.choices import Output
from muster.launch.bench.report import naming
from support.measured import block, header, pairs, result, settings, world, write_lines


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Three results of five launches: twice the same network, and one that is 30 % slower."""
    made = {"a": 1.0, "b": 1.001, "slow": 1.3}
    for name, slower in made.items():
        asked = settings(operation=["all_reduce", "barrier"], launches=5)
        write_result(result(asked, slower=slower), tmp_path / f"{name}.json")
    return {name: str(tmp_path / f"{name}.json") for name in made}


def test_a_slower_result_is_worse_row_by_row_and_fails_a_gate(files, capsys) -> None:
    assert cli.main(["bench", "compare", files["a"], files["slow"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "row before after time from to launches verdict why"
    shown = " ".join(lines[1].split())
    assert shown == "all_reduce 1 MB fp32 in 1.172 ms 1.523 ms 1.300 1.300 1.300 5/5 worse significantly slower"
    assert lines[3].startswith("barrier ")
    assert lines[-1] == "worse: of 3 common rows 3 worse"
    for fail_on, code in (("worse", 1), ("any", 1), ("better", 0)):
        assert cli.main(["bench", "compare", files["a"], files["slow"], "--fail-on", fail_on]) == code
    assert cli.main(["bench", "compare", files["slow"], files["a"], "--fail-on", "worse"]) == 0
    assert cli.main(["bench", "compare", files["slow"], files["a"], "--fail-on", "better"]) == 1


def test_the_same_network_twice_is_the_same(files, capsys) -> None:
    assert cli.main(["bench", "compare", files["a"], files["b"], "--fail-on", "any", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "same"
    assert [row["verdict"] for row in found["rows"]] == ["same"] * 3
    assert found["rows"][0]["cell"]["operation"] == "all_reduce"
    assert found["rows"][0]["world"]["ranks"] == 2


def test_a_gate_that_could_judge_nothing_is_not_passed(tmp_path: Path, capsys) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        write_result(result(settings(launches=1)), path)
    argv = ["bench", "compare", *map(str, paths)]
    assert cli.main(argv) == 0
    assert cli.main([*argv, "--fail-on", "worse"]) == 1
    captured = capsys.readouterr()
    assert "no row could be judged; measure more launches" in captured.err
    assert "no verdict" in captured.out


def test_what_is_no_longer_measured_does_not_pass_a_gate(tmp_path: Path, files, capsys) -> None:
    fewer = tmp_path / "fewer.json"
    write_result(result(settings(operation=["all_reduce"], launches=5)), fewer)
    argv = ["bench", "compare", files["a"], str(fewer)]
    assert [cli.main([*argv, "--fail-on", word]) for word in ("worse", "any", "better")] == [1, 1, 0]
    captured = capsys.readouterr()
    assert "--fail-on worse: 1 row that was measured in BEFORE has no time in AFTER" in captured.err
    assert "1 measured before but not after" in captured.out
    assert cli.main(["bench", "compare", str(fewer), files["a"], "--fail-on", "worse"]) == 0  # what is new harms none


def test_results_that_were_joined_into_one_file_are_compared(tmp_path: Path, capsys) -> None:
    for launch in range(4):
        made = result(settings(launches=1), slower=1.0 + launch / 1000)
        moved = [each.model_copy(update={"launch": 0, "time": 100.0 * launch}) for each in made.blocks]
        write_result(made.model_copy(update={"blocks": moved}), tmp_path / f"{launch}.json")
    assert cli.main(["bench", "show", *(str(tmp_path / f"{launch}.json") for launch in range(4)), "--json"]) == 0
    joined = tmp_path / "joined.json"
    joined.write_text(capsys.readouterr().out, encoding="utf-8")
    assert cli.main(["bench", "compare", str(joined), str(joined), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["launches"] == [4, 4]


def test_no_row_in_common_is_an_error_and_not_a_pass(tmp_path: Path, files, capsys) -> None:
    write_result(result(settings(operation=["reduce"])), tmp_path / "other.json")
    assert cli.main(["bench", "compare", files["a"], str(tmp_path / "other.json"), "--fail-on", "worse"]) == 78
    assert "no row in common" in capsys.readouterr().err


def test_a_result_that_is_not_there_is_a_usage_error(tmp_path: Path, files, capsys) -> None:
    argv = ["bench", "compare", files["a"], str(tmp_path / "gone.json"), "--runs", str(tmp_path)]
    assert cli.main(argv) == 2
    assert f"muster: {tmp_path}/gone.json: no such file, and no run: " in capsys.readouterr().err
    assert cli.main(["bench", "compare", files["a"]]) == 2
    assert cli.main(["bench", "compare", files["a"], files["b"], "--fail-on", "weather"]) == 2


def test_a_run_is_found_by_part_of_its_id(tmp_path: Path, capsys) -> None:
    run = RunDir(tmp_path / "bench-20261121T000000.000Z-abcdef")
    write_lines(run.attempt(0).bench, result(settings(launches=5)))
    run.events.touch()
    argv = ["bench", "compare", "abcdef", str(run.path), "--runs", str(tmp_path), "--fail-on", "worse"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "same: of 2 common rows 2 same"


def test_several_results_are_drawn_into_one_plot(files, tmp_path: Path, capsys) -> None:
    assert cli.main(["bench", "plot", files["a"], files["slow"], "-o", str(tmp_path / "both.svg")]) == 0
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
    assert capsys.readouterr().err == f"wrote {tmp_path}/both.svg\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.gif"], "--output x.gif: must end in .png or .svg or .pdf"),
        (["-o", "none/x.png"], "--output none/x.png: no such folder: none"),
        ([], "the following arguments are required: -o/--output"),
    ],
)
def test_a_plot_that_cannot_be_written_is_a_usage_error(arguments, message, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "plot", files["a"], *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_without_sizes_are_no_plot(tmp_path: Path, capsys) -> None:
    write_result(result(settings(operation=["barrier"])), tmp_path / "barrier.json")
    output = str(tmp_path / "x.png")
    assert cli.main(["bench", "plot", str(tmp_path / "barrier.json"), "-o", output]) == 2
    assert f"--output {output}: no row has a size and a time" in capsys.readouterr().err


def test_a_result_is_shown_again_world_by_world(tmp_path: Path, capsys) -> None:
    asked = settings(operation=["all_reduce", "barrier"])
    write_result(result(asked, [world(1, 2), world(2, 2)]), tmp_path / "r.json")
    assert cli.main(["bench", "show", str(tmp_path / "r.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [
        line.partition(" · ")[0] for line in lines if line.startswith(("# demo: ", "# all_reduce: ", "# barrier: "))
    ]
    assert heads == [
        "# demo: 1 node x 2 ranks, gloo on cpu",
        "# all_reduce: every rank gets the sum of all",
        "# barrier: no rank leaves before all have arrived",
        "# demo: 2 nodes x 2 ranks, gloo on cpu",
        "# all_reduce: every rank gets the sum of all",
        "# barrier: no rank leaves before all have arrived",
    ]
    assert lines[-2:] == [
        "# +- encloses the median with 75% confidence (3 launches: medians of the launches); more --launches "
        "increase the confidence",
        "# verdict: OK",
    ]
    assert sum(not line.startswith("#") for line in lines) == 6


def test_a_bad_result_is_shown_with_the_exit_code_of_its_measurement(tmp_path: Path, capsys) -> None:
    made = result(settings(launches=1))
    failed = [block(world(), each.cell, state="failed", reason="SIGABRT") for each in made.blocks]
    write_result(made.model_copy(update={"blocks": failed}), tmp_path / "bad.json")
    assert cli.main(["bench", "show", str(tmp_path / "bad.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "# verdict: FAILED"


def test_a_result_that_was_broken_off_is_not_ok_whoever_reads_it(tmp_path: Path, files, capsys) -> None:
    made = result(settings(operation=["all_reduce", "barrier"], launches=5))
    first = made.blocks[0].cell
    write_result(made.model_copy(update={"blocks": [block(world(), first)]}), tmp_path / "cut.json")
    assert cli.main(["bench", "show", str(tmp_path / "cut.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "# +- encloses the median with 96% confidence (1 launch: samples of one launch; another one may differ"
        "); more --launches increase the confidence",
        "# not finished: 1 of 15 blocks; 2 rows never begun",
        "# verdict: UNFINISHED",
    ]
    assert cli.main(["bench", "compare", files["a"], str(tmp_path / "cut.json")]) == 0
    assert "cut.json: not finished: 1 of 15 blocks" in capsys.readouterr().err


def test_what_is_refused_once_is_not_missed_in_the_other_launches(tmp_path: Path) -> None:
    made = result(settings(launches=3))
    refused = made.blocks[0].cell
    kept = [each for each in made.blocks if each.cell != refused]
    kept.append(block(world(), refused, state="unsupported", reason="no such operation"))
    write_result(made.model_copy(update={"blocks": kept}), tmp_path / "r.json")
    assert cli.main(["bench", "show", str(tmp_path / "r.json")]) == 0


def test_pairs_that_are_missing_are_counted_too(tmp_path: Path, capsys) -> None:
    asked = settings(pairs=True, launches=3)
    write_result(Result(headers=[header(world(4), asked)], pairs=pairs(4, launches=2)), tmp_path / "pairs.json")
    assert cli.main(["bench", "show", str(tmp_path / "pairs.json")]) == 1
    assert "# not finished: 12 of 18 blocks\n# verdict: UNFINISHED\n" in capsys.readouterr().out


def test_settings_that_are_none_of_ours_are_an_error_of_the_file(tmp_path: Path, capsys) -> None:
    write_result(result(), odd := tmp_path / "odd.json")
    odd.write_text(odd.read_text().replace('"launches":3', '"launches":"many"', 1))
    assert cli.main(["bench", "show", str(odd)]) == 65
    assert "headers.0.settings.launches: " in capsys.readouterr().err


def test_pairs_are_shown_as_matrices_with_the_slow_node_named(tmp_path: Path, capsys) -> None:
    made = Result(headers=[header(world(4), settings(pairs=True))], pairs=pairs(4, slow_node=2))
    write_result(made, tmp_path / "pairs.json")
    assert cli.main(["bench", "show", str(tmp_path / "pairs.json")]) == 0
    out = capsys.readouterr().out
    assert "# bandwidth from the row's node to the column's (GB/s)" in out
    assert "slow node: node 2 (n2)" in out
    assert out.splitlines()[-1] == "# verdict: OK"


def test_shown_as_json_a_result_reads_back_as_itself(files, capsys) -> None:
    assert cli.main(["bench", "show", files["a"], "--json"]) == 0
    again = Result.model_validate_json(capsys.readouterr().out)
    assert again == result(settings(operation=["all_reduce", "barrier"], launches=5))


def test_a_file_that_cannot_be_written_does_not_take_the_report_with_it(tmp_path: Path, capsys) -> None:
    output = Output(out=str(tmp_path / "gone" / "r.json"))
    with pytest.raises(RunFolderError) as raised:
        report.of_collectives(result()).deliver(output)
    assert str(raised.value).startswith(f"--out: {tmp_path}/gone/r.json: there is no folder ")
    assert str(raised.value).endswith("; choose another file (the run folders still have the measurements)")
    assert capsys.readouterr().out.splitlines()[-1] == "# verdict: OK"


def test_a_full_disk_is_said_of_the_option_that_named_the_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^--output: full: No space left; choose another file"), naming("--output"):
        raise StorageError("full: No space left; choose another folder with --runs DIR")
