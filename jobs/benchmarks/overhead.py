"""What a step costs when nothing fails: ours beside torch DDP, which does the same micro-batches under `no_sync`.

Both train in the same two processes over the same process group, in blocks of 20 steps in the order A B B A; a ratio is
of two neighbouring blocks over the same samples. DDP takes its micro-batches by index from tensors in memory, ours as
ever from the dataset folder. Where a side's tensors happen to lie changes the speed of a convolution by several percent
for as long as the processes live; so they are started anew several times, each time with gaps of other sizes between
the sides' memory, and the interval is that of drawing sessions, and blocks within them. Beside them DDP with one batch
a rank: what small micro-batches cost by themselves. In the end both sides must have the same parameters, but for
rounding.

    python -m jobs.benchmarks.overhead [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing as mp
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from elastic_trainer import prepare
from elastic_trainer.control.effects import FormGeneration
from elastic_trainer.data.batch_plan import BatchPlan
from elastic_trainer.data.dataset import read_index
from elastic_trainer.data.order import SampleOrder
from elastic_trainer.data.reader import DatasetReader
from elastic_trainer.training.gloo import GlooBackend
from elastic_trainer.training.mailbox import Mailbox
from elastic_trainer.training.run import Run
from elastic_trainer.training.saver import Saver
from elastic_trainer.training.settings import TrainSettings
from elastic_trainer.vocabulary import Token, Worker
from jobs.benchmarks.report import Report, median
from jobs.benchmarks.small_gpt import SmallGPT, loss_of, tokens_of

RANKS = 2
BLOCK = 20  # steps
LOGICAL_RANKS = 8
WARM_BLOCKS = 1
PAIRS = 4  # of blocks in a session of fresh processes
SESSIONS, SESSIONS_QUICK = 8, 2
LARGEST_GAP = 1 << 20  # bytes
# activations are allocated from the heap: to map and unmap memory for each costs both sides more than they differ by
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
ROWS = 16_384  # few enough to be made in seconds
WORST_DIFFERENCE = 1e-3  # relative, of the norm of all parameters: rounding grows over hundreds of steps
Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss: the mean over a batch's rows."""

    name: str
    micro_batch: int
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Columns], torch.Tensor]
    data: Callable[[int], dict[str, np.ndarray[Any, Any]]]


def conv_net() -> nn.Module:
    """Three convolutions over (rows, 3, 32, 32); no batch-norm, which the two sides define differently."""
    layers: list[nn.Module] = []
    for low, high in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(low, high, 3, padding=1), nn.GroupNorm(8, high), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def conv_data(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random images and labels."""
    draw = np.random.default_rng(0)
    return {"image": draw.random((rows, 3, 32, 32), dtype=np.float32), "label": draw.integers(0, 10, rows)}


CASES = (
    Case(
        "small GPT",
        8,
        SmallGPT,
        lambda model, batch: loss_of(model, batch["tokens"]),
        lambda rows: {"tokens": tokens_of(rows, 0).numpy()},
    ),
    Case(
        "convolutional network",
        32,
        conv_net,
        lambda model, batch: functional.cross_entropy(model(batch["image"]), batch["label"]),
        conv_data,
    ),
)


def settings_of(case: Case, folder: str, steps: int) -> TrainSettings:
    """As the trainer would make them."""
    index = read_index(folder)
    batch = case.micro_batch * LOGICAL_RANKS
    order = SampleOrder(index.rows, index.row_group, batch, LOGICAL_RANKS, 8, 0)
    return TrainSettings(
        run_name="overhead",
        plan=BatchPlan(order, case.micro_batch),
        train_data=folder,
        evaluation_data=None,
        data_options={},
        routing=None,
        precision="fp32",
        steps=steps,
        seed=0,
        clip_norm=None,
        evaluate_every=None,
        form_s=20.0,
        collective_s=300.0,
        run_url=f"{folder}/../run",
        storage_options={},
        storage_s=30.0,
        save_every=None,
        save_every_s=None,
        save_s=60.0,
    )


class Ours:
    """A worker's loop, one step at a time."""

    def __init__(self, case: Case, settings: TrainSettings, rank: int, port: int) -> None:
        worker = Worker(rank, 0)
        mailbox = Mailbox(lambda event: None, lambda line: None)
        saver = Saver(worker, settings, mailbox)
        self.run = Run(worker, settings, mailbox, GlooBackend("overhead", 20.0, 300.0), saver=saver)
        torch.manual_seed(0)
        self.model = case.build()
        self._case = case
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.run.register(model=self.model, optimizer=self._optimizer)
        ranks = tuple(Worker(each, 0) for each in range(RANKS))
        mailbox.put(FormGeneration(Token(1, 1), ranks, ("127.0.0.1", port), True, "first start", ()))
        self._steps = self.run.steps()
        self._first = next(self._steps, None)  # forms the group

    def steps(self, count: int) -> None:
        """Train so many steps."""
        for _ in range(count):
            step, self._first = self._first or next(self._steps), None
            with step:
                for batch in step:
                    step.backward(self._case.loss(self.model, batch) * batch.rows, batch.rows)
                step.apply(self._optimizer)


class Theirs:
    """DDP over the same samples, from memory: either the same micro-batches, or one batch a rank."""

    def __init__(self, case: Case, settings: TrainSettings, ranks: range, model: nn.Module, *, whole: bool) -> None:
        self._case = case
        self._plan = settings.plan
        self._ranks = ranks
        self._whole = whole
        reader = DatasetReader(settings.train_data)
        rows = reader.rows(np.arange(reader.index.rows))
        self._rows = {name: torch.from_numpy(values) for name, values in rows.items()}
        self.model = copy.deepcopy(model)
        self._ddp = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)

    def ids(self, first: int, count: int) -> list[list[torch.Tensor]]:
        """Which rows the micro-batches of some steps have."""
        found = []
        for step in range(first, first + count):
            ids = [planned.ids for planned in self._plan.of_rank(step, self._ranks)]
            found.append([torch.from_numpy(each) for each in ([np.concatenate(ids)] if self._whole else ids)])
        return found

    def steps(self, ids: list[list[torch.Tensor]]) -> None:
        """Train on them."""
        for micro_batches in ids:
            self._optimizer.zero_grad()
            for number, rows in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                    batch = {name: values[rows] for name, values in self._rows.items()}
                    # DDP takes the mean over ranks; the step's gradient is the mean over its samples
                    scale = len(rows) * RANKS / self._plan.order.global_batch
                    (self._case.loss(self._ddp, batch) * scale).backward()
            self._optimizer.step()


def rank_main(rank: int, case_number: int, session: int, folder: str, port: int, results: Any) -> None:
    """All of one rank; rank 0 tells the figures."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    case = CASES[case_number]
    settings = settings_of(case, folder, steps=(PAIRS + WARM_BLOCKS + 2) * BLOCK)
    sizes = np.random.default_rng(session).integers(64, LARGEST_GAP, 3)
    gaps = [torch.empty(int(sizes[0]), dtype=torch.uint8)]
    ours = Ours(case, settings, rank, port)
    gaps.append(torch.empty(int(sizes[1]), dtype=torch.uint8))
    start = copy.deepcopy(ours.model)
    same = Theirs(case, settings, ours.run.logical_ranks, start, whole=False)
    gaps.append(torch.empty(int(sizes[2]), dtype=torch.uint8))
    whole = Theirs(case, settings, ours.run.logical_ranks, start, whole=True)
    times: dict[str, list[float]] = {"ours": [], "DDP, same micro-batches": [], "DDP, one batch a rank": []}

    def timed(name: str, block: Callable[[], None]) -> None:
        dist.barrier()
        began = time.perf_counter()
        block()
        dist.barrier()
        times[name].append((time.perf_counter() - began) / BLOCK)

    for pair in range(PAIRS + WARM_BLOCKS):
        ids, large = same.ids(pair * BLOCK, BLOCK), whole.ids(pair * BLOCK, BLOCK)
        turns: list[tuple[str, Callable[[], None]]] = [
            ("ours", lambda: ours.steps(BLOCK)),
            ("DDP, same micro-batches", lambda ids=ids: same.steps(ids)),  # type: ignore[misc]
        ]
        for name, block in turns if pair % 2 == 0 else turns[::-1]:
            timed(name, block)
        if pair % 4 == 0:
            timed("DDP, one batch a rank", lambda large=large: whole.steps(large))  # type: ignore[misc]
    difference = _difference(ours.model, same.model)
    if rank == 0:
        results.put(({name: values[WARM_BLOCKS:] for name, values in times.items()}, difference))
    dist.barrier()


def _difference(one: nn.Module, other: nn.Module) -> float:
    mine, theirs = (torch.cat([p.detach().reshape(-1) for p in each.parameters()]) for each in (one, other))
    return float((mine - theirs).norm() / theirs.norm())


def interval(sessions: list[list[float]], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median ratio, by drawing sessions again and again, and ratios within each.

    The ratios of one session have the same memory in common, so they do not count as if each had come about by itself.
    """
    chooser = random.Random(0)

    def drawn() -> list[float]:
        chosen = chooser.choices(sessions, k=len(sessions))
        return [ratio for each in chosen for ratio in chooser.choices(each, k=len(each))]

    medians = sorted(median(drawn()) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


@contextlib.contextmanager
def _folder(case: Case, rows: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as temporary:
        np.savez(Path(temporary) / "rows.npz", **case.data(rows))  # type: ignore[arg-type]
        prepare(Path(temporary) / "rows.npz", Path(temporary) / "data")
        yield f"{temporary}/data"


def measure(number: int, sessions: int) -> tuple[dict[str, list[float]], float]:
    """Seconds a step of each block over all sessions, and how far the two sides' parameters are apart at worst."""
    times: dict[str, list[float]] = {}
    worst = 0.0
    with _folder(CASES[number], ROWS) as folder:
        for session in range(sessions):
            found, difference = _session(number, session, folder)
            for name, values in found.items():
                times.setdefault(name, []).extend(values)
            worst = max(worst, difference)
    return times, worst


def _session(number: int, session: int, folder: str) -> tuple[dict[str, list[float]], float]:
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, number, session, folder, store.port, results), daemon=True)
        for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    found: tuple[dict[str, list[float]], float] = results.get(timeout=1200)
    for each in ranks:
        each.join(30)
    return found


def main() -> None:
    """Both models, and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 blocks of each side instead of 32")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    os.environ.update(MALLOC)  # for the processes that are started
    report, is_right = Report(), True
    for number, case in enumerate(CASES):
        times, difference = measure(number, SESSIONS_QUICK if options.quick else SESSIONS)
        report.table(f"{case.name}, seconds a step", times)
        a, b = times["ours"], times["DDP, same micro-batches"]
        ratios = [mine / theirs for mine, theirs in zip(a, b, strict=True)]
        low, high = interval([ratios[i : i + PAIRS] for i in range(0, len(ratios), PAIRS)])
        report.raw[f"{case.name}, ratios"] = ratios
        print(f"  ours / DDP: median {median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")
        logical = median(b) / median(times["DDP, one batch a rank"])
        print(f"  DDP's micro-batches / DDP's one batch a rank: {logical:.3f}: the price of logical ranks")
        print(f"  parameters differ by {difference:.1e} of their norm")
        report.check(f"{case.name}: step of DDP, ms", 1000 * median(b), ">= 50", median(b) >= 0.05)
        report.check(f"{case.name}: ours / DDP, lower end", low, "<= 1.01", low <= 1.01)
        if difference > WORST_DIFFERENCE:
            print(f"WRONG: {case.name}: the two sides' parameters differ")
            is_right = False
    report.end(options.json, is_right=is_right)


if __name__ == "__main__":
    main()
