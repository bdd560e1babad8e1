"""The transformer ranker: a Hugging Face encoder or small decoder with one scalar output.

A directory holds a sequence-classification checkpoint with ``num_labels = 1`` (``config.json``,
``model.safetensors``, tokenizer files: what predictors on the hub look like too) and ``ranker.json`` with the
length map and the record of its training; ``words.safetensors`` is the embedded ranker beside it.  torch and
transformers are imported when a ranker is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import FourfoldError
from fourfold.files import write_json
from fourfold.rank.base import Ranker
from fourfold.rank.lengthmap import LEVELS, LengthMap
from fourfold.rank.ngram import NgramRanker

if TYPE_CHECKING:
    import torch

F64 = NDArray[np.float64]
KIND = "fourfold-transformer-ranker"
CARD = "ranker.json"
WORDS = "words.safetensors"
_FIX = "name a directory written by `fourfold ranker train --model`, or leave --ranker out"


def truncate(ids: list[int], limit: int) -> list[int]:
    """Three quarters of ``limit`` tokens from the beginning, one quarter from the end."""
    if len(ids) <= limit:
        return ids
    tail = limit // 4
    return ids[: limit - tail] + ids[len(ids) - tail :]


class Encoder:
    """Tokenizer and model: prompts in, one float32 each out.  Shared by the ranker and its training."""

    def __init__(self, folder: Path, *, device: str, max_tokens: int = 256, dtype: str = "float32") -> None:
        """Load ``folder``; a checkpoint without a scalar head gets a new one.

        Raises:
            FourfoldError: if it cannot be loaded as a safetensors checkpoint of a known architecture.
        """
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as error:
            raise FourfoldError(
                "the transformer ranker needs torch and transformers",
                why=str(error),
                fix="pip install torch transformers, or use the embedded ranker",
            ) from None
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, local_files_only=True, use_safetensors=True, dtype=getattr(torch, dtype)
            )
        except Exception as error:  # transformers raises a dozen kinds for a damaged directory
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FourfoldError(f"the ranker in {folder} cannot be loaded", why=reason, fix=_FIX) from None
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token
        if self.tokenizer.pad_token_id is None:
            raise FourfoldError(f"the tokenizer in {folder} has no token to pad with", fix=_FIX)
        # decoders read the score off the last token that is not padding, found by this id
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.to(device)
        self.device, self.max_tokens = device, max_tokens

    def tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, truncated, never empty."""
        # characters far beyond the limit need no tokenizer
        keep = 16 * self.max_tokens
        texts = [p if len(p) <= 2 * keep else p[:keep] + p[-keep:] for p in prompts]
        rows = self.tokenizer(texts)["input_ids"] if texts else []
        pad = self.tokenizer.pad_token_id
        return [truncate(list(row), self.max_tokens) or [pad] for row in rows]

    def forward(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """float32 [len(rows)] scores of one padded batch, on the model's device, with gradients if enabled."""
        import torch

        width = max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        out = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device))
        scores: torch.Tensor = out.logits[:, 0].float()
        return scores

    def scores(self, rows: Sequence[list[int]], batch: int = 64) -> F64:
        """float64 [len(rows)], without gradients, batched by length."""
        import torch

        self.model.eval()
        scores = np.empty(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        with torch.inference_mode():
            for begin in range(0, len(order), batch):
                part = order[begin : begin + batch]
                scores[part] = self.forward([rows[i] for i in part]).cpu().numpy()
        return scores


class TransformerRanker(Ranker):
    """Scores prompts with an ``Encoder``, and adds ``weight`` times the score of an embedded ranker, ``words``.

    The two make different mistakes: on Qwen2.5-Coder's answers tau 0.383 and 0.376 make 0.426 together.
    """

    name = "transformer"

    def __init__(
        self,
        encoder: Encoder,
        lengths: LengthMap,
        metadata: dict[str, str],
        words: NgramRanker | None = None,
        weight: float = 0.0,
    ) -> None:
        self.encoder, self.lengths, self.metadata = encoder, lengths, metadata
        self.words, self.weight = words, weight

    def score(self, prompts: Sequence[str]) -> F64:
        scores = self.encoder.scores(self.encoder.tokens(prompts))
        return scores if self.words is None else scores + self.weight * self.words.score(prompts)

    def save(self, folder: Path) -> Path:
        """Write checkpoint, tokenizer and card; the card comes last, so a directory with one is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        self.encoder.model.save_pretrained(folder)
        self.encoder.tokenizer.save_pretrained(folder)
        if self.words is not None:
            self.words.save(folder / WORDS)
        card = {
            "kind": KIND,
            "words_weight": self.weight,
            "max_tokens": self.encoder.max_tokens,
            "length_levels": LEVELS.tolist(),
            "length_edges": self.lengths.edges.tolist(),
            "length_quantiles": self.lengths.quantiles.tolist(),
            "length_means": self.lengths.means.tolist(),
            "metadata": self.metadata,
        }
        write_json(folder / CARD, card)
        return folder

    @classmethod
    def load(cls, folder: Path, *, device: str = "cpu") -> TransformerRanker:
        """Read a ranker directory.

        Raises:
            FourfoldError: for one that is missing, damaged, of another kind, or has no length map.
        """
        card_file = folder / CARD
        if not folder.is_dir():
            raise FourfoldError(f"there is no ranker directory {folder}", fix=_FIX)
        if not card_file.is_file():
            raise FourfoldError(
                f"the ranker in {folder} has no {CARD}",
                why="admission needs to know which score means how many tokens",
                fix="calibrate it: `fourfold ranker train --model DIR --epochs 0 --output NEW`",
            )
        try:
            card = json.loads(card_file.read_text(encoding="utf-8"))
            if card["kind"] != KIND or card["length_levels"] != LEVELS.tolist():
                raise ValueError("it is of another kind or version")
            tables = [np.array(card[f"length_{part}"], dtype=np.float64) for part in ("edges", "quantiles", "means")]
            lengths = LengthMap(*tables)
            max_tokens = int(card["max_tokens"])
            weight = float(card.get("words_weight", 0.0))
            if not np.isfinite(weight):
                raise ValueError("the weight of its words is no number")
            metadata = {str(key): str(value) for key, value in card["metadata"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, FourfoldError) as error:
            raise FourfoldError(f"{card_file} cannot be used", why=str(error), fix=_FIX) from None
        words = NgramRanker.load(folder / WORDS) if weight else None
        return cls(Encoder(folder, device=device, max_tokens=max_tokens), lengths, metadata, words, weight)
