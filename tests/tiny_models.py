"""Random models of a few thousand weights, saved as folders that transformers loads, with a word tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedTokenizerFast

from nibblekv.evaluation import load_text

WORDS = 400


def save_tiny_model(folder: Path, sliding_window: int = 0) -> Path:
    """Save a decoder with 2 layers, 4 query and 2 KV heads of 32, and a tokenizer of whole words."""
    counts = Counter(re.findall(r"\w+", load_text("austen") + load_text("bible")))
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", *(w for w, _ in counts.most_common(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>").save_pretrained(folder)
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        # Wide enough that attention is peaked: a random model with small weights hardly reads its keys.
        "initializer_range": 0.2,
    }
    config = MistralConfig(**settings, sliding_window=sliding_window) if sliding_window else LlamaConfig(**settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder
