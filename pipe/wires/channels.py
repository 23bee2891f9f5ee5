"""Send activations and gradients between stages, and receive them ahead of time into reused buffers.

    rank 0   F0.0 send ───────────┐      F0.1 send ─┐
    rank 1   ........ receive a1.0┴─ F1.0 ......... ┴ ...     a1.1 was posted before the wait for a1.0

Both ends of a boundary must know the layout of its tensors. The first message of each form (number of samples and shape
of inputs) has a header: shape, strides, type, and whether a gradient comes back. Later messages have none, so their
receives are posted ahead: up to `AHEAD` messages of each boundary beyond the one being waited for. A buffer is free
again after the backward that used it, so there are as many buffers as the schedule has in flight, plus `AHEAD`.

A tensor is kept until it has been sent. Each send waits until at most `OUTSTANDING` sends on its boundary are pending.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from muster.pipe.schedules.programs import Receive, Send
from muster.pipe.wires.failures import LostError
from muster.pipe.wires.wire import PEERS_TAG, Mark, Message, Wire, dense

AHEAD: Final = 1  # receives posted beyond the awaited one; 0 on GPUs, where a receive occupies multiprocessors
OUTSTANDING: Final = 1
DIMENSIONS: Final = 8  # largest number of dimensions in a header
DTYPES: Final = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
LOSS_TAG: Final = 2
TIED_TAG: Final = 3
HEADER_TAG: Final = 4
OUTPUT_TAG: Final = 5
AGREE_TAG: Final = 6
BATCH_TAG: Final = 7
FIRST_TAG: Final = PEERS_TAG + 1

Form = Any  # size, shape and type of a micro-batch's inputs; they determine the layout of every activation
Way = tuple[int, str, int]  # identifies a sequence of messages that keep their order; see `Channels._way`
Boundary = tuple[str, int, Form]  # ("activation" or "gradient", receiving stage, form)


class TensorLayout(NamedTuple):
    """Shape, strides and type of the tensors at a boundary."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    learns: bool = False  # True if a gradient comes back

    @classmethod
    def of(cls, tensor: Tensor, *, learns: bool = False) -> "TensorLayout":
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, learns)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor with this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def header(self) -> Tensor:
        """Encode the layout as a tensor of numbers."""
        if len(self.shape) > DIMENSIONS:
            raise ValueError(f"a tensor between stages has shape {self.shape}; use at most {DIMENSIONS} dimensions")
        room = [0] * (DIMENSIONS - len(self.shape))
        head = [len(self.shape), DTYPES.index(self.dtype), int(self.learns)]
        return torch.tensor([*head, *self.shape, *room, *self.strides, *room])

    def in_words(self) -> str:
        """Describe the layout for an error message."""
        return f"{self.shape} of {self.dtype}{'' if self.learns else ' without a gradient'}"


NOTHING: Final = TensorLayout((), (), torch.float32, learns=False)  # the layout of gradients that are never sent


def layout_of(header: Tensor) -> TensorLayout:
    """Decode a header."""
    dimensions, dtype, learns, *sizes = header.tolist()
    shape, strides = sizes[:dimensions], sizes[DIMENSIONS : DIMENSIONS + dimensions]
    return TensorLayout(tuple(shape), tuple(strides), DTYPES[dtype], bool(learns))


class Arrival(NamedTuple):
    """A tensor that has been or will be received. `buffer` is None if no gradient is needed, and none is sent."""

    step: Receive
    buffer: Tensor | None
    learns: bool
    message: Message | None


class _Queue:
    """The messages from one peer in a step, in the order in which they are sent."""

    def __init__(self, steps: Iterable[Receive]) -> None:
        self.unasked = deque(steps)
        self.asked: deque[Arrival] = deque()


class Channels:
    """Sends and receives of this rank across all boundaries between stages."""

    def __init__(self, wire: Wire, control: Wire, device: torch.device, microbatches: int) -> None:
        self._wire, self._control, self._device = wire, control, device
        self._microbatches = microbatches
        self._known: dict[Boundary, TensorLayout] = {}
        self._free: dict[TensorLayout, list[tuple[Tensor, Mark]]] = {}
        self._buffers: set[int] = set()  # memory addresses of all buffers
        self._going: dict[Way, deque[tuple[Message, Tensor]]] = {}
        self._queues: dict[Way, _Queue] = {}
        self._here: dict[Receive, Arrival] = {}
        self._forms: list[Form] = []
        self._outstanding = OUTSTANDING
        self._ahead = AHEAD if device.type == "cpu" else 0

    def begin(self, steps: Iterable[Receive], forms: list[Form], *, forwards_only: bool) -> None:
        """Begin a step that receives these messages in this order; post the first receives.

        `forms` has one entry per micro-batch. With `forwards_only` no send waits, because the order of messages was not
        proved free of deadlocks.
        """
        self._forms = forms
        self._outstanding = len(forms) if forwards_only else OUTSTANDING
        ways: dict[Way, list[Receive]] = {}
        for step in steps:
            ways.setdefault(self._way(step), []).append(step)
        self._queues = {way: _Queue(each) for way, each in ways.items()}
        for queue in self._queues.values():
            self._ask_ahead(queue)

    def ask(self, step: Receive) -> None:
        """Post the receive of a message, unless it is already posted; then post receives ahead."""
        queue = self._queues[self._way(step)]
        while step not in self._here:
            if not queue.asked:
                self._ask_for(queue, self._layout_to_come(queue.unasked[0]))
            arrival = queue.asked.popleft()
            self._here[arrival.step] = arrival
        self._ask_ahead(queue)

    def wait(self, step: Receive) -> Arrival:
        """Wait for a posted message. Its buffer belongs to the caller until `release`.

        Raises:
            LostError: If the sender is lost.
        """
        arrival = self._here.pop(step)
        if arrival.message is not None:
            try:
                arrival.message.wait()
            except LostError as error:
                raise LostError(f"waiting for {words(step)}: {error}") from error
        return arrival

    def release(self, arrival: Arrival) -> None:
        """Release a buffer, which the next message may overwrite."""
        assert arrival.buffer is not None
        self._free[self._known[self._boundary(arrival.step)]].append((arrival.buffer, self._wire.mark()))

    def is_buffer(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory of a buffer."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def send(self, step: Send, tensor: Tensor | None, *, learns: bool) -> None:
        """Begin to send an activation to the next stage, or a gradient to the previous one.

        `tensor` is None if there is no gradient. If the first gradient of a form is missing, a header tells the
        receiver that no gradient of this form will follow. If the first gradient was sent, later missing gradients are
        sent as zeros.

        Raises:
            ValueError: If the layout differs from earlier messages of this form.
            LostError: If the peer is lost.
        """
        key = self._boundary(step)
        if tensor is None:
            activation, known = self._known["activation", step.stage + 1, key[2]], self._known.get(key)
            if not activation.learns or known == NOTHING:
                return
            if known is None:
                self._send(step, NOTHING.header(), self._control, header=True)
                self._learn(key, NOTHING)
                return
            tensor = torch.zeros(known.shape, dtype=known.dtype, device=self._device)
        tensor = dense(tensor)
        layout = TensorLayout.of(tensor, learns=learns)
        known = self._known.get(key)
        if known is None:
            self._send(step, layout.header(), self._control, header=True)
            self._learn(key, layout)
        elif known != layout:
            if known._replace(strides=layout.strides) != layout:
                raise ValueError(_apart(step, layout, known))
            tensor = known.empty(tensor.device).copy_(tensor)
        self._send(step, tensor, self._wire)

    def forget_sent_gradients(self) -> None:
        """Wait until the pending gradients have been sent; then release their memory.

        The wait is short, because their receives are posted.
        """
        for (_, what, _), going in self._going.items():
            if what == "gradient":
                self._settle(going, 0)

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        for going in self._going.values():
            self._settle(going, 0)

    def _send(self, step: Send, tensor: Tensor, wire: Wire, *, header: bool = False) -> None:
        if self.is_buffer(tensor):
            tensor = tensor.clone()  # a message may overwrite the buffer before it has been sent
        going = self._going.setdefault(self._way(step), deque())
        going.append((wire.send(tensor, step.peer, self._tag(step, header=header)), tensor))
        self._settle(going, self._outstanding)

    def _settle(self, going: deque[tuple[Message, Tensor]], left: int) -> None:
        while len(going) > left:
            going.popleft()[0].wait()

    def _ask_ahead(self, queue: _Queue) -> None:
        while queue.unasked and len(queue.asked) < self._ahead:
            step = queue.unasked[0]
            comes, layout = self._comes(step), self._known.get(self._boundary(step))
            if comes is None or (comes and layout is None):  # the layout is not known before the header arrives
                return
            self._ask_for(queue, layout)

    def _comes(self, step: Receive) -> bool | None:
        """Return whether a message will be sent, or None if this is not known yet. An unneeded gradient is not sent."""
        if step.what == "activation":
            return True
        activation = self._known.get(("activation", step.stage + 1, self._forms[step.microbatch]))
        if self._known.get(self._boundary(step)) == NOTHING:
            return False
        return None if activation is None else activation.learns

    def _ask_for(self, queue: _Queue, layout: TensorLayout | None) -> None:
        """Post the receive of a peer's next message.

        A `layout` of None means that the peer will not send this message.
        """
        step = queue.unasked.popleft()
        if layout is None or layout == NOTHING:
            queue.asked.append(Arrival(step, None, False, None))
            return
        free = self._free[layout]
        # Take the buffer that has been free longest: on a GPU its last use ends first.
        buffer, mark = free.pop(0) if free else self._new_buffer(layout)
        message = self._wire.receive(buffer, step.peer, self._tag(step), mark)
        queue.asked.append(Arrival(step, buffer, layout.learns, message))

    def _layout_to_come(self, step: Receive) -> TensorLayout | None:
        key = self._boundary(step)
        if not self._comes(step):
            return None
        if key not in self._known:
            header = NOTHING.header()
            try:
                self._control.receive(header, step.peer, self._tag(step, header=True)).wait()
            except LostError as error:
                raise LostError(f"waiting for {words(step)}: {error}") from error
            self._learn(key, layout_of(header))
        return self._known[key] if self._comes(step) else None

    def _learn(self, key: Boundary, layout: TensorLayout) -> None:
        self._known[key] = layout
        self._free.setdefault(layout, [])

    def _way(self, step: Send | Receive) -> Way:
        """Return the key of a message's queue: one queue per peer, or on a wire with tags, one per boundary."""
        return (step.peer, "", 0) if self._wire.ordered else (step.peer, step.what, step.stage)

    def _boundary(self, step: Send | Receive) -> Boundary:
        return step.what, step.stage, self._forms[step.microbatch]

    def _new_buffer(self, layout: TensorLayout) -> tuple[Tensor, Mark]:
        buffer = layout.empty(self._device)
        self._buffers.add(buffer.untyped_storage().data_ptr())
        return buffer, self._wire.mark()

    def _tag(self, step: Send | Receive, *, header: bool = False) -> int:
        kind = 2 * header + (step.what == "gradient")
        return FIRST_TAG + 4 * (step.stage * self._microbatches + step.microbatch) + kind


def words(step: Send | Receive) -> str:
    """Describe a message."""
    return f"the {step.what} of micro-batch {step.microbatch} for stage {step.stage}"


def _apart(step: Send, layout: TensorLayout, known: TensorLayout) -> str:
    """Describe how a tensor's layout differs from earlier ones."""
    if known._replace(strides=layout.strides, learns=layout.learns) == layout:
        why = "keep the layers before a cut trainable or frozen as in the first step, or build a new Pipeline"
    else:
        why = (
            "shapes and types must depend on the inputs only; after a change such as module.to(dtype), "
            "build a new Pipeline"
        )
    return (
        f"the {step.what} of micro-batch {step.microbatch} for stage {step.stage} is {layout.in_words()}, "
        f"but earlier ones for the same number of samples were {known.in_words()}; {why}"
    )
