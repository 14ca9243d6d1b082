"""A Flower ServerApp. Against Flower's FedAvg one line has changed: the strategy."""

import json
from dataclasses import asdict
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import afield
from afield.runtimes.flower import AsyncStrategy
from digits.task import load, make_model, measure

STRATEGIES = {
    "fedasync": afield.FedAsync(),
    "fedbuff": afield.FedBuff(size=3),
    "mr-asyncfl": afield.MRAsyncFL(gamma=0.8),
    "ace": afield.ACE(),
}
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model = make_model()
    inputs, labels = load()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = measure(model, inputs, labels)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    folder = config["store"] or None
    strategy = AsyncStrategy(
        strategy=STRATEGIES[config["strategy"]],
        concurrency=config["concurrency"],
        round_size=config["round-size"],
        min_available_nodes=config["min-nodes"],
        fraction_evaluate=config["fraction-evaluate"],
        deadline=config["deadline"],
        **{"resume" if config["resume"] else "store": folder},
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    if config["report"]:
        told = {
            "receipts": [asdict(receipt) for receipt in strategy.receipts],
            "train": {number: dict(one) for number, one in result.train_metrics_clientapp.items()},
            "nodes": {number: dict(one) for number, one in result.evaluate_metrics_clientapp.items()},
            "server": {number: dict(one) for number, one in result.evaluate_metrics_serverapp.items()},
        }
        Path(config["report"]).write_text(json.dumps(told))
