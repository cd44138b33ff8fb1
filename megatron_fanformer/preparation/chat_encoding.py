"""From blocks of conversations to token buffers and the masks of what is learned.

Worker processes import this module: see `encoding`.
"""

from typing import NamedTuple

import numpy as np

from megatron_fanformer.data.chat_template import ChatTemplate, RenderedChat, TemplateRefusal, chat_pieces
from megatron_fanformer.data.manifest import ChatSettings
from megatron_fanformer.preparation.chats import Chat, ChatParser
from megatron_fanformer.preparation.document_files import Block
from megatron_fanformer.preparation.encoding import CheckedEncoder, EncodedBlock, Learned
from megatron_fanformer.preparation.id_encoders import EncoderChoice

TOO_MANY_TOKENS = "longer than max_tokens"
NOTHING_LEARNED = "nothing to learn"
NOTHING_LEARNED_BEFORE_CUT = "nothing to learn within max_tokens"


class _Encoded(NamedTuple):
    """One conversation."""

    line: int
    chat: Chat
    text_bytes: int
    ids: np.ndarray
    mask: np.ndarray
    learned: int
    is_cut: bool


class ChatEncoder:
    """Parses, renders and tokenizes blocks of conversations."""

    def __init__(self, choice: EncoderChoice, settings: ChatSettings, dtype: str) -> None:
        self._parser = ChatParser()
        self._template = ChatTemplate(settings.template, settings.template_variables)
        self._tokenizer = choice.exact()
        self._encoder = CheckedEncoder(choice)
        self._settings = settings
        self._dtype = np.dtype(dtype)

    def encode(self, number: int, block: Block) -> EncodedBlock:
        """See FileBlockEncoder."""
        parsed = block.parse(self._parser)
        refusals = list(parsed.refusals)
        rendered: list[tuple[int, Chat, RenderedChat]] = []
        for line, chat in zip(parsed.numbers, parsed.documents, strict=True):
            try:
                rendered.append((line, chat, self._rendered(chat)))
            except TemplateRefusal as refusal:
                refusals.append((line, refusal.reason))
        kept: list[_Encoded] = []
        for (line, chat, text), (ids, mask) in zip(rendered, self._ids_and_masks(number, rendered), strict=True):
            outcome = self._fitted(ids, mask)
            if isinstance(outcome, str):
                refusals.append((line, outcome))
            else:
                kept.append(_Encoded(line, chat, len(text.text.encode()), *outcome))
        return self._block(parsed.lines, kept, sorted(refusals))

    def _rendered(self, chat: Chat) -> RenderedChat:
        rendered = self._template.render(chat.messages)
        return rendered if self._settings.learn == "all" else rendered._replace(learned=rendered.learned[-1:])

    def _ids_and_masks(
        self, number: int, rendered: list[tuple[int, Chat, RenderedChat]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and mask of each conversation; all texts of the block are encoded together."""
        cut = [list(chat_pieces(self._tokenizer, text)) for _, _, text in rendered]
        texts = [piece.encode() for pieces in cut for piece, _ in pieces if isinstance(piece, str)]
        name = f"conversation {rendered[0][1].id!r}" if rendered else ""
        ids, counts = self._encoder.encode(number, texts, name)
        encoded = iter(np.split(ids, np.cumsum(counts)[:-1]) if texts else [])
        found = []
        for pieces in cut:
            parts = [next(encoded) if isinstance(piece, str) else np.array([piece]) for piece, _ in pieces]
            learned = [np.full(len(part), flag, np.uint8) for part, (_, flag) in zip(parts, pieces, strict=True)]
            found.append(
                (
                    np.concatenate([np.empty(0, self._dtype), *parts]).astype(self._dtype),
                    np.concatenate([np.empty(0, np.uint8), *learned]),
                )
            )
        return found

    def _fitted(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, bool] | str:
        """A conversation at its length (ids, mask, learned tokens, whether it was cut), or why it is refused."""
        settings = self._settings
        is_cut = settings.max_tokens is not None and len(ids) > settings.max_tokens
        if is_cut and settings.too_long == "drop":
            return TOO_MANY_TOKENS
        ids, mask = ids[: settings.max_tokens], mask[: settings.max_tokens]
        learned = int(mask.sum())
        if not learned:
            return NOTHING_LEARNED_BEFORE_CUT if is_cut else NOTHING_LEARNED
        if settings.pad_id is not None and settings.max_tokens is not None:
            padding = settings.max_tokens - len(ids)
            ids = np.pad(ids, (0, padding), constant_values=settings.pad_id)
            mask = np.pad(mask, (0, padding))
        return ids, mask, learned, is_cut

    def _block(self, lines: int, kept: list[_Encoded], refusals: list[tuple[int, str]]) -> EncodedBlock:
        return EncodedBlock(
            lines=lines,
            tokens=np.concatenate([np.empty(0, self._dtype), *(one.ids for one in kept)]),
            lengths=np.array([len(one.ids) for one in kept], np.int32),
            numbers=[one.line for one in kept],
            ids=[one.chat.id for one in kept],
            sources=[one.chat.source for one in kept],
            text_bytes=sum(one.text_bytes for one in kept),
            refusals=refusals,
            learned=Learned(
                mask=np.concatenate([np.empty(0, np.uint8), *(one.mask for one in kept)]),
                counts=np.array([one.learned for one in kept], np.int32),
                is_cut=np.array([one.is_cut for one in kept], bool),
            ),
        )
