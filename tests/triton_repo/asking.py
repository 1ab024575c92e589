"""Raw clients: every tensor, flag and byte as it goes over the wire."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.runtime.request import SamplingParams
from enginebay.triton_repo.server import TritonServer


@dataclass
class Response:
    """One gRPC response; `error` instead of outputs where it failed."""

    outputs: dict[str, np.ndarray]
    final: bool
    error: str | None = None

    @property
    def text(self) -> str:
        return self.outputs["text_output"][0].decode()


def tensor(name: str, kind: str, value: Any, shape: list[int] | None = None) -> triton.InferInput:
    dtypes = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}
    array = np.array(value if isinstance(value, list) else [value], dtypes[kind])
    shaped = array.reshape(shape) if shape else array
    return triton.InferInput(name, list(shaped.shape), kind).set_data_from_numpy(shaped)


def prompt_tensors(
    prompt: str, parameters: dict[str, Any] | None = None, **flags: bool
) -> list[triton.InferInput]:
    inputs = [tensor("text_input", "BYTES", prompt.encode())]
    if parameters is not None:
        inputs.append(tensor("sampling_parameters", "BYTES", json.dumps(parameters).encode()))
    return inputs + [tensor(name, "BOOL", value) for name, value in flags.items()]


class Stream:
    """A gRPC stream with one request on it."""

    def __init__(
        self, server: TritonServer, inputs: list[triton.InferInput], *, model: str = "llm", **options: Any
    ) -> None:
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.client = triton.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self._responses.put((result, error)))
        self.client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def next(self, timeout: float = 30) -> Response:
        result, error = self._responses.get(timeout=timeout)
        if error is not None:
            return Response({}, True, error.message())
        message = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in message.outputs}
        return Response(outputs, message.parameters["triton_final_response"].bool_param)

    def all(self, timeout: float = 60) -> list[Response]:
        """Up to the final response, and whatever comes in a moment after it."""
        responses = [self.next(timeout)]
        while not responses[-1].final:
            responses.append(self.next(timeout))
        try:
            while True:
                responses.append(self.next(0.3))
        except queue.Empty:
            return responses

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def grpc(server: TritonServer, inputs: list[triton.InferInput], **options: Any) -> list[Response]:
    stream = Stream(server, inputs, **options)
    try:
        return stream.all()
    finally:
        stream.cancel()


def post(server: TritonServer, endpoint: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and body of POST /v2/models/llm/<endpoint>."""
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/llm/{endpoint}", json.dumps(body).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server: TritonServer, prompt: str, **fields: Any) -> dict[str, Any]:
    status, body = post(server, "generate", {"text_input": prompt, **fields})
    assert status == 200, body
    return json.loads(body)


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[5:]) for line in body.splitlines() if line.startswith("data:")]


def metrics(server: TritonServer) -> dict[str, float]:
    """Ours: name, with the outcome in brackets where there is one."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("enginebay_"):
            series, value = line.rsplit(" ", 1)
            name, labels = series.split("{", 1)
            outcome = labels.partition('outcome="')[2].partition('"')[0]
            found[f"{name}[{outcome}]" if outcome else name] = float(value)
    return found


def eventually(condition: Callable[[], bool], timeout: float = 10) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def idle(server: TritonServer) -> bool:
    """Nothing runs, nothing waits, no block is held."""
    now = metrics(server)
    gauges = ("enginebay_requests_running", "enginebay_requests_waiting", "enginebay_cache_blocks_used")
    return all(now[name] == 0 for name in gauges)


def expected(oracle: LLM, prompt: str, max_tokens: int, **sampling: Any) -> str:
    """The engine's own answer to a raw prompt."""
    assert oracle.tokenizer is not None
    ids = oracle.tokenizer.encode(prompt)
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return "".join(output.text for output in oracle.generate(ids, params))
