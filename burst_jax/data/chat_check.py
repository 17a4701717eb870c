"""One pass over all conversations before training: wrong lines, and how many tokens count."""

from __future__ import annotations

from typing import NamedTuple

from burst_jax.data.chats import ChatTokens, MissingTemplate
from burst_jax.data.chunks import Chunks
from burst_jax.data.corpus import Corpus
from burst_jax.errors import check_integer

# Wrong lines that a message has.
_SHOWN = 5


class ChatCounts(NamedTuple):
    """What :func:`check_chats` has counted.

    Attributes:
      conversations: number of conversations.
      sequences: number of their sequences: more than conversations if the chat template changes
        earlier messages.
      tokens: number of tokens of all sequences.
      counted: number of tokens that the assistant writes, which count in the loss.
      longest: tokens of the longest sequence.
    """

    conversations: int
    sequences: int
    tokens: int
    counted: int
    longest: int


def check_chats(
    corpus: Corpus, tokens: ChatTokens, *, seq_len: int, vocab_size: int | None = None
) -> ChatCounts:
    """Renders and encodes every conversation once, and names those that a loader could not read.

    Args:
      corpus: conversations, ``open_corpus(path, chats=True)``.
      tokens: their tokenizer.
      seq_len: tokens per sequence, as of :class:`burst_jax.data.Loader`.
      vocab_size: of the model; None is the tokenizer's.

    Raises:
      ValueError: for each of the first five wrong conversations its file and line, what is wrong
        and the remedy, a missing chat template only once, and the number of all. With
        ``too_long="error"`` that includes those that are longer than a sequence.
    """
    length = check_integer("seq_len", seq_len, 1) + 1
    if not corpus.reader.is_chats:
        raise ValueError(f"corpus is {corpus!r}: open it with open_corpus(path, chats=True)")
    vocabulary = tokens.vocab_size if vocab_size is None else vocab_size
    chunks = Chunks(corpus, tokens, vocabulary, length=length, stride=length)
    wrong: list[str] = []
    lacks_template = False
    sequences = total = counted = longest = count = 0
    for index in range(len(chunks)):
        try:
            found = chunks[index]
        except ValueError as error:
            count += 1
            repeated = lacks_template and isinstance(error, MissingTemplate)
            lacks_template |= isinstance(error, MissingTemplate)
            if len(wrong) < _SHOWN and not repeated:
                wrong.append(str(error))
            continue
        lengths = found["lengths"]
        sequences, total = sequences + len(lengths), total + int(lengths.sum())
        counted += int(found["weights"].sum())
        longest = max(longest, int(lengths.max()))
    if wrong:
        more = f"\nand {count - len(wrong)} more" if count > len(wrong) else ""
        raise ValueError(
            f"{count} of {len(chunks)} conversations cannot be used:\n" + "\n".join(wrong) + more
        )
    return ChatCounts(len(chunks), sequences, total, counted, longest)
