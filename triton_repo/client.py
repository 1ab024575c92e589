"""Asks a served model, over gRPC streaming or HTTP `generate_stream`, and measures what a client sees."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

_EXTRAS = ("return_finish_reason", "return_num_output_tokens")


class ClientError(RuntimeError):
    """The server refused the request, failed at it or could not be reached; the message is its own."""


@dataclass(frozen=True)
class Piece:
    """One response of a stream."""

    text: str
    tokens: int  # generated since the last piece
    finish_reason: str | None  # of the last piece alone


class Answer:
    """Iterate over it once for the pieces of text as they come; the measurements are complete after that.

    Closing it early (`close`, or leaving its `with`) cancels the request.
    """

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._first_tokens = 0
        self.text = ""
        self.tokens = 0
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self._last = time.perf_counter()
            if self._first is None:
                self._first, self._first_tokens = self._last, piece.tokens
            self.text += piece.text
            self.tokens += piece.tokens
            self.finish_reason = piece.finish_reason
            yield piece.text

    @property
    def first_token_seconds(self) -> float | None:
        """From the request to its first response."""
        return None if self._first is None else self._first - self._began

    @property
    def tokens_per_second(self) -> float | None:
        """After the first response, so without the prompt; None where that is too short to tell."""
        if self._first is None or self._last <= self._first:
            return None
        return (self.tokens - self._first_tokens) / (self._last - self._first)

    def close(self) -> None:
        close: Callable[[], None] | None = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generate_grpc(
    url: str,
    prompt: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    chat: bool = False,
    model: str = "llm",
    timeout: float = 120.0,
) -> Answer:
    """Asks over gRPC. `url` is host:port. `parameters` are those of `sampling_parameters`.

    `chat` sends the prompt through the model's chat template. `timeout`: seconds between two responses.
    ClientError while iterating.
    """
    return Answer(_grpc_pieces(url, prompt, _all(parameters, chat), model, timeout))


def generate_http(
    url: str,
    prompt: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    chat: bool = False,
    model: str = "llm",
    timeout: float = 120.0,
) -> Answer:
    """As `generate_grpc`, over HTTP. `url` is http://host:port."""
    return Answer(_http_pieces(url, prompt, _all(parameters, chat), model, timeout))


def _all(parameters: Mapping[str, Any] | None, chat: bool) -> dict[str, Any]:
    return {**(parameters or {}), **({"apply_chat_template": True} if chat else {})}


def _grpc_pieces(
    url: str, prompt: str, parameters: dict[str, Any], model: str, timeout: float
) -> Iterator[Piece]:
    import tritonclient.grpc as triton  # type: ignore[import-untyped]

    responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(url)
    try:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(
            model, _inputs(triton, prompt, parameters), enable_empty_final_response=True
        )
        while True:
            result, error = responses.get(timeout=timeout)
            if error is not None:
                raise ClientError(error.message() or str(error))
            final = result.get_response().parameters["triton_final_response"].bool_param
            text = result.as_numpy("text_output")
            if text is not None:
                yield Piece(
                    text=text[0].decode(),
                    tokens=int(result.as_numpy("num_output_tokens")[0]),
                    finish_reason=_reason(result.as_numpy("finish_reason")[0].decode()),
                )
            if final:
                return
    except queue.Empty:
        raise ClientError(f"{url}: no response for {timeout:g} s") from None
    except triton.InferenceServerException as error:
        raise ClientError(f"{url}: {error.message() or error}") from error
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def _inputs(triton: Any, prompt: str, parameters: dict[str, Any]) -> list[Any]:
    def tensor(name: str, kind: str, value: Any) -> Any:
        array = np.array([value], np.object_ if kind == "BYTES" else np.bool_)
        return triton.InferInput(name, [1], kind).set_data_from_numpy(array)

    return [
        tensor("text_input", "BYTES", prompt.encode()),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps(parameters).encode()),
        *(tensor(name, "BOOL", True) for name in _EXTRAS),
    ]


def _http_pieces(
    url: str, prompt: str, parameters: dict[str, Any], model: str, timeout: float
) -> Iterator[Piece]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ClientError(f"{url}: not a URL of the form http://host:port")
    body = {
        "text_input": prompt,
        "stream": True,
        "sampling_parameters": json.dumps(parameters),
        **dict.fromkeys(_EXTRAS, True),
    }
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ClientError(_error_text(answer.read()))
        with answer:  # it keeps the socket open as long as it lives
            for event in _events(answer):
                if "error" in event:
                    raise ClientError(event["error"])
                yield Piece(
                    text=event["text_output"],
                    tokens=event["num_output_tokens"],
                    finish_reason=_reason(event["finish_reason"]),
                )
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(f"{url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line of a server-sent event stream."""
    while line := answer.readline():
        if line.startswith(b"data:"):
            event = json.loads(line[5:])
            if not isinstance(event, dict):
                raise ClientError(f"the server sent {event!r} instead of a response")
            yield event


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def _reason(text: str) -> str | None:
    return None if text == "None" else text
