"""Notify a data-parallel wrapper of each complete gradient of a pipeline, so that averaging overlaps the last backward.

    stage 0   F0 F1 B0 F2 B1 .. B2 ====B3====          B3 is the last: a gradient is complete once B3 has added to it
    buckets                         [==] [==] [=]      launched in the same order on all ranks that average them
    after the last action                     |  tied weights are summed over stages, then their buckets are launched

The gradient of a parameter with several uses, on one rank or on two, is complete only after the last action, so its
bucket is the last. A backward that is replayed from a CUDA graph calls no hooks, so all gradients of its stage are
reported when it ends.
"""

from collections.abc import Collection

from torch import Tensor, nn

from muster.ddp.reduced import Reduced
from muster.pipe import Pipeline


class ReadyGradients:
    """Hooks that report complete gradients to a wrapper. `shared` names the parameters with several uses.

    The wrapper is in `no_sync()` while the pipeline runs, so its own hooks only accumulate gradients. The hooks of this
    class run after those, because they are registered later.
    """

    def __init__(self, pipeline: Pipeline, wrapper: Reduced, shared: Collection[str]) -> None:
        self.pipeline, self.wrapper = pipeline, wrapper
        named = [(name, each) for name, each in pipeline.module.named_parameters() if each.requires_grad]
        self.late = [each for name, each in named if name in shared]
        wrapper.launch_last(self.late)
        late = {id(each) for each in self.late}
        if pipeline.graphs is not None:
            stages = pipeline.stages
            self.own = {number: [each for each in stages[number].learning if id(each) not in late] for number in stages}
            pipeline.on_last_backward = lambda stage: wrapper.gradients_are_ready(self.own[stage])
            return
        for _, each in named:
            if id(each) not in late:
                each.register_post_accumulate_grad_hook(self._hear)  # type: ignore[no-untyped-call]

    def _hear(self, parameter: Tensor) -> None:
        """Report a gradient after the last micro-batch was added to it."""
        assert isinstance(parameter, nn.Parameter)
        if self.pipeline.in_last_backward:
            self.wrapper.gradients_are_ready((parameter,))

    def row_is_over(self) -> None:
        """Report the gradients of shared parameters. Called after the gradients of tied weights are summed."""
        self.wrapper.gradients_are_ready(self.late)
