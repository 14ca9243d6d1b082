"""Whole event logs of hand-worked scenarios: ties, dropouts, restarts, holds, rounds, ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from afield.core.errors import InputError
from afield.core.keys import exponential
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, Scene, Task
from afield.runtimes.rows import Measurement
from afield.runtimes.simulate import _flow
from afield.runtimes.simulator import ARRIVE, Simulator
from afield.runtimes.terms import Manners, Measuring, Stop
from afield.scenarios.availability import Always, Dropout, OnOff
from afield.scenarios.schedulers import (
    All,
    Bernoulli,
    CheckIn,
    Cohort,
    Concurrency,
    SampledStaleness,
    Ticks,
)
from afield.strategies import ACE, ACED, ASGD, FedAsync, FedAvg, FedBuff


@dataclass
class Adds:
    """A trainer whose result says where it came from: base + 1; remembers the blocks it was given."""

    blocks: list[list[int]] = field(default_factory=list)

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        self.blocks.append([task.number for task in tasks])
        return [
            LocalResult(base + 1.0, 1, 1, 1.0, {"loss": float(task.client)})
            for task, base in zip(tasks, bases, strict=True)
        ]


@dataclass(frozen=True)
class Given:
    """Delays written down per client; the last one repeats."""

    rows: tuple[tuple[float, ...], ...]

    def bind(self, scene: Scene) -> Callable[[int, int], float]:
        return lambda client, count: self.rows[client][min(count, len(self.rows[client]) - 1)]


@dataclass(frozen=True)
class Hours:
    """Online intervals written down per client."""

    rows: tuple[tuple[tuple[float, float], ...], ...]

    def bind(self, scene: Scene) -> Callable[[int, float], tuple[bool, float]]:
        def presence(client: int, now: float) -> tuple[bool, float]:
            for on, off in self.rows[client]:
                if now < on:
                    return False, on
                if now < off:
                    return True, off
            return False, math.inf

        return presence


def simulator(
    strategy: Any,
    delays: Sequence[Sequence[float]],
    *,
    scheduler: Any = None,
    rounds: Any = None,
    availability: Any = None,
    **options: Any,
) -> Simulator:
    scene = Scene(options.pop("seed", 0), [1] * len(delays), [1] * len(delays))
    flow, strategy = _flow(strategy, scheduler or All(), rounds or Cohort(len(delays)), scene)
    manners = options.get("manners", Manners())
    server = Server(strategy, torch.zeros(2), len(delays), max_staleness=manners.max_staleness)
    delay = Given(tuple(tuple(row) for row in delays)).bind(scene)
    presence = (availability or Always()).bind(scene)
    return Simulator(
        server, options.pop("trainer", Adds()), flow, scene, delay=delay, presence=presence, **options
    )


def log(sim: Simulator) -> list[tuple[Any, ...]]:
    """(client, base, started, arrived, staleness, version after, refused) of every receipt."""
    rows = [row for row in sim.rows() if isinstance(row, Receipt)]
    return [(r.client, r.base, r.started, r.arrived, r.staleness, r.version, r.refused) for r in rows]


def test_two_speeds() -> None:
    sim = simulator(FedAsync(), [[1.0], [2.5]], stop=Stop(time=5.0))
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 1, ""),
        (0, 1, 1.0, 2.0, 0, 2, ""),
        (1, 0, 0.0, 2.5, 2, 3, ""),
        (0, 2, 2.0, 3.0, 1, 4, ""),
        (0, 4, 3.0, 4.0, 0, 5, ""),
        (1, 3, 2.5, 5.0, 2, 6, ""),  # both at 5.0: client 1 was dispatched first (at 2.5, the other at 4.0)
        (0, 5, 4.0, 5.0, 1, 7, ""),
    ]
    assert sim.ended == "time"


def test_ties_go_by_the_order_of_dispatch() -> None:
    sim = simulator(FedAsync(), [[1.0]] * 3, stop=Stop(updates=5))
    assert [(row[0], row[3]) for row in log(sim)] == [(0, 1.0), (1, 1.0), (2, 1.0), (0, 2.0), (1, 2.0)]


def test_reply_before_starts_from_the_model_before_the_update() -> None:
    manners = Manners(reply="before")
    sim = simulator(FedAsync(), [[1.0], [2.5]], stop=Stop(time=3.0), manners=manners)
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 1, ""),
        (0, 0, 1.0, 2.0, 1, 2, ""),  # handed out at 1.0 before version 1 existed
        (1, 0, 0.0, 2.5, 2, 3, ""),
        (0, 1, 2.0, 3.0, 2, 4, ""),
    ]


def test_too_stale_updates_are_dropped_and_their_client_starts_again() -> None:
    sim = simulator(FedAsync(), [[1.0], [2.5]], stop=Stop(time=5.0), manners=Manners(max_staleness=1))
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 1, ""),
        (0, 1, 1.0, 2.0, 0, 2, ""),
        (1, 0, 0.0, 2.5, 2, 2, "too-stale"),
        (0, 2, 2.0, 3.0, 0, 3, ""),
        (0, 3, 3.0, 4.0, 0, 4, ""),
        (1, 2, 2.5, 5.0, 2, 4, "too-stale"),
        (0, 4, 4.0, 5.0, 0, 5, ""),
    ]
    assert sim.updates == 5


def test_restart_interrupts_as_soon_as_the_bound_is_passed() -> None:
    manners = Manners(max_staleness=1, stale="restart")
    sim = simulator(FedAsync(), [[1.0], [2.5, 0.5]], stop=Stop(time=3.5), manners=manners)
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 1, ""),
        (0, 1, 1.0, 2.0, 0, 2, ""),  # version 2: client 1 (base 0) is interrupted and starts from 2
        (1, 2, 2.0, 2.5, 0, 3, ""),
        (0, 2, 2.0, 3.0, 1, 4, ""),  # at 3.0 client 1's next (from 2.5) arrives too, dispatched later
        (1, 3, 2.5, 3.0, 1, 5, ""),
        (1, 5, 3.0, 3.5, 0, 6, ""),
    ]
    # task 1 was trained in vain (interrupted), task 6 never (it would arrive at 4.0); earliest arrivals first
    assert sim.trainer.blocks == [[0, 1], [2], [4, 3], [5], [7]]


def test_a_paused_task_goes_on_when_its_client_is_back() -> None:
    hours = Hours((((0, 1), (3, 9)), ((0, 9),)))
    sim = simulator(FedAsync(), [[2.0], [1.5]], availability=hours, stop=Stop(time=4.5))
    assert [(row[0], row[2], row[3]) for row in log(sim)] == [
        (1, 0.0, 1.5),
        (1, 1.5, 3.0),
        (0, 0.0, 4.0),  # one unit before 1, one after 3
        (1, 3.0, 4.5),
    ]


def test_an_aborted_task_is_lost_and_its_client_starts_anew() -> None:
    hours = Hours((((0, 1), (3, 9)), ((0, 9),)))
    manners = Manners(offline="abort")
    sim = simulator(FedAsync(), [[2.0], [1.5]], availability=hours, stop=Stop(time=5.0), manners=manners)
    assert [(row[0], row[2], row[3]) for row in log(sim)] == [
        (1, 0.0, 1.5),
        (1, 1.5, 3.0),
        (1, 3.0, 4.5),
        (0, 3.0, 5.0),  # started anew at 3, from the model of then
    ]
    assert 0 not in sim.server.leases  # its first task is not leased any more


@pytest.mark.parametrize("offline", ["pause", "abort"])
def test_who_leaves_for_good_frees_its_slot(offline: str) -> None:
    """Client 0 trains from 0 to 4 but is gone from 2: with one slot, client 1 gets it at 2."""
    hours = Hours((((0, 2),), ((0, 99),)))
    sim = simulator(
        FedAsync(),
        [[4.0], [1.0]],
        availability=hours,
        scheduler=Concurrency(1),
        stop=Stop(updates=3),
        manners=Manners(offline=offline),
        seed=_seed_that_picks_first(0),
    )
    assert [(row[0], row[2], row[3]) for row in log(sim)] == [(1, 2.0, 3.0), (1, 3.0, 4.0), (1, 4.0, 5.0)]


def _seed_that_picks_first(client: int) -> int:
    for seed in range(100):
        lottery = Concurrency(1).bind(Scene(seed, [1, 1]))
        lottery.ready(0)
        lottery.ready(1)
        if lottery.pick(0) == client:
            return seed
    raise AssertionError("no seed picks that client")


def test_the_run_ends_when_everyone_is_gone() -> None:
    gone = Dropout(share=1.0, at=2.5)
    sim = simulator(FedAsync(), [[1.0], [2.0]], availability=gone, stop=Stop(time=100.0))
    assert [(row[0], row[3]) for row in log(sim)] == [(0, 1.0), (1, 2.0), (0, 2.0)]
    assert (sim.ended, sim.now) == ("nobody is left", 100.0)  # the model stays what it is until then
    assert not sim.server.leases


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (FedAsync(), {"measuring": Measuring(time=1.0)}),
        (ASGD(per="tick"), {"scheduler": Ticks(), "measuring": Measuring(time=1.0)}),
        (FedAvg(), {"measuring": Measuring(time=1.0)}),
        (FedAvg(), {"rounds": Bernoulli(p=1.0)}),
    ],
)
def test_neither_measurements_nor_ticks_nor_empty_rounds_go_on_for_ever(strategy: Any, options: Any) -> None:
    sim = simulator(
        strategy, [[1.0], [2.0]], availability=Dropout(share=1.0, at=2.5), stop=Stop(updates=50), **options
    )
    rows = list(itertools.islice(sim.rows(), 100))
    assert len(rows) < 20
    assert sim.ended == "nobody is left"
    assert sim.now < 6


def test_empty_rounds_wait_for_who_comes_back() -> None:
    """Round 1 (from 2.0) loses both at 2.5; empty rounds of 1.0 follow, the last from 19.5 to 20.5."""
    gone = Dropout(share=1.0, at=2.5, back=20.0)
    sim = simulator(
        FedAvg(), [[1.0], [2.0]], availability=gone, stop=Stop(updates=4), manners=Manners(offline="abort")
    )
    assert [(row[0], row[1], row[2], row[3]) for row in log(sim)] == [
        (0, 0, 0.0, 1.0),
        (1, 0, 0.0, 2.0),
        (0, 20, 20.5, 21.5),
        (1, 20, 20.5, 22.5),
    ]
    assert sim.ended == "updates"


def test_ace_holds_its_clients_until_all_were_heard() -> None:
    sim = simulator(ACE(), [[1.0], [2.0], [3.0]], stop=Stop(time=4.5))
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 0, ""),  # waits
        (1, 0, 0.0, 2.0, 0, 0, ""),  # waits
        (2, 0, 0.0, 3.0, 0, 1, ""),  # the last one: a step, and everybody starts from version 1
        (0, 1, 3.0, 4.0, 0, 2, ""),
    ]


def test_nobody_else_holds() -> None:
    free = log(simulator(ACE(warmup="zeros"), [[1.0], [2.0], [3.0]], stop=Stop(time=3.0)))
    assert [(row[0], row[3], row[5]) for row in free] == [
        (0, 1.0, 1), (1, 2.0, 2), (0, 2.0, 3), (2, 3.0, 4), (0, 3.0, 5),
    ]  # fmt: skip
    held = log(simulator(ACED(), [[1.0], [2.0]], scheduler=Concurrency(2), stop=Stop(time=2.0)))
    assert [(row[0], row[3]) for row in held] == [(0, 1.0), (1, 2.0), (0, 2.0)]  # concurrency lets them go on


def test_rounds_last_as_long_as_their_slowest_participant() -> None:
    sim = simulator(FedAvg(), [[1.0], [3.0]], rounds=Cohort(2), stop=Stop(versions=2))
    assert sorted(log(sim)) == [
        (0, 0, 0.0, 1.0, 0, 0, ""),
        (0, 1, 3.0, 4.0, 0, 1, ""),
        (1, 0, 0.0, 3.0, 0, 0, ""),
        (1, 1, 3.0, 6.0, 0, 1, ""),
    ]
    assert (sim.now, sim.server.version) == (6.0, 2)
    assert sim.trainer.blocks == [[0, 1], [2, 3]]


def test_a_deadline_closes_a_round_without_its_stragglers() -> None:
    sim = simulator(FedAvg(), [[1.0], [3.0]], rounds=Cohort(2, deadline=2.0), stop=Stop(versions=2))
    assert [(row[0], row[1], row[3]) for row in log(sim)] == [(0, 0, 1.0), (0, 1, 3.0)]
    assert sim.now == 4.0


def test_an_empty_round_takes_its_time_and_raises_the_version() -> None:
    hours = Hours((((5, 9),),))
    rounds = Bernoulli(p=1.0, idle=2.0)
    sim = simulator(FedAvg(), [[1.0]], rounds=rounds, availability=hours, stop=Stop(time=7.5))
    assert log(sim) == [(0, 3, 6.0, 7.0, 0, 3, "")]  # rounds end at 2, 4, 6 (empty), 7
    assert sim.server.version == 4


def test_an_abort_in_a_round_leaves_the_others() -> None:
    hours = Hours((((0, 99),), ((0, 2), (50, 99))))
    sim = simulator(
        FedAvg(), [[1.0], [3.0]], rounds=Cohort(2), availability=hours,
        manners=Manners(offline="abort"), stop=Stop(versions=2),
    )  # fmt: skip
    assert [(row[0], row[2], row[3]) for row in log(sim)] == [(0, 0.0, 1.0), (0, 2.0, 3.0)]


def test_ticks_receive_all_that_is_due_then_step_once() -> None:
    strategy = ASGD(per="tick")
    sim = simulator(strategy, [[1.0], [2.0]], scheduler=Ticks(), stop=Stop(versions=4))
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 0, ""),
        (1, 0, 0.0, 2.0, 1, 1, ""),
        (0, 1, 1.0, 2.0, 0, 1, ""),
        (0, 2, 2.0, 3.0, 0, 2, ""),
        (1, 2, 2.0, 4.0, 1, 3, ""),
        (0, 3, 3.0, 4.0, 0, 3, ""),
    ]
    assert sim.server.state.params.tolist() == [4.0, 4.0]  # every tick's mean delta is 1


def test_ticks_hold_clients_until_everyone_was_heard() -> None:
    strategy = ACE(per="tick")
    sim = simulator(strategy, [[1.0], [3.0]], scheduler=Ticks(), stop=Stop(versions=2))
    assert log(sim) == [
        (0, 0, 0.0, 1.0, 0, 0, ""),  # client 0 waits from 1 to 3, when version 1 is made
        (1, 0, 0.0, 3.0, 0, 0, ""),
        (0, 1, 3.0, 4.0, 0, 1, ""),
    ]


def test_sampled_staleness_draws_client_and_version_by_version() -> None:
    scheduler = SampledStaleness(max=3)
    sim = simulator(FedAsync(), [[9.9]] * 5, scheduler=scheduler, stop=Stop(versions=40))
    rows = log(sim)
    scene = sim.scene
    for version, (client, base, started, arrived, staleness, after, refused) in enumerate(rows):
        drawn, lag = scheduler.draw(scene, version)
        assert (client, base, staleness) == (drawn, version - lag, lag)
        assert (started, arrived, after, refused) == (float(base), version + 1.0, version + 1, "")
    assert {row[4] for row in rows} == {0, 1, 2, 3}
    assert max(len(block) for block in sim.trainer.blocks) > 1
    assert len(sim.server.versions.models) <= 4


@pytest.mark.parametrize("strategy", [FedAsync(), FedBuff(size=2)], ids=["fedasync", "fedbuff"])
def test_bases_are_held_for_tasks_that_are_yet_to_be_trained_or_read_again(strategy: Any) -> None:
    sim = simulator(strategy, [[1.0], [1.7], [2.6], [5.5]], stop=Stop(updates=40))
    for row in sim.rows():
        if isinstance(row, Receipt):
            left = {n: task for n, task in sim.flights.items() if strategy.uses_base or n not in sim.results}
            assert set(sim.server.versions.models) == {task.version for task in left.values()}


def test_a_result_that_is_the_base_itself_stays_as_it_is() -> None:
    class Idle(Adds):
        def train(
            self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
        ) -> list[LocalResult]:
            return [LocalResult(base, 1, 1, 1.0, {}) for base in bases]

    sim = simulator(FedAsync(alpha=0.5), [[1.0], [1.0], [9.0]], stop=Stop(updates=12))
    sim.trainer = Idle()
    first = sim.server.model()
    assert [row.refused for row in sim.rows() if isinstance(row, Receipt)] == [""] * 12
    assert torch.equal(sim.server.model(), first)  # the mean of models that are all the same


def test_sampled_staleness_refuses_what_does_not_step_at_every_arrival() -> None:
    with pytest.raises(InputError, match="size = 2, but sampled-staleness draws one update per version"):
        simulator(FedBuff(size=2), [[1.0]] * 3, scheduler=SampledStaleness(), stop=Stop(updates=9))
    sim = simulator(ACE(), [[1.0]] * 3, scheduler=SampledStaleness(), stop=Stop(updates=9))
    with pytest.raises(InputError, match="does not step at every arrival"):
        log(sim)


def test_check_in_pauses_between_tasks() -> None:
    sim = simulator(FedAsync(), [[1.0]], scheduler=CheckIn(pause=2.0), stop=Stop(updates=200))
    rows = log(sim)
    pauses = [after[2] - before[3] for before, after in itertools.pairwise(rows)]
    assert min(pauses) > 0
    assert 1.5 < sum(pauses) / len(pauses) < 2.5
    limited = log(
        simulator(FedAsync(), [[1.0]] * 4, scheduler=CheckIn(pause=0.1, limit=2), stop=Stop(updates=60))
    )
    for moment in [row[2] for row in limited]:
        assert sum(row[2] <= moment < row[3] for row in limited) <= 2


def test_concurrency_keeps_its_limit_and_draws_fairly() -> None:
    sim = simulator(FedAsync(), [[1.0]] * 10, scheduler=Concurrency(3), stop=Stop(updates=3000))
    rows = log(sim)
    shares = [sum(row[0] == client for row in rows) for client in range(10)]
    assert max(shares) < 1.25 * min(shares)
    for moment in [row[2] for row in rows[:300]]:
        assert sum(row[2] <= moment < row[3] for row in rows[:330]) == 3


@pytest.mark.parametrize("block", [1, 2, 5, 64])
def test_blocks_of_any_size_give_the_same_log_and_model(block: int) -> None:
    delays = [[1.0, 0.3, 2.2], [0.7], [5.0, 0.1], [1.3]]
    plain = simulator(FedAsync(), delays, stop=Stop(updates=50), block=64)
    cut = simulator(FedAsync(), delays, stop=Stop(updates=50), block=block)
    assert log(cut) == log(plain)
    assert torch.equal(cut.server.model(), plain.server.model())
    assert max(len(b) for b in cut.trainer.blocks) <= block


@dataclass
class Earliest(Adds):
    """Holds each block against its definition: the earliest arrivals in flight without a result, up to the limit."""

    sim: Simulator | None = None

    def train(self, tasks: Any, bases: Any, corrections: Any) -> list[LocalResult]:
        sim = self.sim
        assert sim is not None
        horizon = math.inf if sim.stop.time is None else sim.stop.time
        waiting = [
            (when, sequence, what)
            for when, _, sequence, kind, what in (*sim.heap, *sim.near)
            if kind == ARRIVE and what in sim.flights and what not in sim.results and when <= horizon
        ]
        assert all(when >= sim.now for when, _, _ in waiting)
        due = [number for _, _, number in sorted(waiting)]
        assert [task.number for task in tasks] == due[: max(1, sim.block - len(sim.results))]
        return super().train(tasks, bases, corrections)


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize(
    ("scheduler", "manners"),
    [
        (Concurrency(20), Manners()),
        (Concurrency(20), Manners(max_staleness=9, stale="restart")),
        (CheckIn(pause=0.7, limit=15), Manners(offline="abort")),
        (All(), Manners(reply="before")),
    ],
)
def test_a_block_is_the_earliest_arrivals_of_what_is_in_flight(
    scheduler: Any, manners: Manners, block: int
) -> None:
    trainer = Earliest()
    sim = simulator(
        FedAsync(),
        [[exponential(client, count) for count in range(50)] for client in range(30)],
        scheduler=scheduler,
        availability=OnOff(on=5.0, off=1.0),
        stop=Stop(time=15.0),
        manners=manners,
        measuring=Measuring(time=1.0),
        trainer=trainer,
        block=block,
    )
    trainer.sim = sim
    arrivals = [row[3] for row in log(sim)]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) > 50
    assert max(len(found) for found in trainer.blocks) <= block


def test_everything_in_flight_is_trained_in_one_call() -> None:
    sim = simulator(FedAsync(), [[1.0]] * 8, stop=Stop(updates=16))
    log(sim)
    assert sim.trainer.blocks == [list(range(8)), list(range(8, 16))]


def test_nothing_is_trained_that_cannot_arrive_in_time() -> None:
    sim = simulator(FedAsync(), [[1.0], [9.0]], stop=Stop(time=3.0))
    log(sim)
    assert sim.trainer.blocks == [[0], [2], [3]]


def test_nothing_is_trained_that_cannot_arrive_before_the_last_update() -> None:
    sim = simulator(FedAsync(), [[1.0], [1.5], [9.0], [9.5]], stop=Stop(updates=3))
    log(sim)
    assert sim.trainer.blocks == [[0, 1, 2], [4]]


@pytest.mark.parametrize("seed", range(5))
def test_the_last_updates_are_those_of_blocks_of_one(seed: int) -> None:
    delays = [[exponential(seed, client, count) for count in range(100)] for client in range(30)]
    sims = [simulator(FedAsync(), delays, stop=Stop(updates=60), block=block) for block in (1, 64)]
    assert log(sims[0]) == log(sims[1])
    alone, together = (sum(map(len, sim.trainer.blocks)) for sim in sims)
    assert alone == 60 <= together < 60 + 29


def test_a_refused_update_calls_for_one_that_seemed_too_late() -> None:
    class Breaks(Adds):
        def train(self, tasks: Any, bases: Any, corrections: Any) -> list[LocalResult]:
            found = super().train(tasks, bases, corrections)
            bad = [replace(result, model=result.model * math.nan) for result in found]
            return [bad[row] if task.number == 0 else found[row] for row, task in enumerate(tasks)]

    sim = simulator(FedAsync(), [[1.0, 9.0], [2.0]], stop=Stop(updates=1), trainer=Breaks())
    assert [row[-1] for row in log(sim)] == ["not-finite", ""]
    assert sim.trainer.blocks == [[0], [1]]


def test_measurements_by_time_and_by_version() -> None:
    def evaluator(model: Tensor) -> dict[str, float]:
        return {"loss": float(model[0])}

    by_time = simulator(
        ASGD(), [[1.0]], stop=Stop(time=2.5), evaluator=evaluator, measuring=Measuring(time=1.0)
    )
    rows = [row for row in by_time.rows() if isinstance(row, Measurement)]
    # at 1.0 and 2.0 the arrivals of that instant are in
    assert [(m.time, m.version, m.values["loss"]) for m in rows] == [
        (0.0, 0, 0.0), (1.0, 1, 1.0), (2.0, 2, 2.0), (2.5, 2, 2.0),
    ]  # fmt: skip
    by_version = simulator(
        ASGD(), [[1.0]], stop=Stop(versions=4), evaluator=evaluator, measuring=Measuring(versions=2)
    )
    rows = [row for row in by_version.rows() if isinstance(row, Measurement)]
    assert [(m.time, m.version, m.updates) for m in rows] == [(0.0, 0, 0), (2.0, 2, 2), (4.0, 4, 4)]
    assert [m.staleness for m in rows] == [None, 0.0, 0.0]
    assert [m.bytes for m in rows] == [0, 16, 32]


def test_stop_at_an_accuracy() -> None:
    sim = simulator(
        ASGD(), [[1.0]], stop=Stop(time=99.0, accuracy=0.3), measuring=Measuring(time=0.5),
        evaluator=lambda model: {"accuracy": float(model[0]) / 10},
    )  # fmt: skip
    rows = list(sim.rows())
    assert sim.ended == "accuracy"
    assert isinstance(rows[-1], Measurement) and rows[-1].time == 3.0


def test_a_refused_update_frees_its_client_and_changes_nothing() -> None:
    class Explodes(Adds):
        def train(self, tasks: Any, bases: Any, corrections: Any) -> list[LocalResult]:
            done = super().train(tasks, bases, corrections)
            return [
                LocalResult(torch.full((2,), math.nan), 1, 1, 1.0) if task.client == 0 else result
                for task, result in zip(tasks, done, strict=True)
            ]

    sim = simulator(FedAsync(), [[1.0], [1.5]], stop=Stop(time=3.0), trainer=Explodes())
    assert [(row[0], row[3], row[5], row[6]) for row in log(sim)] == [
        (0, 1.0, 0, "not-finite"),
        (1, 1.5, 1, ""),
        (0, 2.0, 1, "not-finite"),
        (1, 3.0, 2, ""),
        (0, 3.0, 2, "not-finite"),
    ]
    assert sim.updates == 2


def test_the_same_seed_gives_the_same_log_and_another_gives_another() -> None:
    def run(seed: int) -> list[tuple[Any, ...]]:
        return log(
            simulator(FedAsync(), [[1.0]] * 9, scheduler=Concurrency(4), stop=Stop(updates=50), seed=seed)
        )

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_mismatched_pace_and_scheduler_are_refused() -> None:
    with pytest.raises(InputError, match="use the scheduler 'ticks'"):
        simulator(ASGD(per="tick"), [[1.0]], stop=Stop(updates=1))
    with pytest.raises(InputError, match="set per = 'tick'"):
        simulator(FedAsync(), [[1.0]], scheduler=Ticks(), stop=Stop(updates=1))
    with pytest.raises(InputError, match="size = 10 is above the 3 clients"):
        simulator(FedBuff(size=10), [[1.0]] * 3, stop=Stop(updates=1))
    with pytest.raises(InputError, match="limit = 4 is above the 3 clients"):
        simulator(FedAsync(), [[1.0]] * 3, scheduler=Concurrency(4), stop=Stop(updates=1))
    with pytest.raises(InputError, match="no end is set"):
        Stop(accuracy=0.9)
