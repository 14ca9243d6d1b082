"""Asynchronous federated learning: every algorithm, one exact simulator, one deployable server."""

from typing import TYPE_CHECKING, Any

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, ServerState, Task, Update
from afield.runtimes.simulate import Result, simulate
from afield.scenarios import availability, delays, partition, schedulers
from afield.strategies import (
    ACE,
    ACED,
    ASGD,
    CA2FL,
    FADAS,
    MIFA,
    SGD,
    STRATEGIES,
    TWAFL,
    DelayAdaptiveASGD,
    FedAC,
    FedAsync,
    FedAvg,
    FedBuff,
    FedEcho,
    FedStale,
    FedVARP,
    MRAsyncFL,
    RollingFedAvg,
    Scaffold,
    UFedAvg,
    staleness,
)
from afield.training.local import Local

if TYPE_CHECKING:
    from afield.runtimes.service.client import Client

__version__ = "0.1.0"

__all__ = [
    "ACE",
    "ACED",
    "ASGD",
    "CA2FL",
    "FADAS",
    "MIFA",
    "SGD",
    "STRATEGIES",
    "TWAFL",
    "Client",
    "DelayAdaptiveASGD",
    "FedAC",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedEcho",
    "FedStale",
    "FedVARP",
    "InputError",
    "Local",
    "LocalResult",
    "MRAsyncFL",
    "Receipt",
    "Result",
    "RollingFedAvg",
    "Scaffold",
    "Server",
    "ServerState",
    "Task",
    "UFedAvg",
    "Update",
    "availability",
    "delays",
    "partition",
    "schedulers",
    "simulate",
    "staleness",
]


def __getattr__(name: str) -> Any:
    """The client of a live service is imported when it is asked for: a simulation needs none of it."""
    if name == "Client":
        from afield.runtimes.service.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
