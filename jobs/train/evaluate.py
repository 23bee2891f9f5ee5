"""Evaluate a model. The result has the same bits on any number of ranks, unless ranks split layers.

The evaluation samples are cut into fixed blocks, dealt round robin to the ranks, or to groups of ranks that share one
copy of the model. Each block is one forward. Its sums are float64, gathered, and added in the order of blocks.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from muster.jobs.node import page
from muster.jobs.train.data import Data
from muster.jobs.train.data.loading import move_inputs
from muster.jobs.train.engine import Engine
from muster.jobs.train.models.stack import Loss, mean_loss
from muster.jobs.world.world import World, add_in_order
from muster.pipe.weighing import IGNORED

BLOCK_SAMPLES: Final = 64


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over the evaluation samples, and a second metric: accuracy, or perplexity for tokens.

    `figure` names the second metric, or is "" for a user's own loss, which has none.
    """

    loss: float
    figure: str
    value: float
    samples: int

    def row(self) -> dict[str, float]:
        """Return the result as columns for a metrics row."""
        return {"loss": self.loss, **({self.figure: self.value} if self.figure else {})}

    def text(self) -> str:
        """Return the result as a line of text."""
        if not self.figure:
            return f"evaluation  loss {self.loss:.4f}"
        accuracy = f"{100 * self.value:.2f} %"
        value = accuracy if self.figure == "accuracy" else f"{self.value:.2f} on {self.samples:,} windows"
        return f"evaluation  loss {self.loss:.4f}  {self.figure} {value}"


def evaluate(engine: Engine, data: Data, world: World, dtype: torch.dtype, loss: Loss = mean_loss) -> Evaluation | None:
    """Evaluate the model on the evaluation samples: a collective. Return None without evaluation samples."""
    engine.model.synchronize_buffers()
    blocks = -(-data.eval_samples // BLOCK_SAMPLES)
    if blocks == 0:
        return None
    each = -(-blocks // world.data_ranks)
    mine = torch.zeros(each, 3, dtype=torch.float64, device=world.device)  # (blocks, [loss sum, correct, predictions])
    for row in range(each):
        # Ranks that shard parameters must run every forward together, so a rank without a block repeats the last one.
        block = row * world.data_ranks + world.data_rank
        inputs, targets = data.eval_batch(block_indices(min(block, blocks - 1), data.eval_samples))
        result = engine.with_room(partial(result_of, engine, inputs, targets, dtype, loss))
        if block < blocks:
            mine[row] = result
        page.own.beat()
    engine.agree_on_graphs()
    dealt = [rows.tolist() for rows in world.readers(world.gather(mine))]
    in_order = [dealt[block % len(dealt)][block // len(dealt)] for block in range(blocks)]
    loss_sum, right, predictions = (add_in_order(column) for column in zip(*in_order, strict=True))
    mean = loss_sum / (predictions or 1.0)  # 0: no target counts
    if loss is not mean_loss:
        return Evaluation(mean, "", 0.0, data.eval_samples)
    if data.unit == "tokens":
        perplexity = math.inf if mean >= 700.0 else math.exp(mean)  # NaN stays NaN
        return Evaluation(mean, "perplexity", perplexity, data.eval_samples)
    return Evaluation(mean, "accuracy", right / (predictions or 1.0), data.eval_samples)


def result_of(engine: Engine, inputs: Tensor, targets: Tensor, dtype: torch.dtype, loss: Loss) -> Tensor:
    """Predict a block; return its loss sum, correct predictions and all predictions: (3,) float64."""
    device = engine.model.world.device
    outputs, wanted = engine.predict(move_inputs(inputs, device, dtype)), targets.to(device)
    return measure(outputs, wanted) if loss is mean_loss else measure_by(loss, outputs, wanted)


def block_indices(block: int, samples: int) -> Tensor:
    """Return the sample numbers of a block: (up to BLOCK_SAMPLES,) int64."""
    return torch.arange(block * BLOCK_SAMPLES, min((block + 1) * BLOCK_SAMPLES, samples))


def measure(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return loss sum, correct predictions and all predictions of outputs (..., classes), as (3,) float64.

    Predictions with an ignored target do not count.
    """
    flat, wanted = outputs.flatten(0, -2), targets.flatten()  # (predictions, classes), (predictions,)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    loss_sum = F.cross_entropy(flat, wanted, reduction="none").double().sum()
    right = (flat.argmax(dim=-1) == wanted).sum().double()
    return torch.stack([loss_sum, right, (wanted != IGNORED).sum().double()])


def measure_by(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of a user's own loss, 0, and the number of targets that count, or of samples: (3,) float64."""
    value = loss(outputs, targets).double()
    if value.dim():
        return torch.stack([value[0] * targets.numel(), torch.zeros_like(value[0]), value[1]])
    return torch.stack([value * len(targets), torch.zeros_like(value), torch.full_like(value, len(targets))])
