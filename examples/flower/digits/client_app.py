"""A plain Flower ClientApp: it knows nothing of afield's strategies."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import load, make_model, measure
from digits.task import train as train_locally

app = ClientApp()


def data_of(context: Context):
    return load(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


@app.train()
def train(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = data_of(context)
    config = context.run_config
    loss = train_locally(model, inputs, labels, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = data_of(context)
    loss, accuracy = measure(model, inputs, labels)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(labels)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
