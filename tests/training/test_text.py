"""Networks that read texts: tokens, masks, blocks against the loop, LoRA's vector, answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from written import pair, problem

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import Task
from afield.scenarios.data import ClientData
from afield.scenarios.texts import matches
from afield.training.block import BlockTrainer
from afield.training.choose import Training, trainer
from afield.training.evaluate import Evaluate
from afield.training.generate import Answers
from afield.training.local import IGNORED, Local, LoopTrainer, check_fits
from afield.training.models import MODELS, build
from afield.training.text import Bert, CausalLm, DistilBert, Reader

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

PAIRS = [pair(number)[1:] for number in range(20)]
LABELS = torch.tensor([pair(number)[0] for number in range(20)])
PROBLEMS = [problem(number) for number in range(20)]
SMALL: dict[str, Any] = {"layers": 1, "width": 16, "vocabulary": 300}


def words(config: Any) -> Reader:
    reader: Reader = config.reader(text for row in PAIRS for text in row)
    return reader


def speaker(**more: Any) -> Reader:
    config = CausalLm(**{**SMALL, "length": 80, "answer": 20, **more})
    return config.reader(text for both in PROBLEMS for text in both)


def asked(reader: Reader) -> tuple[Tensor, Tensor]:
    return reader.complete([(question,) for question, _ in PROBLEMS], [answer for _, answer in PROBLEMS])


@pytest.mark.parametrize("kind", [Bert, DistilBert])
def test_tokens_of_pairs(kind: Any) -> None:
    reader = words(kind(**SMALL))
    left, right = reader.encode(PAIRS[:3], PAIRS[3:])
    again = words(kind(**SMALL)).encode(PAIRS[:3], PAIRS[3:])
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])
    assert left.shape[1] == right.shape[1]
    mark = reader.tokeniser.sep_token_id
    assert ((torch.cat([left, right]) == mark).sum(dim=1) == 2).all()
    assert reader.decode(left[0].tolist()) == "ann bought 0 apples . it was ann who bought 0 ."
    assert (left != reader.pad).sum(dim=1).max() <= left.shape[1] <= 128
    short = words(kind(**SMALL, length=9)).encode(PAIRS)[0]
    assert short.shape[1] == 9


def test_the_network_makes_berts_segments_and_mask_itself() -> None:
    reader = words(Bert(**SMALL))
    module: Any = build(reader, (1,), 2, 0).eval()
    (ids,) = reader.encode(PAIRS)
    given = reader.tokeniser(*map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt")
    given["token_type_ids"] = torch.tensor(
        reader.tokeniser(*map(list, zip(*PAIRS, strict=True)), padding=True, return_token_type_ids=True)[
            "token_type_ids"
        ]
    )
    assert int(given["token_type_ids"].max()) == 1
    assert torch.equal(given["input_ids"], ids)
    torch.testing.assert_close(module(ids), module.network(**given).logits)


@pytest.mark.parametrize("kind", [Bert, DistilBert])
def test_what_fills_up_changes_nothing(kind: Any) -> None:
    reader = words(kind(**SMALL))
    module = build(reader, (1,), 2, 0).eval()
    (ids,) = reader.encode(PAIRS)
    wider = functional.pad(ids, (0, 5), value=reader.pad)
    torch.testing.assert_close(module(ids), module(wider))


def test_a_causal_network_looks_back_only() -> None:
    reader = speaker()
    module: Any = build(reader, (1,), 1, 0).eval()
    ids, targets = asked(reader)
    check_fits(module, ids, 1, "tokens")
    changed = ids.clone()
    changed[:, 10:] = 7
    torch.testing.assert_close(module(ids)[:, :10], module(changed)[:, :10])
    there = (ids != reader.pad).long()
    plain = module.network(input_ids=ids, attention_mask=there).logits
    torch.testing.assert_close(module(ids)[there.bool()], plain[there.bool()])
    # the loss is transformers' own, whose labels are not shifted yet
    labels = functional.pad(targets, (1, 0), value=IGNORED)
    whole = functional.pad(ids, (0, 1), value=reader.pad)
    theirs = module.network(input_ids=whole, labels=labels).loss
    from afield.training.local import loss_function

    torch.testing.assert_close(loss_function("tokens")(module(ids), targets), theirs)


def test_targets_are_the_answer_and_its_end() -> None:
    reader = speaker()
    ids, targets = asked(reader)
    end = reader.tokeniser.eos_token_id
    for row, (question, answer) in enumerate(PROBLEMS):
        told = targets[row][targets[row] != IGNORED].tolist()
        assert told[-1] == end and reader.decode(told) == answer
        count = int((ids[row] != reader.pad).sum())
        assert reader.decode(ids[row, :count].tolist()) == (
            f"### Instruction:\n{question}\n\n### Response:\n{answer}"
        )
        # the token at a place is what the place before is to guess
        start = int((targets[row] != IGNORED).nonzero()[0])
        assert torch.equal(ids[row, start + 1 : count], targets[row, start : count - 1])
    # a question that leaves no room is cut at its start
    _, cut = asked(speaker(length=8))
    assert (cut != IGNORED).sum(dim=1).tolist() == [1] * len(PROBLEMS)


def test_training_a_tokeniser_knows_no_chance() -> None:
    """Its library does: it goes by hash tables that differ from one object to the next."""
    texts = [f"{left} {right} zyx{number} \u00e9t\u00e9" for number, (left, right) in enumerate(PAIRS)]
    for config in (Bert(vocabulary=300), CausalLm(vocabulary=300), Bert(vocabulary=400)):
        found = [config.reader(texts).tokeniser.get_vocab() for _ in range(4)]
        assert found[0] == found[1] == found[2] == found[3]
        assert sorted(found[0].values()) == list(range(len(found[0])))


def client_data(inputs: Tensor, targets: Tensor) -> ClientData:
    return ClientData(inputs, targets, [torch.arange(0, 7), torch.arange(7, 16), torch.arange(16, 20)])


CASES = {
    "bert": lambda: (words(Bert(**SMALL)), "cross-entropy"),
    "distilbert": lambda: (words(DistilBert(**SMALL)), "cross-entropy"),
    "bert lora": lambda: (words(Bert(**SMALL, rank=2)), "cross-entropy"),
    "causal": lambda: (speaker(), "tokens"),
    "causal lora": lambda: (speaker(rank=2), "tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_loop(case: str) -> None:
    """With dropout, and with batches of 4 out of 7, 9 and 4 texts, whose answers have unlike lengths."""
    reader, loss = CASES[case]()
    inputs, targets = asked(reader) if loss == "tokens" else (reader.encode(PAIRS)[0], LABELS)
    module = build(reader, tuple(inputs.shape[1:]), 2, 0)
    data = client_data(inputs, targets)
    local = Local(epochs=2, batch=4, rate=1e-3, optimiser="adamw")
    layout = Layout.of(module)
    tasks = [Task(number, number, 1, 0, 0.0) for number in range(3)]
    bases = [layout.flatten(module)] * 3
    left = LoopTrainer(module, data, local, 5, loss).train(tasks, bases, [None] * 3)
    right = BlockTrainer(module, data, local, 5, loss).train(tasks, bases, [None] * 3)
    for one, other in zip(left, right, strict=True):
        change = one.model - bases[0]
        assert float(change.abs().max()) > 1e-3
        # AdamW divides by the size of a gradient, so rounding in a tiny one moves its weight by up to the rate
        close = (one.model - other.model).abs() <= 1e-5
        assert float(close.float().mean()) > 0.99
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)


def test_plain_steps_of_short_batches_equal_the_loop() -> None:
    reader = speaker()
    inputs, targets = asked(reader)
    targets[1, :] = IGNORED  # a text that was cut before its answer
    module = build(reader, (1,), 1, 0)
    data = client_data(inputs, targets)
    base = Layout.of(module).flatten(module)
    tasks = [Task(number, number, 0, 0, 0.0) for number in range(3)]
    local = Local(batch=4, rate=0.05)
    pairs = [
        kind(module, data, local, 5, "tokens").train(tasks, [base] * 3, [None] * 3)
        for kind in (LoopTrainer, BlockTrainer)
    ]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-4, atol=1e-6)


def test_a_batch_without_any_answer_has_no_loss() -> None:
    from afield.training.local import loss_function

    outputs = torch.randn(2, 3, 5, requires_grad=True)
    value = loss_function("tokens")(outputs, torch.full((2, 3), IGNORED))
    value.backward()
    assert value.item() == 0.0 and not outputs.grad.any()


def test_loras_vector_holds_what_is_trained() -> None:
    reader = words(Bert(**SMALL, rank=3))
    module: Any = build(reader, (1,), 2, 0)
    layout = Layout.of(module)
    # A of rank x in and B of out x rank beside q, k, v, out (16 to 16), 16 to 64, 64 to 16, the pooler; then the head
    adapters = 3 * (5 * (16 + 16) + 2 * (16 + 64))
    assert layout.size == layout.parameters == adapters + 16 * 2 + 2
    assert all("lora_" in name or "classifier" in name for name in layout.names)
    assert set(module.state_dict()) >= set(layout.names)
    assert not any("embeddings.word_embeddings" in name for name in module.state_dict())
    (ids,) = reader.encode(PAIRS)
    before = copy.deepcopy(module)
    data = client_data(ids, LABELS)
    loop = LoopTrainer(module, data, Local(batch=4, rate=0.1), 0)
    first, second = (loop.train([Task(0, 1, 0, 0, 0.0)], [layout.flatten(module)], [None])[0] for _ in "ab")
    assert torch.equal(first.model, second.model)
    assert not torch.equal(first.model, layout.flatten(module))
    frozen, kept = dict(module.named_buffers()), dict(before.named_buffers())
    assert len(frozen) > 10
    assert all(torch.equal(frozen[name], kept[name]) for name in kept)


def test_an_adapter_starts_as_the_network_itself() -> None:
    whole, adapted = (words(Bert(**SMALL, rank=rank)) for rank in (0, 2))
    left, right = (build(reader, (1,), 2, 0).eval() for reader in (whole, adapted))
    (ids,) = whole.encode(PAIRS)
    torch.testing.assert_close(left(ids), right(ids))


def test_one_seed_one_network() -> None:
    reader = words(DistilBert(**SMALL))
    one, same, other = (build(reader, (1,), 2, seed) for seed in (1, 1, 2))
    layout = Layout.of(one)
    assert torch.equal(layout.flatten(one), layout.flatten(same))
    assert not torch.equal(layout.flatten(one), layout.flatten(other))


def test_answers_are_those_of_token_by_token() -> None:
    """By the cache and in batches, as by whole passes one at a time."""
    reader = speaker(answer=6, length=120)
    module: Any = build(reader, (1,), 1, 3).eval()
    prompts = reader.prompts(
        [(question * (1 + number % 2),) for number, (question, _) in enumerate(PROBLEMS[:6])]
    )
    assert len({len(ids) for ids in prompts}) > 1  # or nothing is filled up
    found = module.generate(prompts)
    for prompt, said in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in said:
            best = int(module(torch.tensor([ids]))[0, -1].argmax())
            assert token == best
            ids.append(token)
            if token == reader.tokeniser.eos_token_id:
                break


def test_a_model_learns_to_answer() -> None:
    """Exact match rises to 1 on what was learnt by heart, and the loss is the mean over all answer tokens."""
    reader = speaker(width=32, layers=2, answer=24)
    known = PROBLEMS[:4]
    rows, right = [(question,) for question, _ in known], [answer for _, answer in known]
    inputs, targets = reader.complete(rows, right)
    module = build(reader, (1,), 1, 0)
    scored = Answers(reader.prompts(rows), right, reader.decode, matches, batch=3)
    evaluate = Evaluate(module, inputs, targets, 1, "tokens", batch=3, more=scored)
    start = Layout.of(module).flatten(module)
    before = dict(evaluate(start))
    with torch.no_grad():
        logs = module.eval()(inputs).log_softmax(-1)
    losses = [-float(logs[i, t, targets[i, t]]) for i, t in (targets != IGNORED).nonzero().tolist()]
    assert before["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert before["perplexity"] == pytest.approx(2.718281828459045 ** before["loss"])
    assert before["accuracy"] == 0.0
    data = ClientData(inputs, targets, [torch.arange(4)])
    local = Local(steps=120, batch=4, rate=1e-2, optimiser="adamw")
    (done,) = LoopTrainer(module, data, local, 0, "tokens").train([Task(0, 0, 0, 0, 0.0)], [start], [None])
    after = evaluate(done.model)
    assert after["accuracy"] == 1.0 and after["loss"] < 0.1


def test_a_classifier_learns() -> None:
    reader = words(DistilBert(**SMALL))
    (ids,) = reader.encode(PAIRS)
    module = build(reader, (1,), 2, 0)
    data = ClientData(ids, LABELS, [torch.arange(20)])
    local = Local(epochs=25, batch=5, rate=5e-3, optimiser="adamw")
    start = Layout.of(module).flatten(module)
    (done,) = LoopTrainer(module, data, local, 0).train([Task(0, 0, 0, 0, 0.0)], [start], [None])
    assert Evaluate(module, ids, LABELS, 2)(done.model)["accuracy"] == 1.0


@pytest.mark.parametrize("name", ["bert", "distilbert", "causal-lm"])
def test_a_folder_gives_its_model_and_its_tokens(tmp_path: Path, name: str) -> None:
    kind: Any = MODELS[name]
    texts = [text for row in PAIRS for text in row]
    small = {**SMALL, "length": 40, **({"answer": 8} if name == "causal-lm" else {})}
    reader = kind(**small).reader(texts)
    module: Any = build(reader, (1,), 2, 0)
    module.network.save_pretrained(tmp_path)
    reader.tokeniser.save_pretrained(tmp_path)
    config = kind(folder=str(tmp_path), **{key: small[key] for key in ("length", "answer") if key in small})
    assert kind(**small).stand_in and not config.stand_in
    loaded = config.reader(iter(()))
    copied: Any = build(loaded, (1,), 2, 9)
    if name == "causal-lm":
        rows = [(text,) for text in texts[:4]]
        assert loaded.prompts(rows) == reader.prompts(rows)
        ids = reader.questions(rows)
        torch.testing.assert_close(module.eval()(ids), copied.eval()(ids))  # by torch's own attention
        assert module.generate(reader.prompts(rows)) == copied.generate(reader.prompts(rows))
    else:
        (ids,) = reader.encode(PAIRS)
        assert torch.equal(ids, loaded.encode(PAIRS)[0])
        torch.testing.assert_close(module.eval()(ids), copied.eval()(ids))
    if name == "bert":
        with pytest.raises(InputError, match=r"holds a 'bert', not a 'distilbert'"):
            DistilBert(folder=str(tmp_path), length=40).reader(texts)
        with pytest.raises(InputError, match=r"length = 512 is outside \[1, 40\]"):
            Bert(folder=str(tmp_path), length=512).reader(texts)


def test_a_chat_template_is_used(tmp_path: Path) -> None:
    reader = speaker()
    said = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    reader.tokeniser.chat_template = said + "{% if add_generation_prompt %}<model>{% endif %}"
    (prompt,) = reader.prompts([("Why?",)])
    assert reader.decode(prompt) == "<user>Why?<model>"


def test_a_pretrained_causal_model_goes_to_the_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = speaker()
    made: Any = build(reader, (1,), 1, 0)
    made.network.save_pretrained(tmp_path)
    reader.tokeniser.save_pretrained(tmp_path)
    loaded = CausalLm(folder=str(tmp_path), length=80, answer=20).reader(())
    inputs, targets = asked(loaded)
    module = build(loaded, (1,), 1, 0)
    found = trainer(
        module, client_data(inputs, targets), Local(batch=4), 0, "tokens", "cpu", Training("vmap")
    )
    assert found.method == "loop"
    assert "cannot take this model" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bert(width=10, heads=4), r"width = 10 is no multiple of 2 x heads = 8"),
        (lambda: Bert(vocabulary=10), r"vocabulary = 10 is outside \[300"),
        (lambda: CausalLm(answer=0), r"answer = 0 is outside \[1"),
        (lambda: DistilBert(rank=-1), r"rank = -1 is outside \[0"),
        (
            lambda: Bert().build((5,), 2),
            r"Bert reads texts, but examples have shape \(5,\): choose data such as mrpc",
        ),
        (
            lambda: Bert(folder="/nowhere").reader(()),
            r"model.folder = '/nowhere' has no config.json: .*bert-base-uncased",
        ),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match=r"has no tokeniser \(tokenizer.json, vocab.txt"):
        Bert(folder=str(tmp_path)).reader(())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Bert(folder=str(tmp_path)).reader(())


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("classifier.", ""),  # a head is to be learnt
        ("bert.pooler.", "has no pooler: it starts at random"),
        (
            "bert.encoder.layer.0.",
            r"lacks 16 of the network's tensors, bert.encoder.layer.0.\S+ for one: save the",
        ),
    ],
)
def test_a_folder_may_lack_a_head_and_no_more(
    tmp_path: Path,
    lost: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    reader = words(Bert(**SMALL))
    made: Any = build(reader, (1,), 2, 0)
    made.network.save_pretrained(tmp_path)
    reader.tokeniser.save_pretrained(tmp_path)
    kept = {name: value for name, value in made.network.state_dict().items() if not name.startswith(lost)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = Bert(folder=str(tmp_path)).reader(())
    capfd.readouterr()
    if lost.startswith("bert.encoder"):
        with pytest.raises(InputError, match=message):
            build(loaded, (1,), 2, 0)
        return
    found = build(loaded, (1,), 2, 0)
    assert message in caplog.text if message else not caplog.text
    assert capfd.readouterr() == ("", "")  # the library's bars and reports
    for name, value in found.network.state_dict().items():
        drawn = name.startswith(lost) and name.endswith("weight")  # biases are 0 here and there
        assert torch.equal(value, made.network.state_dict()[name]) is not drawn, name


def test_without_transformers_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'afield\[text\]'"):
        Bert().reader(())


def test_many_layers_of_dropout_draw_by_key() -> None:
    """From the fourth on the key's product passes what torch takes as an integer."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(4, 4), torch.nn.Dropout(0.3))]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(4, 2))
    inputs, targets = torch.randn(20, 4), torch.arange(20) % 2
    data = client_data(inputs, targets)
    base = Layout.of(module).flatten(module)
    task = [Task(0, 1, 0, 0, 0.0)]
    one, other = (
        kind(module, data, Local(batch=4), 1).train(task, [base], [None])[0]
        for kind in (LoopTrainer, BlockTrainer)
    )
    torch.testing.assert_close(one.model, other.model)
