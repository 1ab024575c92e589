"""The tensors of the model `llm`: what a request says and what a response holds (vLLM backend's names)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from enginebay.triton_repo.backend.parameters import parse_parameters
from enginebay.triton_repo.runtime.admission import check_sampling
from enginebay.triton_repo.runtime.request import Output, Request, RequestError, TokenLogprob
from enginebay.triton_repo.runtime.text import TextTokenizer

MAX_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Wanted:
    """What the client wants back, and the text to put before the answer."""

    stream: bool
    prefix: str
    finish_reason: bool
    cumulative_logprob: bool
    logprobs: int | None  # alternatives of each token; None: no logprobs
    num_input_tokens: bool
    num_output_tokens: bool
    prompt_tokens: int


def parse_request(
    triton_request: Any, pb_utils: Any, id: str, tokenizer: TextTokenizer
) -> tuple[Request, Wanted]:
    """A Triton request as the runtime's. RequestError names the tensor or parameter that is wrong."""

    def tensor(name: str) -> Any:
        found = pb_utils.get_input_tensor_by_name(triton_request, name)
        return None if found is None else found.as_numpy().reshape(-1)[0]

    def flag(name: str) -> bool:
        return bool(tensor(name))

    raw = tensor("text_input")
    if raw is None:
        raise RequestError("text_input: missing; it is the prompt")
    text = _decode(raw)
    stream = flag("stream")
    exclude = tensor("exclude_input_in_output")
    echo = not stream if exclude is None else not exclude
    if echo and stream:
        raise RequestError("exclude_input_in_output: false is not allowed when streaming")
    parameters = parse_parameters(tensor("sampling_parameters"), triton_request.parameters())
    prompt_ids = (
        tokenizer.chat([{"role": "user", "content": text}]) if parameters.chat else tokenizer.encode(text)
    )
    sampling = parameters.sampling
    check_sampling(sampling)
    logprobs = (sampling.logprobs or 0) if flag("return_logprobs") else None
    wanted = Wanted(
        stream=stream,
        prefix=text if echo else "",
        finish_reason=flag("return_finish_reason"),
        cumulative_logprob=flag("return_cumulative_logprob"),
        logprobs=logprobs,
        num_input_tokens=flag("return_num_input_tokens"),
        num_output_tokens=flag("return_num_output_tokens"),
        prompt_tokens=len(prompt_ids),
    )
    if logprobs is not None:
        sampling = replace(
            sampling, logprobs=max(logprobs, 1)
        )  # the best one tells whether the choice was it
    elif wanted.cumulative_logprob:
        sampling = replace(sampling, logprobs=0)
    else:
        sampling = replace(sampling, logprobs=None)
    request = Request(id, prompt_ids, sampling, priority=parameters.priority, salt=parameters.salt)
    return request, wanted


def response_tensors(
    outputs: Sequence[Output], wanted: Wanted, cumulative: float, tokenizer: TextTokenizer, *, first: bool
) -> list[tuple[str, Any]]:
    """Names and arrays of one response to the outputs of one or several steps, in order."""
    text = outputs[0].text if len(outputs) == 1 else "".join(output.text for output in outputs)
    if first and wanted.prefix:
        text = wanted.prefix + text
    tensors: list[tuple[str, Any]] = [("text_output", _strings(text.encode()))]
    if wanted.finish_reason:
        # "None" while the answer goes on is what this surface's clients know.
        tensors.append(("finish_reason", _strings(str(outputs[-1].finish_reason).encode())))
    if wanted.cumulative_logprob:
        tensors.append(("cumulative_logprob", np.array([cumulative], np.float32)))
    if wanted.logprobs is not None:
        entries = [
            _describe(entry, wanted.logprobs, tokenizer) for output in outputs for entry in output.logprobs
        ]
        tensors.append(("logprobs", _strings(json.dumps(entries).encode())))
    if wanted.num_input_tokens:
        tensors.append(("num_input_tokens", np.array([wanted.prompt_tokens], np.uint32)))
    if wanted.num_output_tokens:
        count = sum(len(output.token_ids) for output in outputs)
        tensors.append(("num_output_tokens", np.array([count], np.uint32)))
    return tensors


def _decode(raw: bytes) -> str:
    if len(raw) > MAX_TEXT_BYTES:
        raise RequestError(f"text_input: {len(raw)} bytes; at most {MAX_TEXT_BYTES} are read")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"text_input: byte {error.start} is not valid UTF-8") from error


def _strings(value: bytes) -> Any:
    array = np.empty(1, np.object_)
    array[0] = value
    return array


def _describe(entry: TokenLogprob, alternatives: int, tokenizer: TextTokenizer) -> dict[int, dict[str, Any]]:
    """Token id to its logprob, rank (null where it is beyond the alternatives looked at) and text."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    shown = dict(entry.top[:alternatives])
    shown[entry.token_id] = entry.logprob
    return {
        token: {
            "logprob": value if np.isfinite(value) else None,  # JSON has no infinity
            "rank": ranks.get(token),
            "decoded_token": tokenizer.decode([token], skip_special_tokens=False),
        }
        for token, value in shown.items()
    }
