"""transformers, fp32 eager with its dynamic cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import arguments, measure, prompts
from transformers import AutoModelForCausalLM


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def start(batch: int) -> Iterator[None]:
        ids = torch.from_numpy(prompts(args, batch)).long()
        cache = None
        for _ in range(args.new):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            yield

    measure("transformers fp32", args, start)


if __name__ == "__main__":
    main()
