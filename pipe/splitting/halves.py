"""Zero bubble's two halves of a backward: gradients of inputs at once, gradients of weights when there is time.

    plain      F ....... B            B: dX and dW of every layer, and the stage before waits for all of it
    split      F ....... I .. W       I: dX, which the stage before waits for;  W: dW, for which nobody waits

    queue = WeightQueue(module)                    # its linear layers and convolutions are split
    loss = module(inputs).sum()
    with queue.collecting(0):
        loss.backward()                            # I: norms, embeddings and their like have their gradients, too
    queue.run(0)                                   # W: linear layers and convolutions

The cut goes through the operation: it needs no second walk through the graph, which keeps no memory and costs no time.
`pipe/splitting/layers.py` has the layers, `pipe/splitting/weight_gradients.py` the products.

Source: Qi et al. 2024, "Zero bubble pipeline parallelism"; that the weights' half can be put off by each layer for
itself is from DeepSeek-AI 2025, "DualPipe".
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from muster.pipe.splitting.layers import is_split, kind_of, restore, split
from muster.pipe.splitting.weight_gradients import Sums, Work

Later = Callable[[], None]


class WeightQueue:
    """What is left to do for the weights of a module, by micro-batch.

    Building one splits the module's `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` layers, until `restore()`,
    the end of a `with` or the queue's own end; state dict, names and parameters stay what they are. A copy of a split
    layer, or one that comes out of a pickle, is a plain one. A layer whose weight is computed by a norm, a mask or a
    parametrization, now or later, is whole. A key is anything that names one backward: a stage and a micro-batch.

    From `collecting` to `run`, inputs of these layers and gradients of their outputs are held as they are, not copied:
    memory that either lies in must not be written to in between.

    `run` adds to `.grad` what autograd would have added, and calls the hooks that parameters have. With `exact` the
    bits are autograd's, if keys are run in the order of a loop over micro-batches: a weight that is another module's,
    too, as a tied head's is the embedding's, then stays whole. Two exceptions, by a rounding: a weight that a forward
    also computes with by hand, and, under autocast, one that is used twice in a micro-batch.

    Raises:
        ValueError: a layer of the module is split already.
    """

    def __init__(self, module: nn.Module, *, exact: bool = False) -> None:
        self.exact = exact
        self._works: dict[Hashable, list[Work | Later]] = {}
        self._open: list[Work | Later] | None = None  # of the key that a backward collects under
        layers = list(module.modules())
        if taken := [type(each).__name__ for each in layers if is_split(each)]:
            raise ValueError(f"{len(taken)} layers ({taken[0]}, ...) are split already; restore() their queue first")
        kinds = [kind_of(each) for each in layers]
        whole = {
            id(parameter)
            for each, kind in zip(layers, kinds, strict=True)
            if exact and kind is None
            for parameter in each.parameters(recurse=False)
        }
        self._layers: list[nn.Module] = []
        self._others: list[nn.Module] = []
        for each, kind in zip(layers, kinds, strict=True):
            if kind is not None and whole.isdisjoint(map(id, each.parameters(recurse=False))):
                split(each, kind, self)
                self._layers.append(each)
            elif kind is None and not exact and hasattr(each, "keeper"):
                each.keeper = weakref.proxy(self)  # tensor-parallel layers split themselves
                self._others.append(each)
        weakref.finalize(self, _restore, self._layers, self._others).atexit = False

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Keep the weights' half of the backwards within under a key; several add to one.

        Raises:
            RuntimeError: another key is open; a split layer's backward runs with no key open.
        """
        if self._open is not None:
            raise RuntimeError(f"collecting({key!r}) within another collecting(): close that first")
        self._open = self._works.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def keep(self, work: Work | Later) -> None:
        """Take what is left to do; within a backward, or anywhere in `collecting`.

        A layer of one's own may give a function without arguments, to be called by `run` in its turn.
        """
        if self._open is None:
            raise RuntimeError(
                "the backward of a split layer outside of collecting(key), which would keep its weights'"
            )
        self._open.append(work)

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Do what is left of a key, in the order of its backward, and let its memory go.

        Raises:
            RuntimeError: nothing has been collected under the key, or it was run before.
        """
        works = self._works.pop(key, None)
        if works is None or works is self._open:
            raise RuntimeError(f"run({key!r}): nothing was collected under this key, or it was run before")
        sums = Sums([each for each in works if isinstance(each, Work)], exact=self.exact)
        works.reverse()
        while works:
            work = works.pop()  # each one's memory goes when it is done
            if isinstance(work, Work):
                work.kind.run(work, sums)
            else:
                work()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What has been collected and not been run, oldest first."""
        return tuple(self._works)

    def finish(self) -> None:
        """Check at the end of a step that nothing was forgotten.

        Raises:
            RuntimeError: some gradients of weights have not been made; the message has their keys.
        """
        if self._works:
            left = ", ".join(map(repr, list(self._works)[:4]))
            raise RuntimeError(f"{len(self._works)} backwards without their weights' half: run({left}, ...)")

    def discard(self) -> None:
        """Forget what is left, after a step that failed."""
        self._works.clear()

    def restore(self) -> None:
        """Give the layers their own classes back; what is left can still be run."""
        _restore(self._layers, self._others)

    def __enter__(self) -> "WeightQueue":
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def _restore(layers: list[nn.Module], others: list[nn.Module]) -> None:
    for each in layers:
        restore(each)
    for each in others:
        each.keeper = None  # type: ignore[assignment]
    layers.clear()
    others.clear()
