"""A scripted life of a durable server: act number i depends on nothing but i and the server, so any restart goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from playback import INPUTS, PARAMETERS, network
from torch import Tensor

from afield.core.keys import generator, uniform
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, Task
from afield.store.live import Durable
from afield.training.distill import Distil

CLIENTS = 5


def first_day(strategy: Any, clients: int = CLIENTS) -> Server:
    module = network()
    vector = torch.cat([p.detach().flatten() for p in module.parameters()] + [torch.zeros(3), torch.ones(3)])
    unlabelled = torch.randn(8, INPUTS, generator=generator(9))
    distiller = Distil(module, unlabelled) if hasattr(strategy, "refine") else None
    return Server(strategy, vector, clients, parameters=PARAMETERS, seed=3, distiller=distiller)


def durable(strategy: Any, folder: Path, **options: Any) -> Durable:
    return Durable(first_day(strategy), folder, **options)


def trained(server: Server, task: Task) -> Tensor:
    """A keyed stand-in for training: moves parameters at random, keeps variances positive."""
    base = server.base(task)
    move = torch.randn(base.shape, generator=generator(3, task.client, task.count), dtype=base.dtype)
    model = base + 0.3 * move
    model[PARAMETERS:] = move[PARAMETERS:].abs()
    correction = server.correction(task)
    if correction is not None:
        model[: server.parameters] -= 0.2 * correction
    return model


def acts_of(strategy: Any, updates: int) -> list[tuple[str, int]]:
    """(verb, client) until so many updates were sent: everyone trains all the time, or three in a round."""
    acts: list[tuple[str, int]] = []
    pace = getattr(strategy, "pace", "arrival")
    if pace == "arrival":
        acts += [("checkout", client) for client in range(CLIENTS)]
    for beat in range(updates):
        if pace == "round":
            client = (int(uniform(1, beat // 3) * CLIENTS) + beat % 3) % CLIENTS  # distinct within a round
        else:
            client = beat if beat < CLIENTS else int(uniform(2, beat) * CLIENTS)
        if pace != "arrival":
            acts.append(("checkout", client))
        acts.append(("submit", client))
        if pace == "arrival":
            acts.append(("checkout", client))
        elif beat % 3 == 2:
            acts.append(("close", 0))
    return acts


def live(
    door: Durable,
    acts: list[tuple[str, int]],
    told: Callable[[Receipt], None] | None = None,
    until: int | None = None,
) -> None:
    """Go on from wherever the server stands; `told` is called where a client would get its receipt."""
    server = door.server
    while door.acts < (len(acts) if until is None else until):
        verb, client = acts[door.acts]
        if verb == "checkout":
            door.checkout(client, float(door.acts))
        elif verb == "close":
            door.close_round()
        else:
            task = next(lease.task for lease in server.leases.values() if lease.task.client == client)
            result = LocalResult(trained(server, task), examples=1 + client, steps=2, rate=0.1)
            receipt = door.submit(result.answer(task, float(door.acts)))
            if told is not None:
                told(receipt)
