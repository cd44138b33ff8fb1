"""Tokenizers behind one small interface: sentencepiece models and Hugging Face `tokenizer.json` files."""

import hashlib
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.data.notes import note_path
from megatron_fanformer.data.remote_files import copy_to, find, look_up_contents, only_one_at_a_time, optional_content
from megatron_fanformer.durable_files import publish, temporary_name, write_atomically
from megatron_fanformer.errors import InputError, MachineTooSlow, redacted
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import is_url, reported_as_local

TOKENIZER_JSON, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"  # their usual names in a folder
BESIDE = ("tokenizer_config.json", "chat_template.jinja")  # what a chat template needs
END_OF_TEXT = "<|endoftext|>"
# Names of the piece that ends a document, the most likely first.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
# sentencepiece's own mark for a space. A literal one in the text would come back as a space.
SPACE_MARK = "\u2581"
NO_ID = -1  # in place of one that a tokenizer does not have, as sentencepiece has it

# The most text that is given to the sentencepiece trainer: it holds all of it in memory, several times over.
TRAINING_TEXT_BYTES = 100_000_000
MOST_IDS = 2**31  # what token files hold

# A tokenizer.json brings a regular expression, and there are some that take longer than the universe is old. It is
# judged by the CPU time of the thread that encodes, of which the slowest sound one takes a hundredth of this.
ENCODE_SECONDS = 60.0
ENCODE_CHARACTERS_PER_SECOND = 10_000
WAIT_FACTOR = 60.0
"""Wall time allowed per CPU time: a thread that shares a core with ten others takes eleven times as long."""
POLL_SECONDS = 0.01


class TokenizerTooSlow(InputError):
    """A text takes a tokenizer too much CPU time."""


class SentencePieceTokenizer:
    """A sentencepiece model. With byte fallback and no normalisation (as trained here) it is exact."""

    def __init__(self, path: Path, *, eod_id: int | None = None, needs_eod: bool = True) -> None:
        import sentencepiece

        self.path = path
        self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size: int = self._processor.vocab_size()  # one more than the largest id
        self._mark_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._has_byte_fallback = all(map(self._processor.is_byte, self._mark_ids))
        self._control_pieces: dict[str, int] | None = None
        found = self._find_end_of_text()
        self.eod_id = _end_of_text_id(path, eod_id, self.vocab_size, found, is_needed=needs_eod)

    @property
    def special_pieces(self) -> list[str]:
        """Control and byte pieces, and the unknown one."""
        model = self._processor
        kinds = (model.is_control, model.is_unknown, model.is_byte)
        return [model.id_to_piece(id) for id in range(self.vocab_size) if any(is_kind(id) for is_kind in kinds)]

    def piece(self, id: int) -> str:
        """Return the piece of an id."""
        return str(self._processor.id_to_piece(id))

    def cut_at_special(self, text: str) -> list[str | int]:
        """Cut `text` at its control pieces, which sentencepiece never finds in a text."""
        if self._control_pieces is None:
            model = self._processor
            self._control_pieces = {model.id_to_piece(id): id for id in range(self.vocab_size) if model.is_control(id)}
        if not self._control_pieces:
            return [text] if text else []
        longest_first = sorted(map(re.escape, self._control_pieces), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", text)
        return [self._control_pieces.get(part, part) for part in parts if part]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a literal U+2581 is encoded as its bytes, since the model's piece means a space."""
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
        """Return the text of `ids`; control pieces, including the end of text, have none."""
        return str(self._processor.decode(list(ids)))

    def _find_end_of_text(self) -> int | None:
        for name in END_OF_TEXT_NAMES:
            piece = self._processor.piece_to_id(name)
            if self._processor.id_to_piece(piece) == name:
                return int(piece)
        end: int = self._processor.eos_id()
        return end if end >= 0 else None


class HuggingFaceTokenizer:
    """A `tokenizer.json`. Special pieces that a text contains literally are recognised, as the library does."""

    def __init__(self, path: Path, *, eod_id: int | None = None, needs_eod: bool = True) -> None:
        import tokenizers

        self.path = path
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        self._has_regex = '"Regex"' in path.read_text(encoding="utf-8")
        # The file may carry settings meant for batches of fixed length; documents must stay whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        found = next((vocabulary[name] for name in END_OF_TEXT_NAMES if name in vocabulary), None)
        self.eod_id = _end_of_text_id(path, eod_id, self.vocab_size, found, is_needed=needs_eod)

    @property
    def special_pieces(self) -> list[str]:
        """Return the file's added tokens."""
        return [token.content for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())]

    def piece(self, id: int) -> str:
        """Return the piece of an id."""
        return str(self._tokenizer.id_to_token(id))

    def cut_at_special(self, text: str) -> list[str | int]:
        """Return `text` alone: the library finds special pieces itself."""
        return [text] if text else []

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens added; raises like `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text.

        Raises:
            TokenizerTooSlow: the file's own regular expression takes more than a minute of CPU time, and the texts'
                share.
            MachineTooSlow: the thread that encodes got next to no CPU time.
            InputError: it cannot be matched against a text.
        """
        if not self._has_regex:
            return list(self._encoded(texts))
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        clock: queue.SimpleQueue[int] = queue.SimpleQueue()
        # A thread that is too slow can only be left behind: it ends with the process.
        threading.Thread(target=self._encode_into, args=(texts, outcome, clock), daemon=True).start()
        found = self._wait(texts, outcome, clock.get())
        if isinstance(found, BaseException):
            reason = " ".join(str(found).split())
            raise InputError(
                f"tokenizer {self.path} cannot encode a text, of those that begin {texts[0][:20]!r} ({reason}); use "
                "another tokenizer"
            )
        return list(found)

    def _wait(self, texts: Sequence[str], outcome: "queue.SimpleQueue[Any]", clock: int) -> Any:
        """Return what the encoding thread puts into `outcome`, within limits of its CPU `clock` and of the wall's."""
        characters = sum(map(len, texts))
        seconds = ENCODE_SECONDS + characters / ENCODE_CHARACTERS_PER_SECOND
        latest = time.monotonic() + WAIT_FACTOR * seconds
        left = seconds
        while left > 0:
            with suppress(queue.Empty):
                return outcome.get(timeout=max(left, POLL_SECONDS))  # CPU time never passes faster than the wall's
            if time.monotonic() > latest:
                raise MachineTooSlow(
                    f"tokenizer {self.path} got {seconds - left:.1f} s of CPU time in {WAIT_FACTOR * seconds:.0f} s; "
                    "other processes take this machine's cores: start fewer"
                )
            with suppress(OSError):  # it has just ended, and its outcome is there
                left = seconds - time.clock_gettime(clock)
        raise TokenizerTooSlow(
            f"tokenizer {self.path} takes more than {seconds:.0f} s of CPU time for {characters} characters that begin "
            f"{texts[0][:20]!r}; its regular expression can match them in too many ways: use another tokenizer"
        )

    def _encode_into(
        self, texts: Sequence[str], outcome: "queue.SimpleQueue[Any]", clock: "queue.SimpleQueue[int]"
    ) -> None:
        clock.put(time.pthread_getcpuclockid(threading.get_ident()))
        try:
            outcome.put(list(self._encoded(texts)))
        except BaseException as error:  # the library's panics are not subclasses of Exception
            outcome.put(error)

    def _encoded(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Encode by the library's batches of one, on this thread: only for a batch does it release the GIL."""
        for text in texts:
            (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
            yield encoded.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special pieces written out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


Tokenizer = SentencePieceTokenizer | HuggingFaceTokenizer


def load_tokenizer(path: str | Path, *, eod_id: int | None = None, needs_eod: bool = True) -> Tokenizer:
    """Read a sentencepiece `.model`, a Hugging Face `tokenizer.json` (by any name), the URL of one, or a folder.

    In a folder, `tokenizer.json` is taken, else `tokenizer.model`, else its only `.model` file. `eod_id` sets
    the id that ends a document; by default it is that of `<|endoftext|>`, or of `</s>` and similar names. A
    tokenizer without such a piece has NO_ID there, if that is allowed by `needs_eod`.

    Raises:
        InputError: no such file, another format, no end-of-text piece that is needed, or an `eod_id` outside the
            vocabulary.
    """
    file = tokenizer_file(path)
    try:
        kind = HuggingFaceTokenizer if file.suffix == ".json" else SentencePieceTokenizer
        tokenizer = kind(file, eod_id=eod_id, needs_eod=needs_eod)
        if tokenizer.vocab_size > MOST_IDS:
            raise InputError(
                f"tokenizer {file} has an id of {tokenizer.vocab_size - 1}; token files hold ids to 2^31 - 1"
            )
        return tokenizer
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # what the libraries raise for another format; panics are not subclasses of Exception
        format_name = "a Hugging Face tokenizer.json" if file.suffix == ".json" else "a sentencepiece model"
        reason = " ".join(str(error).split())
        raise InputError(f"tokenizer {file} cannot be read as {format_name}: {reason}") from error


def tokenizer_file(path: str | Path) -> Path:
    """Return the file that `load_tokenizer` reads for a path; for a URL its copy on this machine.

    Raises:
        InputError: there is none, or it is of an unknown kind.
        FanformerError: its store does not serve it.
    """
    path = _fetched(str(path)) if is_url(path) else Path(path)
    if path.is_dir():
        models = sorted(path.glob("*.model"))
        named = [path / TOKENIZER_JSON, path / TOKENIZER_MODEL, *(models if len(models) == 1 else [])]
        path = next((candidate for candidate in named if candidate.is_file()), path)
        if path.is_dir():
            raise InputError(f"folder {path} holds no tokenizer; it needs a tokenizer.json or one .model file")
    if not path.is_file():
        raise InputError(f"tokenizer {path} does not exist; name a .model file, a tokenizer.json or their folder")
    if path.suffix not in (".json", ".model"):
        raise InputError(f"tokenizer {path} is of an unknown kind; its name must end in .model or .json")
    return path


def _fetched(url: str) -> Path:
    """Return the copy of a tokenizer on another store and its chat template, fetched once for each version of them."""
    if not url.endswith((".json", ".model")):
        raise InputError(f"tokenizer {redacted(url)} does not name a file; name one that ends in .model or .json")
    if (file := find(url)) is None:
        raise InputError(f"tokenizer {redacted(url)} does not exist; name a .model file or a tokenizer.json")
    parent, _, name = url.rpartition("/")
    # They are small, and read each time: a store without the right to list looks up none that may be missing.
    look_up_contents(f"{parent}/{beside}" for beside in BESIDE)
    contents = {beside: optional_content(f"{parent}/{beside}") for beside in BESIDE}
    sums = [hashlib.sha256(content).hexdigest() if content is not None else "none" for content in contents.values()]
    folder = note_path(cache_folder() / "tokenizers", " ".join([file.identity, *sums])).with_suffix("")
    with only_one_at_a_time(folder):
        if not (folder / name).is_file():
            for beside, content in contents.items():
                if content is not None:
                    with reported_as_local(folder):
                        write_atomically(folder / beside, content)
            copy_to(file, folder / name)
    return folder / name


def _end_of_text_id(path: Path, stated: int | None, vocab_size: int, found: int | None, *, is_needed: bool) -> int:
    if stated is not None:
        if not 0 <= stated < vocab_size:
            raise InputError(f"eod_id {stated} is outside the vocabulary of {path}; it must be in [0, {vocab_size})")
        return stated
    if found is None and is_needed:
        names = ", ".join(END_OF_TEXT_NAMES)
        raise InputError(f"tokenizer {path} has no end-of-text piece ({names}); set eod_id to its id")
    return NO_ID if found is None else found


def train_sentencepiece(
    texts: Iterable[str], model_prefix: str | Path, *, vocab_size: int = 8192, num_threads: int = 1
) -> Path:
    """Train an exact byte-pair tokenizer and write `MODEL_PREFIX.model`; returns that path.

    decode(encode(x)) == x for every text: no normalisation, no added or removed space, byte fallback for the
    characters that have no piece. Runs of white space and line ends may become pieces, for the sake of code.
    The end-of-text piece, `<|endoftext|>`, is never matched inside a text. At most 100 MB of text is used.

    Raises InputError if the texts are too few for `vocab_size` pieces.
    """
    import sentencepiece

    model = Path(f"{model_prefix}.model")
    model.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_name(model)
    try:
        with partial.open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_limited(texts),
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
                max_sentence_length=TRAINING_TEXT_BYTES,  # longer ones would be skipped silently
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


def _limited(texts: Iterable[str]) -> Iterator[str]:
    left = TRAINING_TEXT_BYTES
    for text in texts:
        left -= len(text.encode())
        if left < 0:
            return
        yield text
