"""Shared fixtures: a private cache folder, so that tests neither read nor leave calibrations of the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# One folder for the whole run: the C++ kernels are compiled once, not once per test.
_CACHE = Path(tempfile.gettempdir()) / f"fourfold-tests-{os.getuid()}"
os.environ.setdefault("FOURFOLD_CACHE_DIR", str(_CACHE))

# Triton decides at its first import, by whoever comes first, whether its own library runs interpreted.
if os.environ.get("FOURFOLD_EXPECT_GPU") != "1" and not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Llama (head size 64, 4 query and 2 KV heads) and a tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(
        ["the river rises and the river falls and every boat waits for the lock to fill"] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
