"""Tokenizers behind one small interface: sentencepiece models and Hugging Face `tokenizer.json` files."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_fanformer.durable_files import publish, temporary_name
from megatron_fanformer.errors import InputError

TOKENIZER_JSON, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"  # their usual names in a folder
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CHAT_TEMPLATE_JINJA = "chat_template.jinja"
END_OF_TEXT = "<|endoftext|>"
# Usual names of the special piece that ends a document, the most likely first.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
SHOWN_PIECES = 8
# sentencepiece's mark for a space. The same character in a text would be decoded as a space.
SPACE_MARK = "\u2581"
NO_ID = -1  # stands for a missing id, as in sentencepiece


class SentencePieceTokenizer:
    """A sentencepiece model. With byte fallback and no normalization, as trained here, every text decodes exactly."""

    eod_id = NO_ID  # the end of text, which load_tokenizer sets
    eod_source: str | None = None  # what states `eod_id`

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.path = path
        self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size: int = self._processor.vocab_size()  # one more than the largest id
        self.default_eod_id: int = self._processor.eos_id()
        self._mark_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]  # see encode
        self._has_byte_fallback = all(map(self._processor.is_byte, self._mark_ids))  # otherwise they are the unknown id

    @property
    def special_pieces(self) -> list[str]:
        """Return the control pieces, the byte pieces and the unknown piece."""
        kinds = (self._processor.is_control, self._processor.is_unknown, self._processor.is_byte)
        return [self.piece(id) for id in range(self.vocab_size) if any(is_kind(id) for is_kind in kinds)]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Return the id of each control piece, by the piece."""
        return {self.piece(id): id for id in range(self.vocab_size) if self._processor.is_control(id)}

    def piece(self, id: int) -> str:
        """Return the piece of an id."""
        return str(self._processor.id_to_piece(id))

    def id_of(self, piece: str) -> int | None:
        """Return the id of a piece; None if there is none."""
        id = int(self._processor.piece_to_id(piece))
        return id if self.piece(id) == piece else None  # for another text, `id` is that of the unknown piece

    def cut_at_special(self, text: str) -> list[str | int]:
        """Cut `text` at control pieces, which sentencepiece does not find; return the texts and the pieces' ids."""
        if not self.special_ids:
            return [text] if text else []
        longest_first = sorted(map(re.escape, self.special_ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", text)
        return [self.special_ids.get(part, part) for part in parts if part]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. U+2581 is encoded as its bytes, since the model's piece U+2581 means a space."""
        if SPACE_MARK not in text or not self._has_byte_fallback:
            return list(self._processor.encode(text))
        first, *others = text.split(SPACE_MARK)
        ids: list[int] = self._processor.encode(first)
        for part in others:
            ids.extend(self._mark_ids)
            ids.extend(self._processor.encode(part))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without control pieces such as the end of text."""
        return str(self._processor.decode(list(ids)))


class HuggingFaceTokenizer:
    """A `tokenizer.json`. As in the library, special pieces in a text become their ids."""

    eod_id = default_eod_id = NO_ID
    eod_source: str | None = None

    def __init__(self, path: Path) -> None:
        import tokenizers

        self.path = path
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        # The file may ask to cut or pad texts to a fixed length, which would change documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._added = sorted(self._tokenizer.get_added_tokens_decoder().items())

    @property
    def special_pieces(self) -> list[str]:
        """Return the file's added tokens."""
        return [token.content for _, token in self._added]

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the id of each special added token, by its text."""
        return {token.content: id for id, token in self._added if token.special}

    def piece(self, id: int) -> str:
        """Return the piece of an id."""
        return str(self._tokenizer.id_to_token(id))

    def id_of(self, piece: str) -> int | None:
        """Return the id of a piece; None if there is none."""
        id: int | None = self._tokenizer.token_to_id(piece)
        return id

    def cut_at_special(self, text: str) -> list[str | int]:
        """Return `text` uncut: the library itself finds special pieces."""
        return [text] if text else []

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; no special token is added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on this thread. Raises InputError if the library fails, as on some regular expressions."""
        ids = []
        for text in texts:
            try:  # a batch of one, since the library releases the GIL for batches only; `_fast` leaves out offsets
                (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the library's panics are not subclasses of Exception
                reason = " ".join(str(error).split())
                raise InputError(
                    f"tokenizer {self.path} cannot encode a text that begins {text[:20]!r} ({reason}); use another"
                ) from error
            ids.append(encoded.ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special pieces."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


Tokenizer = SentencePieceTokenizer | HuggingFaceTokenizer


def load_tokenizer(path: str | Path, *, eod_id: int | None = None, needs_eod: bool = True) -> Tokenizer:
    """Read a sentencepiece `.model`, a Hugging Face `tokenizer.json` (by any name), or a folder with one.

    `eod_id` is the id that ends documents; None: find it, see `_end_of_text`. Raises InputError if there is no such
    file, if it has another format, if `eod_id` is outside the vocabulary, or, with `needs_eod`, if no id is found.
    """
    file = tokenizer_file(path)
    try:
        tokenizer_class = HuggingFaceTokenizer if file.suffix == ".json" else SentencePieceTokenizer
        tokenizer = tokenizer_class(file)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries' panics are not subclasses of Exception
        format_name = "a Hugging Face tokenizer.json" if file.suffix == ".json" else "a sentencepiece model"
        reason = " ".join(str(error).split())
        raise InputError(f"tokenizer {file} cannot be read as {format_name}: {reason}") from error
    tokenizer.eod_id, tokenizer.eod_source = _end_of_text(tokenizer, eod_id)
    if tokenizer.eod_id == NO_ID and needs_eod:
        special = [f"{id} {piece}" for piece, id in tokenizer.special_ids.items()]
        shown = ", ".join(special[:SHOWN_PIECES]) + (", …" if len(special) > SHOWN_PIECES else "")
        pieces = f"its special pieces: {shown}" if special else "it has no special pieces"
        raise InputError(f"tokenizer {file} does not say what ends a text; state the id by --eod-id ({pieces})")
    return tokenizer


def _end_of_text(tokenizer: Tokenizer, stated: int | None) -> tuple[int, str | None]:
    """Return the id that ends a text, and what states it: "eod_id" (the argument), or a file beside the tokenizer.

    If nothing states it (None), it is the id of the special piece with the likeliest name, else the model's default.
    Ordinary pieces with such a name do not count: `</s>` is an HTML tag in Gemma's vocabularies.
    """
    if stated is not None:
        if not 0 <= stated < tokenizer.vocab_size:
            raise InputError(
                f"end-of-text id {stated} is outside the vocabulary of {tokenizer.path}; it must be in "
                f"[0, {tokenizer.vocab_size})"
            )
        return stated, "eod_id"
    for file in (TOKENIZER_CONFIG, GENERATION_CONFIG):
        config = read_json_config(tokenizer.path.with_name(file))
        token, id_or_ids = token_text(config.get("eos_token")), config.get("eos_token_id")
        first_id = id_or_ids[0] if isinstance(id_or_ids, list) and id_or_ids else id_or_ids
        end = first_id if token is None else tokenizer.id_of(token)
        if type(end) is int and 0 <= end < tokenizer.vocab_size:  # type: to isinstance, true and false are ints
            return end, file
    for name in END_OF_TEXT_NAMES:
        if name in tokenizer.special_ids:
            return tokenizer.special_ids[name], None
    return tokenizer.default_eod_id, None


def end_of_text_notices(tokenizer: Tokenizer) -> list[str]:
    """Return a notice if neither option nor file states the end of text, so that a piece was chosen; else no notice."""
    if tokenizer.eod_source is not None or tokenizer.eod_id == NO_ID:
        return []
    return [
        f"a text ends with {tokenizer.piece(tokenizer.eod_id)} (id {tokenizer.eod_id}), its tokenizer's piece for that;"
        " --eod-id states another"
    ]


def read_json_config(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no file or no object. Raises InputError if it is not JSON."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error}); fix it, or remove it") from error
    return config if isinstance(config, dict) else {}


def token_text(stated: Any) -> str | None:
    """Return a special token's text, which `tokenizer_config.json` states alone or in an object; otherwise None."""
    text = stated.get("content") if isinstance(stated, dict) else stated
    return text if isinstance(text, str) else None


def tokenizer_file(path: str | Path) -> Path:
    """Return the file of a tokenizer, named by its path or by its folder.

    In a folder, it is `tokenizer.json`, else `tokenizer.model`, else the only `.model` file. Raises InputError if there
    is no such file, or if its name does not end in .json or .model.
    """
    path = Path(path)
    if path.is_dir():
        models = sorted(path.glob("*.model"))
        candidates = [path / TOKENIZER_JSON, path / TOKENIZER_MODEL, *(models if len(models) == 1 else [])]
        if not (files := [file for file in candidates if file.is_file()]):
            raise InputError(
                f"folder {path} holds no tokenizer.json and not exactly one .model file; make a tokenizer.json by "
                "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        path = files[0]
    if not path.is_file():
        raise InputError(f"tokenizer {path} does not exist; name a .model file, a tokenizer.json or their folder")
    if path.suffix not in (".json", ".model"):
        raise InputError(f"tokenizer {path} is of an unknown kind; its name must end in .model or .json")
    return path


def train_sentencepiece(
    texts: Iterable[str], model_prefix: str | Path, *, vocab_size: int = 8192, num_threads: int = 1
) -> Path:
    """Train an exact byte-pair tokenizer, write `MODEL_PREFIX.model`, and return the path.

    Exact means that decode(encode(x)) == x for every text: no normalization, no added or removed spaces, and bytes for
    characters without a piece. Runs of white space and line ends may become pieces, which helps with code. Encoding
    never yields the end-of-text piece, not even for the text `<|endoftext|>`.

    sentencepiece holds several copies of the texts in memory. Raises InputError if the texts are too few.
    """
    import sentencepiece

    model = Path(f"{model_prefix}.model")
    model.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_name(model)
    try:
        with partial.open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=writer,
                model_type="bpe",
                vocab_size=vocab_size,
                num_threads=num_threads,
                byte_fallback=True,
                character_coverage=0.9999,  # a rarer character costs a piece and saves next to nothing
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                max_sentence_length=1 << 30,  # longer ones would be skipped silently
                unk_id=0,
                eos_id=1,
                eos_piece=END_OF_TEXT,
                bos_id=-1,
                pad_id=-1,
                minloglevel=2,
            )
        publish(partial, model)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"no tokenizer of {vocab_size} pieces can be trained on these texts: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)
    return model
