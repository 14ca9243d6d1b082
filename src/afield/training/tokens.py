"""Tokenisers trained on the texts at hand, for models that bring none; `library` is `transformers`.

Equal texts give equal tokens, in every process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# How Qwen2 cuts a text into what is encoded by itself: digits one by one.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_ALPHABET = 100_000  # the trainer's own limit would choose among rare characters by chance


def of_words(library: Any, texts: Iterable[str], vocabulary: int) -> Any:
    """WordPiece in lower case, as BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    listed = list(texts)
    letters = sorted({letter for text in listed for letter in made.normalizer.normalize_str(text)})
    # The trainer numbers pieces inside a word in the order of a hash table that is new in every process, and breaks
    # ties by number: here they have their numbers beforehand.
    inside = [f"##{letter}" for letter in letters if not letter.isspace()]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        special_tokens=[*marks.values(), *inside],
        limit_alphabet=_ALPHABET,
        show_progress=False,
    )
    made.train_from_iterator(listed, trainer)
    own = Tokenizer(
        models.WordPiece(made.get_vocab(), unk_token="[UNK]")
    )  # where they are pieces like others
    own.normalizer, own.pre_tokenizer = made.normalizer, made.pre_tokenizer
    ends = [(mark, own.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return library.PreTrainedTokenizerFast(tokenizer_object=own, **marks)


def of_bytes(library: Any, texts: Iterable[str], vocabulary: int) -> Any:
    """Byte-pair encoding over bytes, as Qwen's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    marks = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(marks.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return library.PreTrainedTokenizerFast(tokenizer_object=made, **marks)
