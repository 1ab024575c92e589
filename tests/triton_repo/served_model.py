"""A tiny random Llama that reads and writes bytes, as an engine folder fit for serving."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.quant.rtn import WEIGHT_MAX
from enginebay.export.exporter import export_model
from enginebay.triton_repo.backend.settings import ServingSettings

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
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

    def weight(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    text = tokenizer()
    vocab = text.get_vocab_size(with_added_tokens=True)
    embedding = rng.standard_normal((vocab, HIDDEN)).astype(np.float32)
    head = 4 * weight(vocab, HIDDEN)
    # Only the poison's embedding reaches the last dimension, where one row of the head overflows on it.
    embedding[:, -1] = 0
    embedding[text.token_to_id(POISON), -1] = 100
    head[:, -1] = 0
    head[text.token_to_id(POISON)] = 0  # so it is never the answer
    head[EOS, -1] = 0.9 * WEIGHT_MAX  # times some 8, as the norm makes of the 100
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            tensors[f"{at}.{name}.weight"] = weight(rows, columns)
            if rows == HIDDEN and name.endswith(("o_proj", "down_proj")):
                tensors[f"{at}.{name}.weight"][-1] = 0
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    source = folder / "checkpoint"
    source.mkdir(parents=True)
    save_file(tensors, source / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": vocab,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    text.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    export_model(source, folder / "exported")
    build_engine(
        folder / "exported", folder / "engine", BuildConfig(quant="fp32", max_batch=16, max_step_tokens=128)
    )
    return folder / "engine"
