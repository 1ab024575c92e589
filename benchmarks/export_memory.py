"""Peak memory and speed of an export, on a random checkpoint of any size.

    python benchmarks/export_memory.py --parameters 2e9 [--json]

Makes a sharded bf16 Llama checkpoint (random pages, then holes where the disk is short: --sparse), exports
it in a child process, and prints the child's peak RSS above that of its imports, the time, and the time of
`cp` over the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS = 2048, 8192, 32000, 16, 4
SHARD_BYTES = 4 << 30

CHILD = """
import json, resource, sys, time
from pathlib import Path
import enginebay.export.exporter as exporter
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
imports, started = peak(), time.perf_counter()
report = exporter.export_model(Path(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({"parameters": report.parameters, "weight_bytes": report.weight_bytes, "imports_mb": imports,
                  "peak_rss_mb": peak(), "export_s": time.perf_counter() - started}))
"""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        result |= {
            at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            at + "self_attn.k_proj.weight": (kv, HIDDEN),
            at + "self_attn.v_proj.weight": (kv, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            at + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            at + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return result | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def make_checkpoint(folder: Path, parameters: float, sparse: bool, noise: bytes | None = None) -> None:
    """Shards of about 4 GiB; `sparse` leaves all but the first MiB of each tensor as holes.

    `noise` is repeated through every tensor; None: random bytes, which are not all finite numbers.
    """
    fixed = sum(elements(shape) for shape in shapes(0).values())
    per_layer = sum(elements(shape) for shape in shapes(1).values()) - fixed
    layers = max(1, round((parameters - fixed) / per_layer))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(layers).items():
        if sum(2 * elements(one) for one in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    weight_map = {}
    noise = noise or os.urandom(1 << 20)
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file_name)
        header, offset = {}, 0
        for name, shape in shard.items():
            size = 2 * elements(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        encoded = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            start = file.tell()
            file.truncate(start + offset)
            for entry in header.values():
                begin, end = entry["data_offsets"]  # type: ignore[misc]
                file.seek(start + begin)
                for place in range(begin, end, len(noise)):  # type: ignore[has-type]
                    file.write(noise[: end - place])  # type: ignore[has-type]
                    if sparse:
                        break
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=2e9)
    parser.add_argument("--sparse", action="store_true", help="leave holes in the checkpoint (short disks)")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="export-memory-", dir=options.folder))
    try:
        (work / "model").mkdir()
        make_checkpoint(work / "model", options.parameters, options.sparse)
        os.sync()
        started = time.perf_counter()
        subprocess.run(["cp", "--sparse=never", "-r", work / "model", work / "copy"], check=True)
        os.sync()
        copied = time.perf_counter() - started
        shutil.rmtree(work / "copy")
        os.sync()
        started = time.perf_counter()
        command = [sys.executable, "-c", CHILD, work / "model", work / "exported"]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        os.sync()
        row["synced_s"] = time.perf_counter() - started
        row["cp_synced_s"] = copied
        row["above_imports_mb"] = row["peak_rss_mb"] - row["imports_mb"]
    finally:
        shutil.rmtree(work)
    if options.json:
        print(json.dumps(row))
    else:
        print(
            f"{row['parameters'] / 1e9:.2f} billion parameters, {row['weight_bytes'] / 1e9:.2f} GB of weights"
        )
        print(f"peak RSS {row['peak_rss_mb']:.0f} MB, {row['above_imports_mb']:.0f} MB above the imports")
        print(f"export {row['synced_s']:.1f} s, cp {row['cp_synced_s']:.1f} s (both with sync)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
