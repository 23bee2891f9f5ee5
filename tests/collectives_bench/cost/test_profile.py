"""A profile: what it predicts and from what, what it warns of, what it refuses, and its file."""

import json
from pathlib import Path

import pytest

from muster.collectives_bench.cost.curves import CostLine, Curve
from muster.collectives_bench.cost.heldout import errors_of
from muster.collectives_bench.cost.profile import Profile, link, load, save
from muster.jobs.basics.errors import JobFileError, MusterError, RefusedError, UsageError
from support.costs import OnLinks, OnOneHost

MB = 2**20


def curve(operation: str = "all_reduce", *, ranks: int = 2, nodes: int = 1, **more: object) -> Curve:
    values: dict[str, object] = {
        "operation": operation,
        "nodes": nodes,
        "ranks": ranks,
        "backend": "gloo",
        "device": "cpu",
        "dtype": "fp32",
        "place": "in",
        "kind": "points",
        "line": CostLine(alpha_s=1e-3, beta_s=1e-9),
        "points": [(MB, 2e-3), (4 * MB, 5e-3), (16 * MB, 18e-3)],
        "low": 0.9,
        "high": 1.2,
    }
    return Curve.model_validate({**values, **more})


def profile(*curves: Curve) -> Profile:
    return Profile(name="here", curves=list(curves), constants=[OnOneHost.model_copy(update={"worlds": [2, 3]})])


def test_a_size_that_was_measured_is_its_time_and_says_so() -> None:
    found = profile(curve()).predict("all_reduce", 4 * MB, ranks=2)
    assert (found.seconds, found.how, found.warnings) == (5e-3, "measured at this size", ())
    assert (found.low_s, found.high_s) == (pytest.approx(4.5e-3), pytest.approx(6e-3))


def test_a_line_that_passes_a_measured_time_says_so_and_what_was_measured() -> None:
    away = [(MB, 2e-3), (4 * MB, 20e-3), (16 * MB, 18e-3)]
    found = profile(curve(kind="line", points=away)).predict("all_reduce", 4 * MB, ranks=2)
    assert found.how == "on a line through all sizes; measured here 20 ms"
    assert found.seconds < 0.9 * 20e-3


def test_points_that_fall_with_size_are_pooled_and_the_prediction_says_so() -> None:
    falling = [(MB, 2e-3), (4 * MB, 6e-3), (16 * MB, 5e-3)]
    found = profile(curve(points=falling)).predict("all_reduce", 4 * MB, ranks=2)
    assert found.seconds == pytest.approx((6e-3 * 5e-3) ** 0.5)
    assert found.how == "averaged with neighbouring sizes; measured here 6 ms"


@pytest.mark.parametrize(
    ("nbytes", "how"),
    [
        (2 * MB, "between 1 MB and 4 MB"),
        (MB // 2, "below 1 MB, the smallest measured"),
        (32 * MB, "beyond 16 MB, the largest measured"),
    ],
)
def test_other_sizes_say_where_they_lie(nbytes: int, how: str) -> None:
    found = profile(curve()).predict("all_reduce", nbytes, ranks=2)
    assert (found.how, found.warnings) == (how, ())


def test_more_than_four_times_the_largest_size_is_warned_of() -> None:
    found = profile(curve()).predict("all_reduce", 65 * MB, ranks=2)
    assert found.warnings == ("65 MB is more than 4 times the largest size measured, 16 MB",)
    assert not profile(curve()).predict("all_reduce", 64 * MB, ranks=2).warnings


def test_less_than_a_quarter_of_the_smallest_size_is_warned_of() -> None:
    found = profile(curve()).predict("all_reduce", 1000, ranks=2)
    assert found.warnings == ("1000 B is less than 1/4 of the smallest size measured, 1 MB",)


def test_an_operation_without_a_size_is_not_far_from_any() -> None:
    assert profile(curve()).predict("barrier", 0, ranks=2).warnings == ("barrier was not measured",)


def test_a_barrier_is_carried_over_by_its_messages_where_these_seemed_free() -> None:
    free = OnOneHost.model_copy(update={"base_s": 0.0, "alpha_s": 0.0, "overhead_s": 0.0, "worlds": [2]})
    barrier = curve("barrier", points=[(0, 1e-3)], line=CostLine(alpha_s=1e-3, beta_s=0.0))
    known = Profile(name="", curves=[barrier], constants=[free])
    assert known.predict("barrier", 0, ranks=4).seconds == pytest.approx(2e-3)


def test_a_world_of_one_takes_no_time() -> None:
    assert profile(curve()).predict("all_reduce", 4 * MB, ranks=1).seconds == 0.0
    assert link(1e9).predict("broadcast", 4 * MB, ranks=1).seconds == 0.0


def test_another_world_is_carried_over_by_the_formulas() -> None:
    found = profile(curve(ranks=2), curve(ranks=3)).predict("all_reduce", 4 * MB, ranks=4)
    ratio = OnOneHost.of("all_reduce", 4 * MB, ranks=4, nodes=1) / OnOneHost.of("all_reduce", 4 * MB, ranks=3, nodes=1)
    assert found.seconds == pytest.approx(5e-3 * ratio)
    assert found.how == "formula, fitted on worlds 2, 3"


def test_between_two_measured_worlds_both_count() -> None:
    slow = [(MB, 4e-3), (4 * MB, 10e-3), (16 * MB, 36e-3)]
    both = profile(curve(ranks=2), curve(ranks=8, points=slow))
    middle = both.predict("all_reduce", 4 * MB, ranks=4).seconds
    alone = [profile(each).predict("all_reduce", 4 * MB, ranks=4).seconds for each in both.curves]
    assert min(alone) < middle < max(alone)


def test_a_world_far_beyond_the_largest_is_warned_of_and_less_sure() -> None:
    known = profile(curve(ranks=2), curve(ranks=4))
    near, far = (known.predict("all_reduce", 4 * MB, ranks=ranks) for ranks in (8, 64))
    assert not near.warnings
    assert far.warnings == ("64 ranks are more than 2 times the largest world measured, 4",)
    assert far.high_s / far.seconds > near.high_s / near.seconds


def test_an_operation_that_was_not_measured_comes_from_the_formulas_alone_with_a_warning() -> None:
    found = profile(curve()).predict("scatter", 4 * MB, ranks=2)
    assert found.seconds == pytest.approx(OnOneHost.of("scatter", 4 * MB, ranks=2, nodes=1))
    assert found.warnings == ("scatter was not measured",)
    assert "with other operations" in found.how


def test_back_to_back_calls_have_their_own_curve_where_they_were_measured() -> None:
    behind = curve(points=[(MB, 1e-3), (4 * MB, 4e-3), (16 * MB, 16e-3)], back_to_back=True)
    known = profile(curve(), behind, curve("broadcast"))
    assert known.predict("all_reduce", 4 * MB, ranks=2, back_to_back=True).seconds == 4e-3
    assert known.predict("all_reduce", 4 * MB, ranks=2).seconds == 5e-3
    assert known.predict("broadcast", 4 * MB, ranks=2, back_to_back=True).seconds == 5e-3


def test_another_type_is_that_many_bytes_and_says_so() -> None:
    found = profile(curve()).predict("all_reduce", 4 * MB, ranks=2, dtype="bf16")
    assert found.seconds == 5e-3
    assert found.warnings == ("bf16 was not measured: the time is for the same number of bytes of fp32",)
    own = profile(curve(), curve(dtype="bf16", points=[(MB, 1e-3), (4 * MB, 2e-3), (16 * MB, 9e-3)]))
    assert own.predict("all_reduce", 4 * MB, ranks=2, dtype="bf16").seconds == 2e-3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"operation": "all_reduc"}, UsageError, "did you mean 'all_reduce'"),
        ({"ranks": 0}, UsageError, "world: 0 ranks on 1 nodes are impossible"),
        ({"ranks": 2, "nodes": 3}, UsageError, "every node needs at least one rank"),
        ({"ranks": 3, "nodes": 2}, UsageError, "cannot be divided evenly"),
        ({"nbytes": -1}, UsageError, "0 bytes or more"),
        ({"backend": "nccl"}, RefusedError, "nothing was measured with nccl, only with gloo"),
        ({"ranks": 4, "nodes": 4}, RefusedError, "only with 2 ranks on 1"),
        ({"operation": "scatter", "ranks": 4, "nodes": 4}, RefusedError, "scatter was not measured, only all_reduce"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_the_reason(
    arguments: dict[str, object], error: type[MusterError], text: str
) -> None:
    asked: dict[str, object] = {"operation": "all_reduce", "nbytes": MB, "ranks": 2, **arguments}
    with pytest.raises(error, match=text):
        profile(curve()).predict(asked.pop("operation"), asked.pop("nbytes"), **asked)  # type: ignore[arg-type]


def test_a_link_of_100_gbit_needs_2_8_seconds_for_ten_billion_fp16_gradients_of_eight_ranks() -> None:
    found = link(100e9).predict("all_reduce", 20e9, ranks=8)
    assert found.seconds == pytest.approx(2.8)
    assert link(100e9, 50e-6).predict("all_reduce", 20e9, ranks=8).seconds == pytest.approx(2.8 + 14 * 50e-6)
    assert found.how == "formula, for the given link"


def test_a_tree_over_a_megabyte_a_second_broadcasts_5_mb_to_seven_others_in_15_s() -> None:
    assert link(8e6).predict("broadcast", 5e6, ranks=8).seconds == pytest.approx(15.0)
    assert link(8e6).predict("ping_pong", 5e6, ranks=8).seconds == pytest.approx(5.0)


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1e9, -1e-6)])
def test_links_that_cannot_be_are_refused(rate: float, latency: float) -> None:
    with pytest.raises(UsageError):
        link(rate, latency)


def test_nodes_are_those_that_a_world_was_measured_on_or_would_be() -> None:
    boxed = Profile(name="box", curves=[curve(ranks=2, nodes=2), curve(ranks=4, nodes=4)])
    assert [boxed.nodes_of(ranks) for ranks in (2, 4, 16)] == [2, 4, 16]
    assert [profile(curve(ranks=2)).nodes_of(ranks) for ranks in (2, 16)] == [1, 1]
    pairs = Profile(name="pairs", curves=[curve(ranks=4, nodes=2), curve(ranks=8, nodes=4)])
    assert [pairs.nodes_of(ranks) for ranks in (4, 16)] == [2, 8]
    assert link(1e9).nodes_of(8) == 8


def test_a_profile_reads_back_as_it_was_written_and_is_small(tmp_path: Path) -> None:
    known = profile(*(curve(ranks=ranks) for ranks in range(2, 12)), curve(back_to_back=True))
    both = known.model_copy(update={"constants": [*known.constants, OnLinks]})
    save(both, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == both
    assert (tmp_path / "p.json").stat().st_size < 5000
    save(link(1e9), tmp_path / "link.json")
    assert load(tmp_path / "link.json") == link(1e9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a result of muster bench fit"),
        ('{"muster_bench": 1}', "not a result of muster bench fit"),
        ('{"muster_profile": 1, "name": "x", "old": 1}', "version 1, but this muster reads version 2"),
        ('{"muster_profile": 2}', "name: field required"),
        ('{"muster_profile": 2, "name": "x", "curves": [{}]}', "curves.0.operation"),
    ],
)
def test_other_files_are_refused_with_what_they_are(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(JobFileError, match=says):
        load(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"points": [[MB, 0.0]]}, "must be more than 0 s"),
        ({"points": [[4 * MB, 5e-3], [MB, 2e-3]]}, "in order of size"),
        ({"points": [[MB, 5e-3], [MB, 2e-3]]}, "in order of size"),
        ({"low": 2.0}, "low must be more than 0"),
    ],
)
def test_numbers_that_no_fit_would_give_are_an_error_of_the_file(tmp_path: Path, more: dict, says: str) -> None:
    record = {**curve().model_dump(mode="json"), **more}
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"muster_profile": 2, "name": "x", "curves": [record]}))
    with pytest.raises(JobFileError, match=says):
        load(path)


def test_the_held_out_errors_of_single_curves_are_not_in_the_file(tmp_path: Path) -> None:
    errors = errors_of([(1.1, 1.0), (2.0, 2.0)])
    known = profile(curve(held_out=errors)).model_copy(update={"held_out_sizes": errors})
    save(known, tmp_path / "p.json")
    found = load(tmp_path / "p.json")
    assert (found.held_out_sizes, found.curves[0].held_out) == (errors, None)


def test_the_file_is_json_with_a_curve_a_line(tmp_path: Path) -> None:
    save(profile(curve(), curve("broadcast")), tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert len(json.loads(text)["curves"]) == 2
    assert sum('"operation"' in each for each in text.splitlines()) == 2


def test_of_several_curves_of_one_world_the_usual_one_counts() -> None:
    odd = [(MB, 9.0), (4 * MB, 9.0), (16 * MB, 9.0)]
    unusual = [{"device": "cuda"}, {"call": "async"}]
    known = profile(*(curve(points=odd, **each) for each in unusual), curve())
    assert known.predict("all_reduce", 4 * MB, ranks=2).seconds == 5e-3
    gathers = profile(curve("all_gather", place="in", points=odd), curve("all_gather", place="out"))
    assert gathers.predict("all_gather", 4 * MB, ranks=2).seconds == 5e-3
