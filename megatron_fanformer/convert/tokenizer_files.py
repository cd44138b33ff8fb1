"""Tokenizer files that `AutoTokenizer` opens anywhere, with the ids that the model was trained on.

A Hugging Face `tokenizer.json` is copied, without a post-processor that puts special tokens around a text: preparation
and generation add none. A sentencepiece byte-pair model is rewritten as a `tokenizer.json`, exactly:

- its pieces keep their ids. Every pair of pieces that joins to a piece becomes a merge, ranked by the joined piece's
  score: sentencepiece merges the neighbors that make the highest-scoring piece;
- sentencepiece writes a space as U+2581 inside its pieces. Here the pieces hold the space itself, so that no
  normalizer is needed, and a literal U+2581 in a text is encoded by its bytes, as in this project's encoding;
- control pieces stay special tokens, which transformers recognises inside a text unless `split_special_tokens` is set.

The written files are read back and compared with the original on sample texts before they are published.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_fanformer.convert.model_card import Extras
from megatron_fanformer.data.chat_template import ChatTemplate
from megatron_fanformer.data.tokenizer import (
    CHAT_TEMPLATE_JINJA,
    SPACE_MARK,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from megatron_fanformer.errors import InputError

# Spaces in every place, line ends, code, several scripts, combining marks, rare characters, look-alikes.
SAMPLE_TEXTS = (
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "  two leading,  two inside, two trailing  ",
    "\n\n\tdef f(self, *args):\n\t\treturn {k: v for k, v in self.items() if v != 0x1F}\r\n",
    '        if x is None:\n            raise ValueError(f"{x!r}")\n' * 3,
    "    " * 9 + "aaaaaaaaaaaaa bababababab ------------- ==== ....... 1000000 3.14159",
    "Größe naïve café e\u0301 \u00a0 ﬁ Ångström",
    "北京 日本語テキスト 한국어 Привет мир العربية שלום हिन्दी ไทย",
    "emoji 🙂👩‍👩‍👧 math ∑∫√ \u2581mark\u2581 \u200b\ufeff \x00 \x7f \ue000",
    "<s></s><unk><pad> <|endoftext|> <0x0A> [EOS] <|padding|>",
)


def write_tokenizer(folder: Path, extras: Extras, *, model_max_length: int) -> tuple[int, list[int]]:
    """Write the files of a tokenizer, made from its `tokenizer.json` or sentencepiece `.model`, into a folder.

    Returns:
        One more than the largest id, and the ids that end generation: the end of text and, if the chat template ends
        an answer with another special token, that one.

    Raises:
        InputError: the tokenizer cannot be read, or is a sentencepiece model without an exact equivalent.
    """
    from tokenizers import Tokenizer

    source, end_of_text_id = extras.tokenizer, extras.end_of_text_id
    assert source is not None and end_of_text_id is not None
    if source.suffix == ".model":
        original_encode = _write_sentencepiece(folder, source)
    else:
        _write_json(folder / TOKENIZER_JSON, source)
        original_encode = HuggingFaceTokenizer(source).encode
    written = Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    vocabulary = written.get_vocab(with_added_tokens=True)
    end_of_text = next((piece for piece, piece_id in vocabulary.items() if piece_id == end_of_text_id), None)
    if end_of_text is None:
        raise InputError(f"end-of-text id {end_of_text_id} is not in the vocabulary of {source}; name one that is")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
    end_ids = [end_of_text_id]
    if extras.chat_template is not None:
        (folder / CHAT_TEMPLATE_JINJA).write_text(extras.chat_template, encoding="utf-8")
        end_of_turn_ids = written.encode(ChatTemplate(extras.chat_template).end_of_turn(), add_special_tokens=False).ids
        other_special_ids = set(written.get_added_tokens_decoder()) - {end_of_text_id}
        end_ids += [end_id for end_id in end_of_turn_ids if end_id in other_special_ids][-1:]  # the last, if any
    _verify(folder, source, original_encode, encode_finds_specials=source.suffix != ".model")
    return max(vocabulary.values()) + 1, end_ids


def adds_special_tokens(tokenizer: Path) -> bool:
    """Return whether a tokenizer is a `tokenizer.json` that puts special tokens around a text; an export does not."""
    from tokenizers import Tokenizer

    return tokenizer.suffix == ".json" and Tokenizer.from_file(str(tokenizer)).num_special_tokens_to_add(False) > 0


def _write_json(file: Path, source: Path) -> None:
    """Copy a `tokenizer.json`, without the special tokens that its post-processor puts around a text."""
    if not adds_special_tokens(source):
        shutil.copyfile(source, file)
        return
    content = json.loads(source.read_text(encoding="utf-8"))  # the tokenizers library has just read it, with bounds
    content["post_processor"] = _without_special_tokens(content["post_processor"])
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _without_special_tokens(processor: dict[str, Any]) -> dict[str, Any] | None:
    """Return a post-processor's byte-level part, which adds no tokens; None if it has no such part."""
    if processor["type"] == "Sequence":
        parts = list(filter(None, map(_without_special_tokens, processor["processors"])))
        return {**processor, "processors": parts} if parts else None
    return processor if processor["type"] == "ByteLevel" else None


def check_fits(tokenizer: Path, num_ids: int, vocab_size: int) -> None:
    """Raise InputError if a tokenizer has more ids than a model's vocabulary."""
    if num_ids > vocab_size:
        raise InputError(
            f"tokenizer {tokenizer} has {num_ids} ids, the model's vocabulary {vocab_size}; name the tokenizer that "
            "the model was trained with"
        )


def _write_sentencepiece(folder: Path, source: Path) -> Callable[[str], list[int]]:
    """Write a `tokenizer.json` equal to a sentencepiece model, and a copy of the model; return the model's `encode`."""
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    model.ParseFromString(source.read_bytes())
    # sentencepiece never finds these pieces in a text; the written tokenizer would, which `_verify` may not notice.
    if any(piece.type == piece.UNUSED or " " in piece.piece for piece in model.pieces):
        raise InputError(
            f"sentencepiece model {source} has unused pieces or pieces with a plain space, which Hugging Face's format "
            "cannot express; export with a tokenizer.json instead, or without a tokenizer"
        )
    text = json.dumps(_tokenizer_json(model), indent=1, ensure_ascii=False)
    (folder / TOKENIZER_JSON).write_text(text, encoding="utf-8")
    shutil.copyfile(source, folder / TOKENIZER_MODEL)
    return SentencePieceTokenizer(source).encode


def _tokenizer_json(model: Any) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` that gives the same ids as the sentencepiece model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    texts = [piece.piece.replace(SPACE_MARK, " ") for piece in model.pieces]
    scores = {text: piece.score for text, piece in zip(texts, model.pieces, strict=True) if piece.type == piece.NORMAL}
    vocabulary = {text: index for index, text in enumerate(texts)}
    library = Tokenizer(models.BPE(vocabulary, list(_merges(scores)), byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for text, piece in zip(texts, model.pieces, strict=True):
        if piece.type in (piece.CONTROL, piece.UNKNOWN):
            library.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif piece.type == piece.USER_DEFINED:
            library.add_tokens([AddedToken(text, normalized=False)])
    return dict(json.loads(library.to_str()))


def _merges(scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield every pair of pieces that joins to a piece, beginning with the joined piece of the highest score."""
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                yield piece[:cut], piece[cut:]


def _verify(folder: Path, source: Path, encode: Callable[[str], list[int]], *, encode_finds_specials: bool) -> None:
    """Raise InputError if the written files give sample texts other ids than the original's `encode`."""
    from transformers import PreTrainedTokenizerFast

    written = PreTrainedTokenizerFast.from_pretrained(folder, split_special_tokens=not encode_finds_specials)
    for text in SAMPLE_TEXTS:
        expected, ids = encode(text), written.encode(text, verbose=False)
        if ids != expected:
            raise InputError(
                f"tokenizer {source} has no exact equivalent in Hugging Face's format: {text!r} gives {ids} "
                f"instead of {expected}; export without a tokenizer"
            )
