"""From a request's token ids to the text that a ranker was trained on: the last thing that the user said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD_TOKENS, TAIL_TOKENS = 192, 96
"""Tokens decoded from both ends of a long message; rankers read 512 bytes from its beginning and 256 from its end."""
_QUESTION, _ANSWER, _AGAIN = "Which colour is it?", "It is green.", "And which shape?"


class PromptText:
    """Decodes the last user message of a prompt.

    The scheduler sees a prompt after the chat template: a system prompt, earlier turns, role names.  Rankers are
    trained on user turns alone, so the message is cut out again: the template is rendered once with known words
    to see which tokens stand before a user's message and after it.  A prompt without them (``/v1/completions``, a
    template whose marks are no special tokens of their own) is decoded as it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.before, self.after = _markers(tokenizer)

    def message(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids of the last user message, or all of them where no mark is found."""
        start = _last(ids, self.before)
        if start < 0:
            return ids
        start += len(self.before)
        rest = ids[start:]
        if self.after is not None and self.after in rest:
            rest = rest[: rest.index(self.after)]
        return rest or ids

    def __call__(self, ids: Sequence[int]) -> str:
        """The message; of a long one both ends, with as many spaces between them as characters were left out."""
        ids = self.message(ids)
        if len(ids) <= HEAD_TOKENS + TAIL_TOKENS:
            return self._decode(ids)
        head, tail = self._decode(ids[:HEAD_TOKENS]), self._decode(ids[-TAIL_TOKENS:])
        characters = (len(head) + len(tail)) * len(ids) // (HEAD_TOKENS + TAIL_TOKENS)
        return head + " " * (characters - len(head) - len(tail)) + tail

    def whole(self, ids: Sequence[int]) -> str:
        """The whole message."""
        return self._decode(self.message(ids))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _last(ids: Sequence[int], wanted: list[int]) -> int:
    """Where ``wanted`` begins for the last time in ``ids``; -1 if it is not there or empty."""
    if not wanted:
        return -1
    backwards, end = list(ids[::-1]), wanted[-1]
    at = -1
    try:
        while True:
            at = backwards.index(end, at + 1)
            start = len(ids) - at - len(wanted)
            if start >= 0 and list(ids[start : start + len(wanted)]) == wanted:
                return start
    except ValueError:
        return -1


def _markers(tokenizer: Any) -> tuple[list[int], int | None]:
    """Tokens before a user's message, and the special token that ends it; ([], None) without a usable template."""
    try:
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        user, assistant = ({"role": role} for role in ("user", "assistant"))

        def render(*messages: dict[str, str]) -> str:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

        first = render({**user, "content": _QUESTION})
        both = render({**user, "content": _QUESTION}, {**assistant, "content": _ANSWER}, {**user, "content": _AGAIN})
        head, _, tail = first.partition(_QUESTION)
        between = both.partition(_ANSWER)[2].partition(_AGAIN)[0]
        # what stands before the first and before a later message alike, without what ends the turn before it
        shared = _common_end(head, between).rstrip()
        before = [int(i) for i in tokenizer.encode(shared, add_special_tokens=False)]
        after = [int(i) for i in tokenizer.encode(tail.lstrip(), add_special_tokens=False)]
    except Exception:  # a tokenizer without a chat template, or one of another kind: text is then used as it is
        return [], None
    return _opening(before, special), next(iter(after[:1]), None) if after and after[0] in special else None


def _common_end(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]


def _opening(ids: list[int], special: set[int]) -> list[int]:
    """The last special token of ``ids`` that opens something: with the words (the role's name) that follow it."""
    words = [i for i, token in enumerate(ids) if token not in special]
    if not words:
        return ids[-1:]
    start = words[-1]
    while start > 0 and ids[start - 1] not in special:
        start -= 1
    return ids[max(0, start - 1) :]
