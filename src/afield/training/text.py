"""Networks that read texts, from `transformers`: pretrained ones from a folder, or small ones that know nothing yet.

A network takes one tensor of token ids, filled up on the right, and makes its own mask of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from afield.core.errors import InputError, within
from afield.training import pretrained, tokens
from afield.training.local import IGNORED

Row = tuple[str, ...]  # one text, or a pair
TOKENISERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")  # one of them is in a folder
PLAIN = (
    "### Instruction:\n{}\n\n### Response:\n"  # a question to a model whose tokeniser has no chat template
)


@dataclass(frozen=True)
class _Network:
    """What all three have. `folder`: a pretrained model and its tokeniser, as `save_pretrained` writes them.

    Without one, `layers`, `width`, `heads` and `vocabulary` make a small network and a tokeniser trained on the
    clients' texts: a stand-in that shows that everything works, not how well.
    """

    folder: str = ""
    layers: int = 2
    width: int = 64
    heads: int = 2
    vocabulary: int = 2000
    length: int = 128  # tokens of a text at most; what is longer is cut
    rank: int = 0  # of LoRA's matrices; 0: every weight is trained
    alpha: float = 16.0  # LoRA's scale is alpha / rank
    answers: ClassVar[bool] = False  # writes texts; else tells classes apart

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            within(name, getattr(self, name), 1, math.inf)
        within("vocabulary", self.vocabulary, 300, math.inf)  # every byte, the marks and a few words
        within("length", self.length, 8, math.inf)
        within("rank", self.rank, 0, math.inf)
        within("alpha", self.alpha, 0, math.inf, above=True)
        if self.width % (2 * self.heads):
            raise InputError(
                f"width = {self.width} is no multiple of 2 x heads = {2 * self.heads}: change one"
            )

    @property
    def stand_in(self) -> bool:
        """Whether this is the small network in place of a pretrained one."""
        return not self.folder

    def reader(self, texts: Iterable[str]) -> Reader:
        """This model with a tokeniser: that of its folder, else one trained on these texts."""
        library = pretrained.transformers(type(self).__name__)
        if not self.folder:
            made = tokens.of_bytes if self.answers else tokens.of_words
            return Reader(self, made(library, texts, self.vocabulary))
        self._check_folder(library)
        tokeniser = pretrained.from_folder(self.folder, library.AutoTokenizer.from_pretrained)
        if tokeniser.pad_token_id is None:
            tokeniser.pad_token = tokeniser.eos_token
        return Reader(self, tokeniser)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        raise InputError(
            f"{type(self).__name__} reads texts, but examples have shape {shape}: choose data such as mrpc"
        )

    def _check_folder(self, library: Any) -> None:
        home = f"give the folder of a pretrained model such as huggingface.co/{self._example()}"
        if not (Path(self.folder) / "config.json").is_file():
            raise InputError(f"model.folder = {self.folder!r} has no config.json: {home}")
        if not any((Path(self.folder) / name).is_file() for name in TOKENISERS):
            raise InputError(
                f"model.folder = {self.folder!r} has no tokeniser ({', '.join(TOKENISERS)}): {home}"
            )
        found = pretrained.from_folder(self.folder, library.AutoConfig.from_pretrained)
        kind = self._kind()
        if kind and found.model_type != kind:
            raise InputError(
                f"model.folder = {self.folder!r} holds a {found.model_type!r}, not a {kind!r}: {home}"
            )
        most = getattr(found, "max_position_embeddings", math.inf)
        within("length", self.length + getattr(self, "answer", 0), 1, most)

    def _kind(self) -> str:
        return ""

    def _example(self) -> str:
        return ""

    def network(self, library: Any, tokeniser: Any, classes: int) -> nn.Module:
        raise NotImplementedError


@dataclass(frozen=True)
class Bert(_Network):
    """BERT for classification (Devlin et al. 2019): a folder such as bert-base-uncased, or a small one."""

    def _kind(self) -> str:
        return "bert"

    def _example(self) -> str:
        return "google-bert/bert-base-uncased"

    def network(self, library: Any, tokeniser: Any, classes: int) -> nn.Module:
        if self.folder:
            return _classifier(self.folder, library, tokeniser, classes)
        config = library.BertConfig(
            vocab_size=len(tokeniser),
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.length,
            num_labels=classes,
            pad_token_id=tokeniser.pad_token_id,
            attn_implementation=_keyed_attention(library),
        )
        return Classifier(library.BertForSequenceClassification(config), tokeniser)


@dataclass(frozen=True)
class DistilBert(_Network):
    """DistilBERT for classification (Sanh et al. 2019): a folder such as distilbert-base-uncased, or a small one."""

    def _kind(self) -> str:
        return "distilbert"

    def _example(self) -> str:
        return "distilbert/distilbert-base-uncased"

    def network(self, library: Any, tokeniser: Any, classes: int) -> nn.Module:
        if self.folder:
            return _classifier(self.folder, library, tokeniser, classes)
        config = library.DistilBertConfig(
            vocab_size=len(tokeniser),
            dim=self.width,
            n_layers=self.layers,
            n_heads=self.heads,
            hidden_dim=4 * self.width,
            max_position_embeddings=self.length,
            num_labels=classes,
            pad_token_id=tokeniser.pad_token_id,
            attn_implementation=_keyed_attention(library),
        )
        return Classifier(library.DistilBertForSequenceClassification(config), tokeniser)


@dataclass(frozen=True)
class CausalLm(_Network):
    """A causal language model that answers questions: a folder such as Qwen2.5-1.5B-Instruct, or a small Qwen2."""

    length: int = 512
    answer: int = 256  # tokens of a generated answer at most
    answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within("answer", self.answer, 1, math.inf)

    def _example(self) -> str:
        return "Qwen/Qwen2.5-1.5B-Instruct"

    def network(self, library: Any, tokeniser: Any, classes: int) -> nn.Module:
        ends = [tokeniser.eos_token_id]
        if self.folder:
            kind, how = library.AutoModelForCausalLM, {"attn_implementation": "sdpa"}
            made: Any = pretrained.network(library, self.folder, kind, head=True, **how)
            known = made.generation_config.eos_token_id
            ends = list(dict.fromkeys([*ends, *(known if isinstance(known, list) else [known])]))
        else:
            config = library.Qwen2Config(
                vocab_size=len(tokeniser),
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads,
                intermediate_size=4 * self.width,
                max_position_embeddings=self.length + self.answer,
                tie_word_embeddings=True,
                attn_implementation="eager",  # of which a tape can be made
            )
            made = library.Qwen2ForCausalLM(config)
        # Its own: a folder's may ask for sampling, or for a penalty on repetitions.
        made.generation_config = library.GenerationConfig(
            do_sample=False,
            max_new_tokens=self.answer,
            pad_token_id=tokeniser.pad_token_id,
            eos_token_id=[end for end in ends if end is not None],
        )
        return Writer(made, tokeniser)


@dataclass(frozen=True, eq=False)
class Reader:
    """A model with its tokeniser: makes tensors of texts, and builds the network that takes them."""

    config: _Network
    tokeniser: Any

    @property
    def pad(self) -> int:
        return int(self.tokeniser.pad_token_id)

    def encode(self, *sets: Sequence[Row]) -> list[Tensor]:
        """Each set of texts, or of pairs, as token ids [texts, longest of all sets], filled up on the right."""
        listed = [self._ids(rows) for rows in sets]
        width = max(len(ids) for rows in listed for ids in rows)
        return [_filled(rows, self.pad, width) for rows in listed]

    def _ids(self, rows: Sequence[Row]) -> list[list[int]]:
        columns = [list(column) for column in zip(*rows, strict=True)]
        found = self.tokeniser(*columns, truncation=True, max_length=self.config.length, padding=False)
        return list(found["input_ids"])

    def prompts(self, rows: Sequence[Row]) -> list[list[int]]:
        """Questions as the model wants to be asked: by its chat template, where it has one."""
        return [self._asked(row[0])[-self.config.length :] for row in rows]

    def _asked(self, question: str) -> list[int]:
        if not getattr(self.tokeniser, "chat_template", None):
            return list(self.tokeniser(PLAIN.format(question), add_special_tokens=False)["input_ids"])
        said = [{"role": "user", "content": question}]
        text = self.tokeniser.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return list(self.tokeniser(text, add_special_tokens=False)["input_ids"])

    def complete(self, rows: Sequence[Row], answers: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Questions with their answers as (ids, the next token at each place of the answer, else IGNORED)."""
        length = self.config.length
        inputs, targets = [], []
        for asked, answer in zip(self.prompts(rows), answers, strict=True):
            said = [
                *self.tokeniser(answer, add_special_tokens=False)["input_ids"],
                self.tokeniser.eos_token_id,
            ]
            whole = [*asked, *said]
            inputs.append(whole[:-1][:length])
            targets.append([*[IGNORED] * (len(asked) - 1), *said][:length])
        width = max(len(ids) for ids in inputs)
        return _filled(inputs, self.pad, width), _filled(targets, IGNORED, width)

    def questions(self, rows: Sequence[Row]) -> Tensor:
        """Questions without answers as ids, filled up on the right."""
        asked = self.prompts(rows)
        return _filled(asked, self.pad, max(len(ids) for ids in asked))

    def decode(self, ids: Sequence[int]) -> str:
        """A text without the marks that only the model needs."""
        return str(self.tokeniser.decode(list(ids), skip_special_tokens=True))

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network, with random values where it has none of its own (drawn from torch's default stream)."""
        library = pretrained.transformers(type(self.config).__name__)
        made = self.config.network(library, self.tokeniser, classes)
        return _adapted(made, self.config.rank, self.config.alpha) if self.config.rank else made


class Classifier(nn.Module):
    """Token ids [texts, length] in, one score per class out."""

    def __init__(self, network: Any, tokeniser: Any) -> None:
        super().__init__()
        self.network, self.pad = network, int(tokeniser.pad_token_id)
        # Which of two texts a token is of, as BERT wants it (DistilBERT does not): it changes after the first mark.
        self.mark = int(tokeniser.sep_token_id) if network.config.model_type == "bert" else None

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != self.pad
        # A finished mask: transformers would look at the values of a plain one, which no tape can.
        low = torch.finfo(torch.float32).min
        more = {"attention_mask": ((~there).to(torch.float32) * low)[:, None, None, :]}
        if self.mark is not None:
            marks = (ids == self.mark).to(torch.long)
            more["token_type_ids"] = ((marks.cumsum(1) - marks) > 0).to(torch.long) * there
        found: Tensor = self.network(input_ids=ids, **more).logits
        return found


class Writer(nn.Module):
    """Token ids [texts, length] in, scores of the next token at every place out."""

    def __init__(self, network: Any, tokeniser: Any) -> None:
        super().__init__()
        self.network, self.pad = network, int(tokeniser.pad_token_id)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        low = torch.finfo(torch.float32).min
        # What fills up lies on the right, where nobody looks.
        ahead = torch.ones(length, length, device=ids.device).triu(1) * low
        found: Tensor = self.network(
            input_ids=ids,
            attention_mask=ahead.expand(len(ids), 1, length, length),
            position_ids=torch.arange(length, device=ids.device)[None],
            use_cache=False,
        ).logits
        return found

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the model says next, the likeliest token at a time; with what fills up after its end."""
        width = max(len(ids) for ids in prompts)
        where = next(self.parameters()).device
        ids = torch.tensor([[self.pad] * (width - len(one)) + list(one) for one in prompts], device=where)
        there = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=where)
        said: list[list[int]] = self.network.generate(ids, attention_mask=there)[:, width:].tolist()
        return said


def _classifier(folder: str, library: Any, tokeniser: Any, classes: int) -> nn.Module:
    kind, how = library.AutoModelForSequenceClassification, {"attn_implementation": _keyed_attention(library)}
    made = pretrained.network(library, folder, kind, head=False, num_labels=classes, **how)
    return Classifier(made, tokeniser)


def _keyed_attention(library: Any) -> str:
    """Attention whose dropout is a module's, so that it can draw by key (training/layers.py); its registered name."""
    name = "afield"

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor]:
        scores = query @ key.transpose(2, 3) * how.get("scaling", query.shape[-1] ** -0.5)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = module.dropout(scores.softmax(dim=-1))
        return (weights @ value).transpose(1, 2).contiguous(), weights

    library.AttentionInterface.register(name, attend)
    return name


def _adapted(module: nn.Module, rank: int, alpha: float) -> nn.Module:
    """LoRA (Hu et al. 2022) beside every linear layer of the body; a classifier's head is trained as a whole.

    Frozen weights become buffers that are not saved: no part of the model's vector, so that clients send and
    strategies keep the adapters alone.
    """
    import peft

    network: Any = module.network
    body = network.base_model_prefix
    inside = [
        name
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear) and name.partition(".")[0] == body
    ]
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=inside), network)
    heads = isinstance(module, Classifier)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name or (heads and name.partition(".")[0] != body))
    for part in list(network.modules()):
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                del part._parameters[name]
                part.register_buffer(name, parameter.data, persistent=False)
    return module


def _filled(rows: Sequence[Sequence[int]], by: int, width: int) -> Tensor:
    return torch.tensor([[*row, *[by] * (width - len(row))] for row in rows], dtype=torch.int64)
