"""What our loop costs per message: one Flower simulation, in it a bare push/pull loop and AsyncStrategy by turns.

    python benchmarks/flower.py [--quick] [--width 64] [--store] [--turns 30]

Needs an environment with `afield[flower]`. The ClientApp is that of examples/flower; with --width 1000 the model has
a million parameters. --store also journals every update. Overhead = the median of (ours - bare) / bare over pairs of
turns. The simulation hands messages to its nodes every 0.1 s, and what misses one such instant waits for the next: so
turns differ by 10 % and more, and the processor time of the loop's own thread is given, too.
"""

import argparse
import faulthandler
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")
os.environ["RAY_ADDRESS"] = "local"  # a Ray of its own, not one that happens to run here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "flower"))

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import nn

import afield
from afield.runtimes.flower import AsyncStrategy
from afield.runtimes.flower.loop import SHARE, SHORT

NODES, POLL = 4, 0.25


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def client(width: int) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from digits.task import load
        from digits.task import train as train_locally

        torch.set_num_threads(1)
        model = network(width)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, labels = load(int(context.node_config["partition-id"]), NODES)
        loss = train_locally(model, inputs, labels, epochs=2, rate=0.1)
        metrics = MetricRecord({"loss": loss, "num-examples": len(labels)})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
        )

    return app


def bare(grid: Grid, arrays: ArrayRecord, messages: int, concurrency: int) -> None:
    """As little as can be done: whoever answers gets the same arrays again. It waits as our loop does."""
    idle, open_messages, sent, heard = list(grid.get_node_ids()), {}, 0, time.monotonic()
    while sent < messages or open_messages:
        while idle and sent < messages and len(open_messages) < concurrency:
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
            message = Message(content, dst_node_id=idle[0], message_type=MessageType.TRAIN)
            (number,) = grid.push_messages([message])
            open_messages[number] = idle.pop(0)
            sent += 1
        replies = list(grid.pull_messages(list(open_messages)))
        for reply in replies:
            assert reply.has_content(), reply.error
            idle.append(open_messages.pop(reply.metadata.reply_to_message_id))
        if replies:
            heard = time.monotonic()
        else:
            time.sleep(min(max(SHORT, SHARE * (time.monotonic() - heard)), POLL))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--turns", type=int, default=30)
    chosen = parser.parse_args()
    faulthandler.dump_traceback_later(600, exit=True)  # if Ray does not start, Flower's thread waits for ever
    turns, messages = (2, 20) if chosen.quick else (chosen.turns, 40)
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    work: dict[str, list[float]] = {"bare": [], "ours": []}
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(network(chosen.width).state_dict())
        while len(list(grid.get_node_ids())) < NODES:
            time.sleep(0.1)
        bare(grid, arrays, 2 * NODES, NODES)  # processes start, modules are imported
        for turn in range(turns):
            with tempfile.TemporaryDirectory() as folder:
                strategy = AsyncStrategy(
                    afield.MRAsyncFL(), NODES, round_size=messages, fraction_evaluate=0, poll=POLL,
                    store=Path(folder) / "run" if chosen.store else None,
                )  # fmt: skip
                both = {
                    "bare": lambda: bare(grid, arrays, messages, NODES),
                    "ours": lambda one=strategy: one.start(grid, arrays, num_rounds=1),
                }
                for name in sorted(both, reverse=bool(turn % 2)):
                    begun, busy = time.perf_counter(), time.thread_time()
                    both[name]()
                    work[name].append((time.thread_time() - busy) / messages)
                    times[name].append((time.perf_counter() - begun) / messages)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(
        server_app=app, client_app=client(chosen.width), num_supernodes=NODES, backend_config=resources
    )
    parameters = sum(one.numel() for one in network(chosen.width).parameters())
    middle = {name: statistics.median(values) for name, values in times.items()}
    ratios = [ours / bare - 1 for bare, ours in zip(times["bare"], times["ours"], strict=True)]
    low, over, high = statistics.quantiles(ratios, n=4)
    print(f"{parameters:,} parameters, {turns} turns of {messages} messages each, {NODES} nodes")
    for name, values in times.items():
        each = " ".join(f"{1000 * value:.1f}" for value in values)
        print(f"  {name}: {1000 * middle[name]:.2f} ms per message (turns: {each})")
    own = {name: statistics.median(values) for name, values in work.items()}
    more = (own["ours"] - own["bare"]) / middle["bare"]
    total = sum(times["ours"]) / sum(times["bare"]) - 1
    print(
        f"  overhead {over:+.1%} (half of the pairs: {low:+.1%} to {high:+.1%}; all turns together: {total:+.1%})"
    )
    print(
        f"  the loop's thread: {1000 * own['bare']:.2f} and {1000 * own['ours']:.2f} ms: {more:+.1%} of a message"
    )


if __name__ == "__main__":
    main()
