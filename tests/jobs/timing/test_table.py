"""The text of timings, from rows that are given."""

from muster.jobs.timing.records import Dtypes, LayerTypes, TimingRecords, Timings
from muster.jobs.timing.table import number, report_lines, row_text, verdict
from support.timings import header, peak, settings, timed, without_times

GOLDEN = """\
# demo: timings of models on cpu · torch 2.13.0 · 1970-01-01 00:00:01 UTC
# host n1, EPYC, 16 threads on 16 cores, 64 GB
# 3 launches of each row: 1 warm-up step, 2 timed steps, each timed until the device has finished; vocabulary 10,000, rms norm, no biases, tied head
# a product of 2048 x 2048 matrices in fp32: 1.50 TFLOP/s
#
#     model     pass precision    parameters batch context    first   median    +-     mean     std      min      rate      work matmul   memory  warm-up
#                                                              (ms)     (ms)   (%)     (ms)    (ms)     (ms) (units/s) (TFLOP/s)    (%)     (MB)  (ms)
   gpt-nano  forward      fp32       746,816    16     128      100     11.2   6.7     11.0    1.00     10.0   186,182     0.281   18.8      190  100
   gpt-nano     step      fp32       746,816    16     128      100     11.2   6.7     11.0    1.00     10.0   186,182     0.281   18.8      190  100  timeout: 4 of 6 steps were done in 3 s (--timeout)
      vgg11     step      fp32     9,228,362    16       -     11.0     11.0   0.0     11.0       -     11.0     1,455     0.281      -    1,024  -
   gpt-2.7b     step      fp32 2,543,000,000    16     128  out of memory: needs 38.1 GB for weights, gradients and moments
# the first step takes up to 10.0 x the fastest (gpt-nano forward)
# rate: tokens and images; work: operations that the model needs; matmul: rate of work relative to that of the product above; memory: peak growth of the process
# +- encloses the median with 0% confidence (1 launch: samples of one launch; another one may differ); more --launches increase the confidence
# verdict: OK"""  # noqa: E501


def timing(*rows, **changes):
    asked = settings()
    return TimingRecords(header=header(asked), peaks=[peak()], rows=list(rows), is_over=True).model_copy(update=changes)


def test_the_table_has_a_line_for_each_row_and_reasons_in_place_of_numbers():
    late = timed(pass_name="step", state="timeout", reason="4 of 6 steps were done in 3 s (--timeout)")
    one = {"n": 1, "mean_s": 0.011, "std_s": None, "min_s": 0.011}
    image = timed(
        "vgg11",
        "step",
        parameters=9_228_362,
        warm_up_s=[],
        steps_s=[0.011],
        summary=one,
        rate=1455.0,
        matmul_share=None,
        peak_bytes=1 << 30,
    )
    reason = "needs 38.1 GB for weights, gradients and moments"
    large = without_times("memory", reason, model="gpt-2.7b", pass_name="step", parameters=2_543_000_000)
    lines = report_lines(Timings(timings=[timing(timed(), late, image, large)]))
    assert "\n".join(lines) == GOLDEN


def test_without_warm_up_it_says_that_the_first_step_counts():
    row = timed(warm_up_s=[], steps_s=[0.1, 0.011, 0.010, 0.012])
    (said,) = [line for line in report_lines(Timings(timings=[timing(row)])) if "the first step" in line]
    assert said.endswith("(gpt-nano forward), and is included: --warmup 1 excludes it")


def test_many_warm_up_steps_are_shown_by_their_first():
    row = timed(warm_up_s=[0.1, 0.02, 0.012, 0.011, 0.0101, 0.0103])
    (line,) = [line for line in report_lines(Timings(timings=[timing(row)])) if "gpt-nano" in line and "fp32  " in line]
    assert line.endswith("  100 20.0 12.0 11.0 … 6 in all")


def test_a_row_can_be_said_in_a_phrase():
    assert row_text(timed()) == "gpt-nano forward fp32: 11.0 ms +- 1.00 (first 100), 190 MB"
    gone = without_times("failed", "ValueError: no")
    assert row_text(gone) == "gpt-nano forward fp32: failed: ValueError: no"


def test_the_verdict_is_about_what_failed_what_is_missing_and_nothing_at_all():
    too_large = without_times("memory", "needs 38 GB")
    assert verdict(Timings(timings=[timing(timed(), too_large)])) == "OK"
    assert verdict(Timings(timings=[timing(timed(), without_times("failed", "SIGSEGV"))])) == "FAILED"
    assert verdict(Timings(timings=[timing(too_large)])) == "FAILED (nothing was timed)"
    assert verdict(Timings(timings=[timing(timed(), is_over=False)])) == "UNFINISHED"


def types(layer: str, output: str) -> LayerTypes:
    return LayerTypes(layer=layer, kind="Linear", parameters="float32", input="float32", output=output, gradients="-")


def types_table(*layers: LayerTypes) -> list[str]:
    found = timing(
        header=header(settings(dtypes=True)),
        peaks=[],
        dtypes=[Dtypes(model="gpt-nano", precision="fp16", layers=list(layers))],
    )
    return report_lines(Timings(timings=[found]))


def test_types_are_a_table_of_their_own_with_blocks_that_are_alike_as_one():
    blocks = (types("block1.mlp.up", "float16"), types("block2.mlp.up", "float16"))
    assert types_table(*blocks, types("head", "float32"))[2:] == [
        "# vocabulary 10,000, rms norm, no biases, tied head",
        "#",
        "# types of gpt-nano in fp16",
        "# layer          kind    parameters  input    output   gradients",
        "  block*.mlp.up  Linear  float32     float32  float16  -",
        "  head           Linear  float32     float32  float32  -",
        "# verdict: OK",
    ]


def test_blocks_that_differ_are_all_shown():
    lines = types_table(types("block1.mlp.up", "float16"), types("block2.mlp.up", "float32"))
    assert [line.split()[0] for line in lines if "Linear" in line] == ["block1.mlp.up", "block2.mlp.up"]


def test_numbers_have_three_digits_and_no_powers_of_ten():
    values = (None, 0.00012, 0.0345, 0.5, 1.234, 12.34, 123.4, 123_456.7)
    assert [number(each) for each in values] == ["-", "0.0001", "0.0345", "0.500", "1.23", "12.3", "123", "123,457"]
