"""transformers, fp32 eager with its dynamic cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import arguments, measure
from transformers import AutoModelForCausalLM


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def steps(batch: int) -> Iterator[None]:
        ids = torch.randint(100, 40000, (batch, args.prompt))
        cache = None
        for _ in range(args.new):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            yield

    measure("transformers fp32", args, steps, repeats=1)


if __name__ == "__main__":
    main()
