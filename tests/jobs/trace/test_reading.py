"""Steps from marks, events inside events, and where the time went by name."""

import gzip

from muster.jobs.trace.chrome import numbers_of_steps, read_document, with_phases, write_trace
from muster.jobs.trace.events import PhaseSpan, ProfiledStep, read_trace, steps_between
from muster.jobs.trace.kinds import kind_of
from muster.jobs.trace.nesting import nest, nest_trace
from muster.jobs.trace.operators import device_spans_of, kernels_of, kinds_of, matmul_share, operators_of, phases_of
from muster.jobs.trace.record import operators_csv, operators_text, record_of
from support.traces import event, kernels, lane, steps

FACTS = {"rank": 1, "attempt": 0, "steps_of_job": 20}


def test_steps_are_what_lies_between_their_marks() -> None:
    (step,) = read_trace(steps("dffbo", first=6)).steps
    assert step.number == 6
    assert [span.phase for span in step.spans] == ["data", "forward", "backward", "optimizer"]
    assert step.phase_at(15.0) == "forward"
    assert step.phase_at(60.0) is None


def test_a_phase_may_come_again_and_a_step_without_its_end_is_left_out() -> None:
    made = steps_between([(0, "start 3"), (1, "forward"), (2, "backward"), (3, "forward"), (3, "stop"), (4, "start 4")])
    assert made == [
        ProfiledStep(3, (PhaseSpan("forward", 0, 1), PhaseSpan("backward", 1, 2), PhaseSpan("forward", 2, 3)))
    ]
    assert phases_of(read_trace(steps("fbfb"))).keys() == {"forward", "backward"}


def test_events_nest_by_time_on_their_own_thread() -> None:
    trace = read_trace(
        [
            *lane("cpu_op", "outer", "######"),
            *lane("cpu_op", "inner", ".##.#."),
            *lane("cpu_op", "elsewhere", ".####.", 7),
        ]
    )
    nested = {(node.event.name, node.event.start_us): node for node in nest_trace(trace).nodes}
    assert nested["inner", 10.0].parent is nested["outer", 0.0]
    assert nested["outer", 0.0].self_us == 30.0
    assert nested["elsewhere", 10.0].parent is None


def test_a_child_that_ends_late_by_the_clock_s_rounding_is_still_a_child() -> None:
    trace = read_trace([event("cpu_op", "outer", 0.0, 10.0), event("cpu_op", "inner", 5.0, 10.001)])
    outer, inner = nest(next(iter(trace.host.values())))
    assert inner.parent is outer
    assert outer.self_us == 5.0


def test_operators_count_once_inside_their_like_and_only_within_steps() -> None:
    made = [
        *steps("ffffffff "),
        *lane("cpu_op", "aten::to", "####....##"),  # the second one begins in the last tick and none after it counts
        *lane("cpu_op", "aten::mm", ".##......."),
        event("cpu_op", "aten::to", 11.0, 15.0),
    ]
    rows = {row.name: row for row in operators_of(nest_trace(read_trace(made)))}
    assert (rows["aten::to"].calls, rows["aten::to"].cpu_total_us) == (2, 40.0)
    assert rows["aten::mm"].cpu_self_us == 16.0


def test_kernels_are_charged_to_what_launched_them_and_take_their_kind_from_it() -> None:
    made = [
        *steps("ffffff"),
        *lane("cpu_op", "aten::linear", "####.."),
        *lane("cpu_op", "aten::addmm", ".##..."),
        *kernels("a_name_that_says_nothing", "....####", ".x....", stream=7, first=1),
        *kernels("elementwise_kernel", "........#", ".....x", stream=7, first=2),
    ]
    nested = nest_trace(read_trace(made))
    rows = {row.name: row for row in operators_of(nested)}
    assert (rows["aten::linear"].cuda_total_us, rows["aten::linear"].cuda_self_us) == (40.0, 0.0)
    assert rows["aten::addmm"].cuda_self_us == 40.0
    kinds = kinds_of(kernels_of(nested))
    assert kinds == {"matmul": 40e-6, "elementwise": 10e-6}
    assert matmul_share(kinds) == 0.8


def test_a_kernel_launched_before_the_recording_began_is_no_step_s() -> None:
    of_before = kernels("gemm", "##........", "x.........", stream=7, first=1)[1:]  # its launch is not in the trace
    of_step = kernels("relu", "..##......", "x.........", stream=7, first=2)
    assert [row.name for row in kernels_of(nest_trace(read_trace([*steps("ffff"), *of_before, *of_step])))] == ["relu"]
    assert [row.name for row in kernels_of(nest_trace(read_trace([*steps("ffff"), *of_before])))] == ["gemm"]


def test_communication_does_not_dilute_the_share_of_matrix_products() -> None:
    assert matmul_share({"matmul": 1.0, "other": 1.0, "communication": 8.0}) == 0.5
    assert matmul_share({"communication": 8.0}) is None


def test_kinds_of_names_as_they_are() -> None:
    names = {
        "aten::addmm": "matmul",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT": "matmul",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
        "c10d::allreduce_": "communication",
        "aten::_scaled_dot_product_flash_attention": "attention",
        "void pytorch_flash::flash_bwd_kernel<...>": "attention",
        "aten::cudnn_convolution": "convolution",
        "ConvolutionBackward0": "convolution",
        "Optimizer.step#AdamW.step": "optimizer",
        "aten::_fused_adamw_": "optimizer",
        "Memcpy HtoD (Pinned -> Device)": "memory",
        "cudaLaunchKernel": "launch",
        "torch/nn/modules/module.py(1782): _call_impl": "python",
        "ReluBackward0": "autograd",
        "aten::relu": "elementwise",
        "aten::native_layer_norm_backward": "normalization",
        "NativeLayerNormBackward0": "autograd",
        "aten::_log_softmax": "softmax",
        "aten::max_pool2d_with_indices": "pooling",
        "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>": "elementwise",
        "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>": "memory",
        "aten::topk": "other",
        "triton_poi_fused_gelu_3": "compiled",
        "CompiledFunctionBackward": "compiled",
        "aten::empty_strided": "memory",
        "prims::convert_element_type": "other",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32": "convolution",
        "model/convnet.py(12): forward": "python",
    }
    assert {name: kind_of(name) for name in names} == names


def test_the_kept_trace_has_our_steps_and_phases_in_place_of_the_marks(tmp_path) -> None:
    made = [*steps("ffbo", first=6), *lane("cpu_op", "x", "#")]
    made[5:5] = [event("user_annotation", "ProfilerStep#1", -5.0, 45.0)]
    made[6:6] = [event("gpu_user_annotation", "ProfilerStep#1", 900.0, 950.0, 7)]  # the device is behind
    of_rank = {"schemaVersion": 1, "distributedInfo": {"rank": 1}}
    write_trace(tmp_path / "trace.json.gz", with_phases({**of_rank, "traceEvents": made}, nest_trace(read_trace(made))))
    # Holistic Trace Analysis finds a trace's rank by these very letters.
    assert '"rank": 1' in gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode()
    kept = read_document(tmp_path / "trace.json.gz")
    assert kept["schemaVersion"] == 1
    names = [row["name"] for row in kept["traceEvents"] if row["ph"] == "X"]
    assert names == ["ProfilerStep#6", "ProfilerStep#6", "x", "step 6", "forward", "backward", "optimizer"]


def test_a_step_that_was_begun_and_not_done_has_the_next_number() -> None:
    ranges = [event("user_annotation", f"ProfilerStep#{at}", at * 50.0 - 1.0, at * 50.0 + 45.0) for at in range(3)]
    assert numbers_of_steps(ranges, read_trace(steps("ffff ffff", first=6)).steps) == {
        "ProfilerStep#0": "ProfilerStep#6",
        "ProfilerStep#1": "ProfilerStep#7",
        "ProfilerStep#2": "ProfilerStep#8",
    }
    assert numbers_of_steps(ranges, []) == {}


def test_the_device_s_phases_follow_one_another_in_its_own_time() -> None:
    made = [
        *steps("ffbbo"),
        *kernels("gemm", "..##.###", "x.x..", stream=7, first=1),
        *kernels("nccl_Kernel", "......####", "...x.", stream=20, first=5),
    ]
    nested = nest_trace(read_trace(made))
    rows = with_phases({"traceEvents": []}, nested)["traceEvents"]
    device = [(row["name"], row["ts"], row["ts"] + row["dur"]) for row in rows if row["ph"] == "X" and row["tid"] == 2]
    assert device == [("forward", 20.0, 40.0), ("backward", 50.0, 100.0)]


def test_a_step_s_time_on_the_device_is_what_it_launched_however_late_that_runs() -> None:
    made = [*steps("ff ff"), *kernels("gemm", "..##.##", "x..x..", stream=7, first=1)]
    assert device_spans_of(nest_trace(read_trace(made))) == {1: 20e-6, 2: 20e-6}
    assert device_spans_of(nest_trace(read_trace(steps("ff")))) == {}


def test_a_record_keeps_fifty_rows_and_tells_the_same_in_text_and_csv() -> None:
    operators = [event("cpu_op", f"op{number}", number * 1.0, number + 0.5) for number in range(70)]
    record = record_of(nest_trace(read_trace([*steps("ffffffff"), *operators])), FACTS)
    assert len(record["operators"]) == 50
    assert record["overlap"] is None
    assert [step["step"] for step in record["steps"]] == [1]
    text = operators_text(record)
    assert "rank 1, attempt 0, step 1 of 20" in text
    assert "op49" in text
    assert len(operators_csv(record["operators"]).splitlines()) == 51
