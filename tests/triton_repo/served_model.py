"""A tiny random Llama that reads and writes bytes, as an engine folder fit for serving."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tiny_llama import TinyLlama, random_weight
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.quant.rtn import WEIGHT_MAX
from enginebay.export.exporter import export_model
from enginebay.triton_repo.backend.settings import ServingSettings

POSITIONS = 8192
SETTINGS = ServingSettings(threads=1, num_blocks=4096)
EOS = 1
POISON = "<poison>"  # a prompt that ends in this token has infinite logits
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken(POISON)])
    return made


def build(folder: Path, seed: int = 0) -> Path:
    """An fp32 engine under `folder`: at most 16 sequences, 128 tokens of a step."""
    rng = np.random.default_rng(seed)
    text = tokenizer()
    vocab = text.get_vocab_size(with_added_tokens=True)
    model = TinyLlama(64, 96, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=vocab, positions=POSITIONS)
    embedding = rng.standard_normal((vocab, model.hidden)).astype(np.float32)
    head = 4 * random_weight(rng, vocab, model.hidden)
    # Only the poison's embedding reaches the last dimension, where one row of the head overflows on it.
    embedding[:, -1] = 0
    embedding[text.token_to_id(POISON), -1] = 100
    head[:, -1] = 0
    head[text.token_to_id(POISON)] = 0  # so it is never the answer
    head[EOS, -1] = 0.9 * WEIGHT_MAX  # times some 8, as the norm makes of the 100
    ones = np.ones(model.hidden, np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in model.projections():
            weight = tensors[f"{at}.{name}.weight"] = random_weight(rng, rows, columns)
            if name.endswith(("o_proj", "down_proj")):
                weight[-1] = 0
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = ones
    source = model.save(folder / "checkpoint", tensors, eos=EOS)
    text.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    export_model(source, folder / "exported")
    build_engine(
        folder / "exported", folder / "engine", BuildConfig(quant="fp32", max_batch=16, max_step_tokens=128)
    )
    return folder / "engine"
