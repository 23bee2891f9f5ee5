"""A session that is stopped within an epoch and resumed reads what an uninterrupted one reads, from any loader."""

import os
import re
from pathlib import Path

import pytest

from support.programs import Programs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROGRAM = """
import os, random, signal, sys, numpy, torch, muster
from torch.utils.data import *
from torch.utils.data.distributed import DistributedSampler

class Shuffled(IterableDataset):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        numbers = list(range(40))
        self.source.shuffle(numbers)
        yield from map(float, numbers)

class Noisy(Dataset):
    def __init__(self):
        self.transforms = [{"rng": numpy.random.default_rng(3)}, numpy.random.RandomState(3)]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        rng, old = self.transforms
        noise = rng["rng"].random() + old.rand() + random.random() + numpy.random.rand() + torch.rand(()).item()
        return index + noise / 1000

class Counting(Sampler):
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        yield from torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self):
        return 40

data = TensorDataset(torch.arange(40.0))
own = torch.Generator().manual_seed(7)
LOADERS = {
    "shuffle": lambda: DataLoader(data, batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(data, batch_size=4, shuffle=True, generator=own),
    "random sampler": lambda: DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=own)),
    "with replacement": lambda: DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True)),
    "weighted": lambda: DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40)),
    "weighted, own": lambda: DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 40, 40, generator=own)),
    "distributed": lambda: DataLoader(
        data, batch_sampler=BatchSampler(DistributedSampler(data, num_replicas=1, rank=0), 4, False)
    ),
    "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=own), 4, False)),
    "counting": lambda: DataLoader(data, batch_size=4, sampler=Counting()),
    "workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2),
    "iterable, python": lambda: DataLoader(Shuffled(random), batch_size=4),
    "iterable, numpy": lambda: DataLoader(Shuffled(numpy.random), batch_size=4),
    "iterable, own": lambda: DataLoader(Shuffled(random.Random(5)), batch_size=4),
    "iterable, workers": lambda: DataLoader(Shuffled(random), batch_size=4, num_workers=1),
    "noise": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
}

run = muster.session()
for seed in (random.seed, numpy.random.seed, torch.manual_seed):
    seed(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5))
loader, left = LOADERS[sys.argv[1]](), int(sys.argv[2])
state = run.state(model=model)
for epoch in run.epochs(3, state):
    for batch in run.batches(loader):
        batch = batch[0] if isinstance(batch, list) else batch
        out = model(batch[:, None].float()).sum()  # dropout draws from a generator that also orders samples
        print("SEEN", *[each.hex() for each in batch.tolist()], out.item().hex(), random.random().hex(), flush=True)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            run._loop._next = run._loop.done + 1  # the step after which the ranks agree to stop
print("END")
"""

NAMES = re.findall(r'^    "(.*?)": lambda', PROGRAM, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_each_batch_comes_once_and_in_the_same_order(tmp_path: Path, programs: Programs, name: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def read(runs: str, stop_after: int, code: int, **variables: str) -> list[str]:
        env = {**os.environ, "MUSTER_RUNS": str(tmp_path / runs), "OMP_NUM_THREADS": "1", **variables}
        ended = programs.run(program, name, str(stop_after), env=env)
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert "used twice" not in ended.stderr
        return re.findall("SEEN (.*)", ended.stdout)

    whole = read("whole", 0, 0)
    assert len(whole) == 30
    parts = read("runs", 14, 75)  # within the second epoch
    resume = {"MUSTER_RESUME": next(each.name for each in (tmp_path / "runs").glob("program-*"))}
    parts += read("runs", 3, 75, **resume)  # within the same one again
    parts += read("runs", 0, 0, **resume)
    assert parts == whole
