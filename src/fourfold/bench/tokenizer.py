"""The tokenizer of a served model, for lengths and for the chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fourfold.errors import FourfoldError


def load_tokenizer(name: str) -> Any:
    """A fast Hugging Face tokenizer.

    Raises:
        FourfoldError: there is no tokenizer of that name here.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for one and the same lack
        raise FourfoldError(
            f"no tokenizer was found for {name}",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="pass the model's local directory with --tokenizer",
        ) from error


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to token ids, nothing added."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return encode


def renderer(tokenizer: Any) -> Callable[[str], str]:
    """A user's text to the prompt that the model sees: its chat template, or the bare text after the BOS token."""
    if getattr(tokenizer, "chat_template", None):

        def chat(text: str) -> str:
            turns = [{"role": "user", "content": text}]
            return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

        return chat
    start = tokenizer.bos_token if getattr(tokenizer, "add_bos_token", False) and tokenizer.bos_token else ""
    return lambda text: f"{start}{text}"
