"""Training by processes: the loop's bits, whoever trains what; and nothing left behind, however it ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import LocalResult, Task
from afield.scenarios.data import ClientData, ListedData
from afield.training.local import Local, LoopTrainer
from afield.training.workers import WorkersTrainer, cores

SEED = 11
SIZES = (10, 7, 4, 0, 14, 2)


def pool() -> ClientData:
    """Rows of 4 numbers, which are also images of 1 x 2 x 2; sizes differ, client 3 has nothing."""
    words = torch.Generator().manual_seed(2)
    inputs, targets = (
        torch.randn(sum(SIZES), 4, generator=words),
        torch.randint(3, (sum(SIZES),), generator=words),
    )
    return ClientData(inputs, targets, list(torch.arange(sum(SIZES)).split(SIZES)))


class Calling:
    """The pool, but a client's own function runs when a batch of it is wanted."""

    sizes: Sequence[int] = SIZES

    def __init__(self, calls: dict[int, Callable[[], object]]) -> None:
        self.pool, self.calls = pool(), calls

    def batch(self, client: int, positions: Tensor) -> tuple[Any, Tensor]:
        self.calls.get(client, lambda: None)()
        return self.pool.batch(client, positions)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 16, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers)


def block(module: nn.Module, clients: Sequence[int], corrected: bool = False) -> tuple[Any, Any, Any]:
    """Tasks of these clients; every base serves two of them, and a correction is there for every other task."""
    layout, words = Layout.of(module), torch.Generator().manual_seed(3)
    tasks = [Task(10 + at, client, at, 0, 0.0) for at, client in enumerate(clients)]
    start = layout.flatten(module)
    bases = [start + 0.01 * torch.rand(layout.size, generator=words) for _ in clients[::2]]
    pulls = [0.1 * torch.rand(layout.parameters, generator=words) for _ in clients[::2]]
    given = [pulls[at // 2] if corrected and at % 2 else None for at in range(len(tasks))]
    return tasks, [bases[at // 2] for at in range(len(tasks))], given


def same(one: Sequence[LocalResult], two: Sequence[LocalResult]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a.model, b.model)
        and a.model.dtype == b.model.dtype
        and (a.examples, a.steps, a.rate, a.metrics) == (b.examples, b.steps, b.rate, b.metrics)
        for a, b in zip(one, two, strict=True)
    )


def children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest) -> None:
    if torch.accelerator.is_available() and "gpu" not in request.keywords:
        pytest.skip("torch forks no process that can train once autograd has run beside a GPU: hide it")


# ---- the loop's bits ----


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (mlp, {}),
        (mlp, {"momentum": 0.9, "epochs": 2}),
        (mlp, {"weight_decay": 0.3, "prox": 0.1}),
        (dropping, {"optimiser": "adamw", "weight_decay": 0.1}),
        (dropping, {"momentum": 0.5, "prox": 0.1}),
        (cnn, {"momentum": 0.9}),
        (mlp, {"steps": (1, 9, 2, 1, 3, 5)}),
    ],
)
@pytest.mark.parametrize("corrected", [False, True])
def test_bits_are_those_of_the_loop(
    make: Callable[[], nn.Module], options: dict[str, Any], corrected: bool
) -> None:
    module, local = make(), Local(**{"batch": 4, "rate": 0.1, **options})
    given = block(module, [0, 1, 2, 3, 4, 5, 0, 4, 1], corrected)
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)
    with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer:
        assert same(trainer.train(*given), expected)
        alone = [trainer.train(*([part] for part in one))[0] for one in zip(*given, strict=True)]
        assert same(alone, expected)


def test_listed_data_need_no_pickling() -> None:
    class Squares(torch.utils.data.Dataset[tuple[Tensor, int]]):
        def __init__(self, shift: int) -> None:
            self.read = lambda at: (torch.arange(4.0) * 0.1 * (at + shift), at % 3)

        def __len__(self) -> int:
            return 7

        def __getitem__(self, at: int) -> tuple[Tensor, int]:
            if at >= len(self):
                raise IndexError(at)
            return self.read(at)

    module, local, data = mlp(), Local(batch=4), ListedData([Squares(shift) for shift in range(3)])
    given = block(module, [0, 1, 2, 0])
    with WorkersTrainer(module, data, local, SEED, workers=2) as trainer:
        assert same(trainer.train(*given), LoopTrainer(module, data, local, SEED).train(*given))


def test_a_long_block_is_in_order_and_outlives_the_next() -> None:
    module, local = mlp(), Local(batch=4)
    given = block(module, [0, 4, 2, 1] * 25)
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)
    with WorkersTrainer(module, pool(), local, SEED, workers=3) as trainer:
        first = trainer.train(*given)
        started = children()
        trainer.train(*block(module, [1, 4, 0]))
        assert children() == started
    assert same(first, expected)
    # a result that is kept for long keeps nothing but itself
    assert len({result.model.untyped_storage().data_ptr() for result in first}) == len(first)


def test_results_are_taken_in_any_order_while_more_is_begun() -> None:
    module, local = mlp(), Local(batch=4)
    given, more = block(module, [0, 4, 2, 1, 3]), block(module, [3, 0, 1])
    loop = LoopTrainer(module, pool(), local, SEED)
    with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer:
        first, second = trainer.ahead(*given), trainer.ahead(*more)
        late, rest = second[-1](), [one() for one in reversed(first)]
        assert same(
            [*reversed(rest), second[0](), second[1](), late], [*loop.train(*given), *loop.train(*more)]
        )
        unfinished = trainer.ahead(*block(module, [0] * 9))
    with pytest.raises(RuntimeError, match="client 0, task 18: its trainer was closed before it was done"):
        unfinished[8]()


def test_a_failure_is_told_to_whoever_asks_for_that_task() -> None:
    module = mlp()
    given = block(module, [0, 9, 1])
    with WorkersTrainer(module, pool(), Local(), SEED, workers=2) as trainer:
        good, bad, fine = trainer.ahead(*given)
        assert same(
            [fine(), good()],
            [
                LoopTrainer(module, pool(), Local(), SEED).train(*given_part)[0]
                for given_part in ([part[2:] for part in given], [part[:1] for part in given])
            ],
        )
        with pytest.raises(Exception, match="client 9"):
            bad()


def test_what_is_lent_may_change_after_the_call() -> None:
    module, local = mlp(), Local(batch=4)
    base, pull = Layout.of(module).flatten(module), torch.zeros(Layout.of(module).parameters)
    given = block(module, [0, 1, 2])[0], [base] * 3, [pull, None, pull]
    loop = LoopTrainer(module, pool(), local, SEED)
    with WorkersTrainer(module, pool(), local, SEED, workers=1) as trainer:
        for lent in (base, pull, base):
            assert same(trainer.train(*given), loop.train(*given))
            lent.add_(0.1)


def test_threads_here_change_no_bits_and_stay() -> None:
    module, local = cnn(), Local(batch=4)
    given = block(module, [0, 4, 1])
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)
    torch.set_num_threads(2)
    try:
        torch.rand(400, 400) @ torch.rand(400, 400)  # now OpenMP has threads, which a fork does not copy
        with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer:
            assert same(trainer.train(*given), expected)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_from_another_thread_and_inside_no_grad() -> None:
    module, local, found = mlp(), Local(batch=4), []
    given = block(module, [0, 4, 1])
    with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer, torch.no_grad():
        thread = threading.Thread(target=lambda: found.extend(trainer.train(*given)))
        thread.start()
        thread.join()
        again = trainer.train(*given)
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)
    assert same(found, expected)
    assert same(again, expected)


def test_bases_of_other_kinds_and_what_is_not_finite() -> None:
    module, local = mlp(), Local(batch=4)
    tasks, bases, none = block(module, [0, 1, 2, 4])
    bases = [
        bases[0].double(),
        bases[0] * float("nan"),
        bases[2].requires_grad_(),
        bases[2].detach() * float("inf"),
    ]
    with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer:
        results = trainer.train(tasks, bases, none)
        assert trainer.train([], [], []) == []
    expected = LoopTrainer(module, pool(), local, SEED).train(tasks, bases, none)
    assert [result.finite for result in results] == [True, False, True, False]
    assert [result.model.dtype for result in results] == [torch.float64] + 3 * [torch.float32]
    assert torch.equal(results[0].model, expected[0].model)
    assert torch.equal(results[2].model, expected[2].model)
    assert not results[2].model.requires_grad


def test_two_trainers_at_once() -> None:
    module = mlp()
    given = block(module, [0, 4, 1, 2])
    one, two = Local(batch=4), Local(batch=3, momentum=0.9)
    with (
        WorkersTrainer(module, pool(), one, SEED, workers=2) as first,
        WorkersTrainer(module, pool(), two, SEED, workers=2) as second,
    ):
        for _ in range(2):
            assert same(first.train(*given), LoopTrainer(module, pool(), one, SEED).train(*given))
            assert same(second.train(*given), LoopTrainer(module, pool(), two, SEED).train(*given))
        first.close()
        assert same(second.train(*given), LoopTrainer(module, pool(), two, SEED).train(*given))


# ---- failures ----


def refuse() -> None:
    raise InputError("this client's file is empty: fetch it again")


def fail() -> None:
    raise OSError("this client's disk is gone")


@pytest.mark.parametrize(
    "clients",
    # (2: OSError, 5: InputError); longest first is 4, 0, 1, 2, 5, so the first to fail is not the first of the block
    [[0, 2, 4], [5, 0, 1, 2], [0, 5, 1, 2, 4], [2, 5, 4, 4], [4, 9, 1]],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_is_that_of_the_loop_and_not_the_end(clients: list[int], workers: int) -> None:
    module, data, local = mlp(), Calling({2: fail, 5: refuse}), Local(batch=4)
    given, fine = block(module, clients), block(module, [0, 1, 4])
    loop = LoopTrainer(module, data, local, SEED)
    with pytest.raises((InputError, RuntimeError)) as expected:
        loop.train(*given)
    with WorkersTrainer(module, data, local, SEED, workers=workers) as trainer:
        with pytest.raises(type(expected.value)) as caught:
            trainer.train(*given)
        assert str(caught.value) == str(expected.value)
        assert "Traceback" in caught.value.__notes__[0]  # of the process that failed
        assert same(trainer.train(*fine), loop.train(*fine))


def test_misfits_are_refused_as_by_the_loop() -> None:
    module = mlp()
    tasks, bases, none = block(module, [0, 1])
    with WorkersTrainer(module, pool(), Local(), SEED, workers=2) as trainer:
        with pytest.raises(
            InputError, match=r"client 1, task 11\): a base of shape \(1,\) is not a model of 67"
        ):
            trainer.train(tasks, [bases[0], torch.zeros(1)], none)
        with pytest.raises(InputError, match=r"a correction of shape \(2,\) does not fit P = 67"):
            trainer.train(tasks, bases, [torch.zeros(2), None])
        with pytest.raises(ValueError, match="shorter"):
            trainer.train(tasks, bases[:1], none)
    assert not children()  # nothing had to be started for that


def test_a_worker_that_dies_is_an_error_and_the_end() -> None:
    module = mlp()
    data = Calling({1: lambda: os.kill(os.getpid(), signal.SIGKILL), 2: lambda: os._exit(3)})
    for client, words in ((1, r"was killed by signal 9 \(Killed\)"), (2, "ended with exit code 3")):
        trainer = WorkersTrainer(module, data, Local(), SEED, workers=2)
        with pytest.raises(RuntimeError, match=rf"client {client}, task 11.*{words}.*method = \"loop\""):
            trainer.train(*block(module, [0, client, 4, 0, 4]))
        assert not children()
        with pytest.raises(RuntimeError, match="closed: make a new one"):
            trainer.train(*block(module, [0]))


def test_a_lost_worker_names_all_it_had() -> None:
    module, data = mlp(), Calling({4: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    trainer = WorkersTrainer(module, data, Local(), SEED, workers=1)
    with pytest.raises(RuntimeError, match=r"\(client 4, task 10; client 0, task 11\): .* by signal 15"):
        trainer.train(*block(module, [4, 0, 1]))
    assert not children()


def test_a_worker_killed_from_outside() -> None:
    module = mlp()
    told, tell = os.pipe()
    never, hold = os.pipe()

    def stay() -> None:
        os.write(tell, f"{os.getpid():9}".encode())
        os.read(never, 1)  # comes back to nobody: `hold` stays open

    trainer = WorkersTrainer(module, Calling({1: stay}), Local(), SEED, workers=2)
    killer = threading.Thread(target=lambda: os.kill(int(os.read(told, 9)), signal.SIGKILL))
    killer.start()
    with pytest.raises(RuntimeError, match=r"client 1, task 10.*worker process \d+ was killed by signal 9"):
        trainer.train(*block(module, [1, 0, 4]))
    killer.join()
    idle = WorkersTrainer(module, pool(), Local(), SEED, workers=2)
    idle.train(*block(module, [0, 1]))
    for pid in children():
        os.kill(pid or 0, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="was killed by signal 9"):
        idle.train(*block(module, [0, 1]))
    assert not children()
    for end in (told, tell, never, hold):
        os.close(end)


def test_ctrl_c_ends_the_workers() -> None:
    module = mlp()
    never, hold = os.pipe()
    parent = os.getpid()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C reaches every process of the terminal; this one goes on
        os.kill(parent, signal.SIGINT)
        os.read(never, 1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trainer = WorkersTrainer(module, Calling({1: interrupt}), Local(), SEED, workers=2)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(*block(module, [1, 0]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not children()
    os.close(never)
    os.close(hold)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_beside_a_gpu_training_goes_on_without_workers(caplog: pytest.LogCaptureFixture) -> None:
    module, local = mlp(), Local(batch=4)
    given = block(module, [0, 4, 1, 2])
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)  # autograd has run here
    with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer:
        for _ in range(2):
            assert same(trainer.train(*given), expected)
        assert not children()
    assert [record.getMessage()[:32] for record in caplog.records] == ["autograd has run in this process"]


# ---- nothing is left behind ----


def test_closing_and_garbage_end_the_workers() -> None:
    module = mlp()
    given = block(module, [0, 1, 2])
    trainer = WorkersTrainer(module, pool(), Local(), SEED, workers=3)
    assert not children()
    trainer.train(*given)
    assert len(children()) == 3
    trainer.close()
    trainer.close()
    assert not children()
    with pytest.raises(RuntimeError, match="this trainer is closed"):
        trainer.train(*given)
    trainer = WorkersTrainer(module, pool(), Local(), SEED, workers=2)
    trainer.train(*given)
    del trainer
    gc.collect()
    assert not children()


def test_a_forked_copy_of_a_trainer_does_not_end_it() -> None:
    module = mlp()
    given = block(module, [0, 1, 2])
    with WorkersTrainer(module, pool(), Local(), SEED, workers=2) as trainer:
        first = trainer.train(*given)
        other = multiprocessing.get_context("fork").Process(target=trainer.close)
        other.start()
        other.join()
        assert other.exitcode == 0
        assert same(trainer.train(*given), first)


@pytest.mark.parametrize("killed", [True, False])
def test_no_worker_outlives_its_parent(killed: bool) -> None:
    context, module = multiprocessing.get_context("fork"), mlp()
    (alive, held), (here, there) = os.pipe(), context.Pipe()  # the workers inherit `held`

    def parent() -> None:
        os.close(alive)
        here.close()
        trainers = [WorkersTrainer(module, pool(), Local(), SEED, workers=2) for _ in range(2)]
        there.send([len(trainer.train(*block(module, [0, 1, 2]))) for trainer in trainers])
        there.recv()

    process = context.Process(target=parent)
    process.start()
    os.close(held)
    there.close()
    assert here.recv() == [3, 3]
    if killed:
        process.kill()
    else:
        here.send("that is all")
    process.join()
    assert process.exitcode == (-signal.SIGKILL if killed else 0)
    assert select.select([alive], [], [], 60)[0], "a worker is still there after a minute"
    assert os.read(alive, 1) == b""  # nobody holds the other end any more
    os.close(alive)


# ---- where there can be none ----


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> WorkersTrainer:
        return WorkersTrainer(mlp(), pool(), Local(), SEED, **options)

    with pytest.raises(InputError, match=r"workers = 0 is outside \[1, inf\]"):
        make(workers=0)
    with pytest.raises(InputError, match="requires_grad: there is nothing to train"):
        WorkersTrainer(mlp().requires_grad_(False), pool(), Local(), SEED, workers=2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert cores() == 1
    with pytest.raises(InputError, match=r"1 core is open to this process.*set method = \"loop\""):
        make()
    make(workers=2).close()
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert cores() == 1
    with pytest.raises(InputError, match=r"forked, which .* cannot do safely: set method = \"loop\""):
        make(workers=2)


def test_inside_a_daemonic_process() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def attempt() -> None:
        try:
            WorkersTrainer(mlp(), pool(), Local(), SEED, workers=2)
        except InputError as error:
            there.send((cores(), str(error)))

    process = context.Process(target=attempt, daemon=True)
    process.start()
    count, message = here.recv()
    process.join()
    assert count == 1
    assert message.startswith("this process is itself a daemonic worker")
    assert message.endswith('set method = "loop"')
