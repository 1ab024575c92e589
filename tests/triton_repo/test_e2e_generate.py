"""The surface of model `llm` over the real server, with real clients."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from asking import Response, Stream, events, expected, generate, grpc, post, prompt_tensors, tensor
from served_model import POISON, POSITIONS

from enginebay.triton_repo.client import ClientError, generate_grpc, generate_http
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.server import TritonServer

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def test_generate_gives_one_response_that_repeats_the_prompt(server: TritonServer, oracle: LLM) -> None:
    answer = generate(server, "Once upon", sampling_parameters=json.dumps(GREEDY))
    assert answer["text_output"] == "Once upon" + expected(oracle, "Once upon", 24, ignore_eos=True)


@pytest.mark.parametrize("parameters", [GREEDY, {"temperature": 0.9, "seed": 7, "max_tokens": 24}])
def test_every_route_gives_the_engines_own_tokens(
    server: TritonServer, oracle: LLM, parameters: dict[str, Any]
) -> None:
    sampling = {key: value for key, value in parameters.items() if key != "max_tokens"}
    text = expected(oracle, "Tell me, é", 24, **sampling)
    body = {"sampling_parameters": json.dumps(parameters), "exclude_input_in_output": True}
    assert generate(server, "Tell me, é", **body)["text_output"] == text
    status, raw = post(server, "generate_stream", {"text_input": "Tell me, é", "stream": True, **body})
    assert status == 200
    assert "".join(event["text_output"] for event in events(raw)) == text
    inputs = prompt_tensors("Tell me, é", parameters, stream=True)
    assert "".join(response.text for response in grpc(server, inputs)) == text
    for ask, url in ((generate_grpc, server.grpc_url), (generate_http, server.http_url)):
        answer = ask(url, "Tell me, é", parameters)
        assert "".join(answer) == answer.text == text
        assert answer.finish_reason in ("stop", "length")
        assert answer.first_token_seconds is not None


def test_parameters_of_the_request_itself(server: TritonServer, oracle: LLM) -> None:
    text = expected(oracle, "Hello", 9, ignore_eos=True)
    body = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "exclude_input_in_output": True}
    assert generate(server, "Hello", **body)["text_output"] == text
    texts = {key: str(value).lower() for key, value in body.items() if key != "exclude_input_in_output"}
    responses = grpc(server, prompt_tensors("Hello", stream=True), parameters=texts)
    assert "".join(response.text for response in responses) == text


def test_one_response_without_stream_over_grpc(server: TritonServer, oracle: LLM) -> None:
    (response,) = grpc(server, prompt_tensors("Hi", GREEDY))
    assert response.final
    assert response.text == "Hi" + expected(oracle, "Hi", 24, ignore_eos=True)
    assert set(response.outputs) == {"text_output"}


def _extras(**wanted: bool) -> dict[str, bool]:
    names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    return {f"return_{name}": True for name in names} | wanted


@pytest.mark.parametrize("stream", [False, True])
def test_additional_outputs(server: TritonServer, stream: bool) -> None:
    inputs = prompt_tensors("Hello", {**GREEDY, "logprobs": 3}, stream=stream, **_extras())
    responses = grpc(server, inputs)
    assert (len(responses) > 1) == stream
    types = {"num_input_tokens": np.uint32, "num_output_tokens": np.uint32, "cumulative_logprob": np.float32}
    tokens, total, text = 0, 0.0, b""
    for response in responses:
        outputs = response.outputs
        assert all(outputs[name].dtype == dtype for name, dtype in types.items())
        assert all(array.shape == (1,) for array in outputs.values())
        assert outputs["num_input_tokens"][0] == 5
        entries = json.loads(outputs["logprobs"][0])
        assert len(entries) == outputs["num_output_tokens"][0]
        for entry in entries:
            assert sorted(value["rank"] for value in entry.values()) == [1, 2, 3]
            best = next(value for value in entry.values() if value["rank"] == 1)
            total += best["logprob"]  # greedy: the best is the choice
        tokens += len(entries)
        text += outputs["text_output"][0]
        assert outputs["cumulative_logprob"][0] == pytest.approx(total, rel=1e-4)
    assert tokens == 24
    reasons = [response.outputs["finish_reason"][0] for response in responses]
    assert reasons == [b"None"] * (len(responses) - 1) + [b"length"]


def test_logprobs_are_finite_or_null_where_the_choice_is_not_among_the_best(server: TritonServer) -> None:
    inputs = prompt_tensors("Hello", {"temperature": 5.0, "seed": 1, "max_tokens": 20}, **_extras())
    (response,) = grpc(server, inputs)
    entries = json.loads(response.outputs["logprobs"][0], parse_constant=pytest.fail)
    assert all(len(entry) == 1 for entry in entries)
    ranks = {value["rank"] for entry in entries for value in entry.values()}
    assert None in ranks
    assert ranks <= {None, 1}


def test_chat_template_and_raw_prompt(server: TritonServer, oracle: LLM) -> None:
    chat = expected(oracle, "[user]Hello[assistant]", 24, ignore_eos=True)
    raw = expected(oracle, "Hello", 24, ignore_eos=True)
    assert chat != raw
    assert "".join(generate_grpc(server.grpc_url, "Hello", GREEDY, chat=True)) == chat
    assert "".join(generate_http(server.http_url, "Hello", GREEDY)) == raw


def test_stop_string_ends_the_answer(server: TritonServer, oracle: LLM) -> None:
    text = expected(oracle, "Hello", 24, ignore_eos=True)
    stop = text[6:8]
    answer = generate_http(server.http_url, "Hello", {**GREEDY, "stop": stop})
    assert "".join(answer) == text[: text.index(stop)]
    assert answer.finish_reason == "stop"
    kept = {**GREEDY, "stop": [stop, "never"], "include_stop_str_in_output": True}
    assert "".join(generate_http(server.http_url, "Hello", kept)) == text[: text.index(stop)] + stop


def test_concurrent_streams_each_get_their_own_answer(server: TritonServer, oracle: LLM) -> None:
    prompts = [f"{index} " * (1 + 3 * index) for index in range(20)]
    texts = [expected(oracle, prompt, 40, ignore_eos=True) for prompt in prompts]
    answers = [""] * len(prompts)

    def ask(index: int) -> None:
        call, url = ((generate_grpc, server.grpc_url), (generate_http, server.http_url))[index % 2]
        answers[index] = "".join(call(url, prompts[index], {**GREEDY, "max_tokens": 40}))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "parameters", "error"),
    [
        ("Hello", GREEDY, None),
        ("Hello", {"max_tokens": 1}, None),
        ("Hello", {**GREEDY, "stop_token_ids": list(range(258))}, None),  # ends at once: no text at all
        ("Hello", {"max_tokens": 0}, "max_tokens"),
        ("Hello", {"nonsense": 1}, "nonsense"),
        (f"a{POISON}", GREEDY, "no usable logits"),
    ],
)
def test_exactly_one_final_flag_on_the_last_response(
    server: TritonServer, stream: bool, prompt: str, parameters: dict[str, Any], error: str | None
) -> None:
    responses = grpc(server, prompt_tensors(prompt, parameters, stream=stream))
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    last = responses[-1]
    if error is None:
        assert "text_output" in last.outputs
    else:
        assert error in (last.error or "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 5}, "max_token: unknown parameter"),
        ({"temperature": "warm"}, "temperature: 'warm' is not a number"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k: 2.5 is not a whole number"),
        ({"n": 2}, "n: 2 is not supported"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"seed": "x"}, "seed"),
        ({"ignore_eos": "maybe"}, "ignore_eos"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
        ({"logprobs": 100000}, "logprobs"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_bad_parameters_are_named(server: TritonServer, fields: dict[str, Any], message: str) -> None:
    status, body = post(server, "generate", {"text_input": "x", "sampling_parameters": json.dumps(fields)})
    assert status == 400
    assert message in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not an object"),
        ('{"top_p": NaN}', "NaN"),
        ("[" * 60000, "JSON"),
        (" " * 70000, "at most"),
        (r'{"cache_salt": "\ud800"}', "cache_salt: character 0 is a lone surrogate"),
        (r'{"stop": ["a\ud800"]}', "stop[0]: character 1 is a lone surrogate"),
        (r'{"\ud800": 1}', r"\ud800: unknown parameter"),
        ('{"repetition_penalty": 1e-300}', "repetition_penalty: 1e-300 is out of range"),
    ],
)
def test_bad_json_is_refused(server: TritonServer, raw: str, message: str) -> None:
    status, body = post(server, "generate", {"text_input": "x", "sampling_parameters": raw})
    assert status == 400
    assert message in json.loads(body)["error"]


def test_prompts_that_cannot_be_served(server: TritonServer) -> None:
    status, body = post(server, "generate", {"text_input": "x" * (POSITIONS + 5)})
    assert status == 400
    assert str(POSITIONS + 5) in body
    assert str(POSITIONS) in body
    status, body = post(server, "generate", {"text_input": ""})
    assert status == 400
    assert "no tokens" in body
    status, body = post(server, "generate", {"text_input": "x" * 4_000_000})
    assert status == 400
    assert f"4000000 bytes; the {POSITIONS} tokens" in body
    status, body = post(server, "generate", {"text_input": "x" * (32 << 20)})  # more than a usual stack
    assert status == 400
    assert f"{32 << 20} bytes; at most" in body
    assert server.ready()


def test_text_that_is_not_utf8(server: TritonServer) -> None:
    (response,) = grpc(server, [tensor("text_input", "BYTES", b"ab\xff")])
    assert "text_input: byte 2 is not valid UTF-8" in (response.error or "")
    (response,) = grpc(
        server, [tensor("text_input", "BYTES", b"ab"), tensor("sampling_parameters", "BYTES", b"\xff")]
    )
    assert "sampling_parameters" in (response.error or "")


def test_trailing_zero_bytes_are_kept(server: TritonServer) -> None:
    inputs = prompt_tensors("é\0", GREEDY, return_num_input_tokens=True)
    (response,) = grpc(server, inputs)
    assert response.outputs["num_input_tokens"][0] == 3
    assert response.text.startswith("é\0")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("text_input", "BYTES", [b"a"], [1, 1])], "text_input"),
        ([tensor("text_input", "BYTES", [b"a", b"b"], [2, 1])], "text_input"),
        ([tensor("text_input", "BYTES", [b"a", b"b"])], "text_input"),
        ([tensor("text_input", "INT32", 5)], "text_input"),
        ([tensor("text_input", "BYTES", b"a"), tensor("stream", "INT32", 1)], "stream"),
        (
            [tensor("text_input", "BYTES", b"a"), tensor("sampling_parameters", "FP32", 1.0)],
            "sampling_parameters",
        ),
        ([tensor("stream", "BOOL", True)], "text_input"),
        ([tensor("text_input", "BYTES", b"a"), tensor("temperature", "FP32", 1.0)], "temperature"),
    ],
)
def test_wrong_tensors_are_named(server: TritonServer, inputs: list[Any], message: str) -> None:
    stream = Stream(server, inputs)
    response: Response = stream.next()
    stream.cancel()
    assert message in (response.error or "")


def test_streaming_refuses_to_repeat_the_prompt(server: TritonServer) -> None:
    (response,) = grpc(server, prompt_tensors("x", stream=True, exclude_input_in_output=False))
    assert "exclude_input_in_output" in (response.error or "")


def test_client_errors_are_the_servers_words(server: TritonServer) -> None:
    for ask, url in ((generate_grpc, server.grpc_url), (generate_http, server.http_url)):
        with pytest.raises(ClientError, match="top_p"):
            list(ask(url, "x", {"top_p": 7}))
    with pytest.raises(ClientError, match=r"127\.0\.0\.1:1"):
        list(generate_http("http://127.0.0.1:1", "x"))
    with pytest.raises(ClientError, match="nobody"):
        list(generate_grpc(server.grpc_url, "x", model="nobody"))


def test_unary_infer_is_refused_by_triton_itself(server: TritonServer) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    status, answer = post(server, "infer", body)
    assert status >= 400
    assert "decoupled" in answer


def test_not_finite_logits_fail_their_request_alone(server: TritonServer, oracle: LLM) -> None:
    text = expected(oracle, "Hello", 400, ignore_eos=True)
    long = generate_grpc(server.grpc_url, "Hello", {**GREEDY, "max_tokens": 400})
    pieces = iter(long)
    first = next(pieces)
    for _ in range(4):  # more than the engine loop takes of failing steps
        status, body = post(server, "generate", {"text_input": f"bad {POISON}"})
        assert status >= 400
        assert "no usable logits" in body
    assert first + "".join(pieces) == text
