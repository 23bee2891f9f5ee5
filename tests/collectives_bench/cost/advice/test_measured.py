"""Measured layer times: sizes and numbers of ranks in between, what collectives cost."""

import pytest

from muster.collectives_bench.cost.advice.measured import LayerTimes

RECORD = {
    "muster_layers": 1,
    "cores": 2,
    "ranks": 4,
    "passes": [
        {"samples": 4, "active": 1, "forward_s": 0.05, "backward_s": 0.10},
        {"samples": 16, "active": 1, "forward_s": 0.17, "backward_s": 0.34},
        {"samples": 4, "active": 4, "forward_s": 0.10, "backward_s": 0.20},
        {"samples": 16, "active": 4, "forward_s": 0.34, "backward_s": 0.68},
    ],
    "updates": [{"active": 1, "seconds": 0.01}, {"active": 4, "seconds": 0.03}],
    "layers": [
        {"name": "a", "forward_s": 0.01, "backward_s": 0.03},
        {"name": "b", "forward_s": 0.03, "backward_s": 0.03},
    ],
    "messages": {
        "cpu_s_per_byte": 4e-9,
        "idle_1024_s": 0.001,
        "busy_1024_s": 0.011,
        "idle_1048576_s": 0.002,
        "busy_1048576_s": 0.012,
    },
    "variants": {"compile": [0.08, 0.16], "cuda_graph": None},
}
TIMES = LayerTimes.model_validate(RECORD)


def test_measured_sizes_keep_their_times_and_others_lie_on_the_line_between() -> None:
    assert TIMES.pass_s(4) == pytest.approx((0.05, 0.10))
    assert TIMES.pass_s(10) == pytest.approx((0.11, 0.22))
    assert TIMES.pass_s(28) == pytest.approx((0.29, 0.58))
    assert TIMES.pass_s(4, 2.5) == pytest.approx((0.075, 0.15))  # halfway between 1 and 4 ranks
    assert TIMES.pass_s(4, 8) == pytest.approx((0.20, 0.40))  # twice as many ranks as measured


def test_ranks_that_share_cores_stretch_each_other() -> None:
    assert TIMES.stretch(1) == pytest.approx(1.0)
    assert TIMES.stretch(4) == pytest.approx(2.0)
    assert TIMES.update_s(4) == pytest.approx(0.03)


def test_layers_have_their_share_of_a_forward_and_of_a_backward() -> None:
    assert TIMES.shares(["a"]) == pytest.approx((0.25, 0.5))
    assert TIMES.model_copy(update={"layers": []}).shares(["a"]) is None


def test_collectives_take_cores_from_a_backward_only_if_none_is_idle() -> None:
    busy = TIMES.lanes("gloo", active=4, bytes_per_s=25e6)  # 4 x 4e-9 x 25e6 = 0.4 of 2 cores
    assert busy.slowed == pytest.approx(2 / 1.6)
    assert busy.busy_s == pytest.approx(0.010)
    idle = TIMES.lanes("gloo", active=1, bytes_per_s=25e6)
    assert (idle.slowed, idle.busy_s) == (1.0, 0.0)
    assert TIMES.lanes("gloo", active=4, bytes_per_s=1e12).slowed == pytest.approx(4.0)  # the limit


def test_options_are_relative_to_passes_of_all_ranks() -> None:
    assert TIMES.factor("compile") == pytest.approx(0.24 / 0.30)
    assert TIMES.factor("cuda_graph") is None


def test_recorded_passes_have_their_own_times() -> None:
    recorded = [{"samples": 4, "active": 2, "forward_s": 0.01, "backward_s": 0.02}]
    more = {"device": "cuda", "replays": recorded, "halves": [0.1, 0.06, 0.05]}
    times = LayerTimes.model_validate({**RECORD, **more})
    assert times.pass_s(4, 4, recorded=True) == pytest.approx((0.01, 0.02))
    assert times.pass_s(4, 4) == pytest.approx((0.05, 0.10))  # GPUs do not share cores
    assert times.backward_halves == pytest.approx((0.6, 0.5))
    assert TIMES.backward_halves == (0.5, 0.5)
    assert TIMES.pass_s(4, recorded=True) == TIMES.pass_s(4)


def test_the_engine_needs_the_cpu_time_of_a_real_step_beyond_that_of_its_layers() -> None:
    # passes of 4 samples on 4 ranks that share 2 cores: 0.15 s of a core, an update 0.015 s
    steps = [
        {"mode": "1f1b", "microbatches": 4, "samples": 4, "seconds": 1, "host_s": 0, "cpu_s": 0.15 + 0.015 / 4 + 0.08},
        {"mode": "flat", "microbatches": 4, "samples": 4, "seconds": 1, "host_s": 0, "cpu_s": 0.15 + 0.015 + 0.03},
    ]
    times = LayerTimes.model_validate({**RECORD, "steps": steps})
    assert times.engine_s("1f1b", 4) == pytest.approx(0.01)  # of each of 8 actions
    assert times.engine_s("interleaved", 4) == pytest.approx(0.01)
    assert times.engine_s("flat", 4) == pytest.approx(0.03)
    assert (times.engine_s("zb1p", 4), TIMES.engine_s("1f1b", 4)) == (0.0, 0.0)
    more = {**steps[0], "samples": 16, "cpu_s": 0.51 + 0.015 / 4 + 0.24}
    larger = LayerTimes.model_validate({**RECORD, "steps": [*steps, more]})
    assert larger.engine_s("1f1b", 10) == pytest.approx(0.02)


def test_slices_cost_what_their_own_steps_show_or_else_what_those_of_gpipe_show() -> None:
    passes_s, sliced_s, update_s = 0.15, sum(TIMES.pass_s(1, 4)) / 2 * 4, 0.015
    step = {"microbatches": 4, "samples": 4, "seconds": 1, "host_s": 0}
    steps = [{**step, "mode": "gpipe", "cpu_s": passes_s + update_s / 4 + 0.08}]
    without = LayerTimes.model_validate({**RECORD, "steps": steps})
    assert without.engine_s("terapipe", 1) == pytest.approx(0.01 / 4)  # a quarter of four samples
    steps += [{**step, "mode": "terapipe", "slices": 4, "cpu_s": sliced_s + update_s / 4 + 0.64}]
    own = LayerTimes.model_validate({**RECORD, "steps": steps, "slices": []})  # as files of 0.1.0
    assert own.engine_s("terapipe", 1) == pytest.approx(0.64 / 32)


def test_steps_with_more_micro_batches_show_the_engines_time_of_a_step() -> None:
    passes_s, update_s = sum(TIMES.pass_s(1, 4)) / 2 / 4, 0.015 / 4  # of a micro-batch on each of four ranks
    steps = [
        {"mode": "gpipe", "microbatches": count, "samples": 1, "seconds": 1, "host_s": 0}
        | {"cpu_s": passes_s * count + update_s + 0.02 + 2 * count * 0.005}
        for count in (4, 16)
    ]
    times = LayerTimes.model_validate({**RECORD, "steps": steps})
    assert times.each_step_s == pytest.approx(0.02)
    assert times.engine_s("gpipe", 1) == pytest.approx(0.005)
    assert TIMES.each_step_s == 0.0


def test_a_byte_on_the_network_needs_more_cpu_time_than_on_the_loopback() -> None:
    per_byte = 4e-9 / 1.5  # on the loopback: an all-reduce of 4 ranks sends 1.5 times its buffer
    assert TIMES.message_s(1e6, per_byte) == pytest.approx(0.0)
    assert TIMES.message_s(1e6, per_byte + 5e-9) == pytest.approx(0.005)
    slow = TIMES.lanes("gloo", active=4, bytes_per_s=25e6, cpu_s_per_byte=2 * per_byte)
    assert slow.slowed == pytest.approx(2 / 1.2)


def test_the_host_of_a_gpu_needs_a_time_for_a_step_and_for_each_action() -> None:
    steps = [
        {"mode": "zb1p", "microbatches": count, "samples": 1, "seconds": 1, "host_s": host_s, "cpu_s": 0}
        for count, host_s in ((4, 0.005), (16, 0.014))
    ]
    times = LayerTimes.model_validate({**RECORD, "device": "cuda", "steps": steps, "host": [0.1, 0.1, 0.004]})
    assert times.host_s(12, 4) == pytest.approx(0.005)
    assert times.host_s(24, 4) == pytest.approx(0.008)
    assert times.host_s(24, 2) == pytest.approx(0.009)  # twice as many parameters to update
