"""vLLM on the CPU, bf16, compiled as it is by default. Its engine is stepped in this process, greedy, without
prefix cache.

The first run compiles the model for a minute or two; what it compiled is kept in build/peers for the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from common import arguments, measure, prompts

CACHE_GIB = 1


def main() -> None:
    args = arguments()
    cache = Path("build/peers/vllm").resolve()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_USE_AOT_COMPILE": "0",  # 0.32 cannot load on the CPU what it saves so: it compiled anew
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a second process would share these cores
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    # Rounded up, so that other shapes find what was compiled; every prefill still fits one step.
    largest, length = max(16, *args.batch), max(2048, args.prompt + args.new)
    engine = LLM(
        model=str(args.model),
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=largest,
        max_num_batched_tokens=max(2048, largest * args.prompt),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    ).llm_engine
    sampling = SamplingParams(max_tokens=args.new, temperature=0, ignore_eos=True, detokenize=False)

    def start(batch: int) -> Iterator[None]:
        ids = prompts(args, batch).tolist()

        def steps() -> Iterator[None]:
            for index, row in enumerate(ids):
                engine.add_request(str(index), {"prompt_token_ids": row}, sampling)
            tokens = dict.fromkeys(map(str, range(batch)), 0)
            reached = 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens[output.request_id] = len(output.outputs[0].token_ids)
                while reached < min(tokens.values()):
                    reached += 1
                    yield

        return steps()

    measure("vllm bf16", args, start)


if __name__ == "__main__":
    main()
