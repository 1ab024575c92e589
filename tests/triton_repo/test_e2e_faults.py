"""Clients that go away and requests that fail: nobody else notices, and nothing is kept."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest
from asking import Stream, eventually, expected, idle, metrics, post, prompt_tensors
from served_model import POISON

from enginebay.triton_repo.client import generate_grpc, generate_http
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.server import TritonServer

pytestmark = pytest.mark.e2e

ENDLESS = {"temperature": 0, "max_tokens": 8000, "ignore_eos": True}
SOON = 5.0  # seconds in which blocks must be free again; the polls of the fullest server take 0.2


def running(server: TritonServer) -> float:
    return metrics(server)["enginebay_requests_running"]


def cancelled(server: TritonServer) -> float:
    return metrics(server)["enginebay_requests_total[cancelled]"]


def raw_request(server: TritonServer, endpoint: str, body: dict[str, object]) -> socket.socket:
    """An HTTP request on a bare socket, to be closed as rudely as one likes."""
    parts = urlsplit(server.http_url)
    data = json.dumps(body).encode()
    head = f"POST /v2/models/llm/{endpoint} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    link = socket.create_connection((parts.hostname, parts.port))
    link.sendall(head.encode() + data)
    return link


def reset(link: socket.socket) -> None:
    """Closes with RST, as a killed client's kernel may."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def test_grpc_cancel_frees_the_blocks(server: TritonServer) -> None:
    before = cancelled(server)
    stream = Stream(server, prompt_tensors("Go on", ENDLESS, stream=True))
    stream.next()
    assert eventually(lambda: running(server) == 1)
    stream.cancel()
    assert eventually(lambda: idle(server), SOON)
    assert cancelled(server) == before + 1


def test_grpc_cancel_before_any_response(server: TritonServer) -> None:
    stream = Stream(server, prompt_tensors("Go on", ENDLESS))  # without `stream` it answers at its end alone
    assert eventually(lambda: running(server) == 1)
    stream.cancel()
    assert eventually(lambda: idle(server), SOON)


def test_http_stream_closed_frees_the_blocks(server: TritonServer) -> None:
    before = cancelled(server)
    link = raw_request(server, "generate_stream", {"text_input": "Go on", "stream": True, **ENDLESS})
    assert link.recv(100)
    assert eventually(lambda: running(server) == 1)
    reset(link)
    assert eventually(lambda: idle(server), SOON)
    assert cancelled(server) == before + 1


def test_closing_an_answer_cancels_it(server: TritonServer) -> None:
    for ask, url in ((generate_grpc, server.grpc_url), (generate_http, server.http_url)):
        with ask(url, "Go on", ENDLESS) as answer:
            next(iter(answer))
            assert eventually(lambda: running(server) == 1)
        assert eventually(lambda: idle(server), SOON)


def test_outcomes_are_counted(server: TritonServer) -> None:
    time.sleep(1.5)  # what is published once a second
    assert idle(server)
    before = metrics(server)
    for _ in range(5):
        assert post(server, "generate", {"text_input": "fine", "max_tokens": 3})[0] == 200
    for _ in range(5):
        stream = Stream(server, prompt_tensors("Go on", ENDLESS, stream=True))
        stream.next()
        stream.cancel()
    for _ in range(5):
        assert "logits" in post(server, "generate", {"text_input": f"bad {POISON}"})[1]
    for _ in range(5):
        assert post(server, "generate", {"text_input": "x", "top_p": 9})[0] == 400

    def counted() -> dict[str, float]:
        now = metrics(server)
        names = ("ok", "cancelled", "failed", "refused")
        return {
            name: now[f"enginebay_requests_total[{name}]"] - before[f"enginebay_requests_total[{name}]"]
            for name in names
        }

    outcomes = {"ok": 5, "cancelled": 5, "failed": 5, "refused": 5}
    assert eventually(lambda: idle(server) and counted() == outcomes), counted()
    now = metrics(server)
    first = "enginebay_first_tokens_total"
    assert now[first] - before[first] == 10  # the failed and refused ones had none
    assert all(value >= 0 for value in now.values())


def test_prefix_hits_are_counted_and_salted_apart(server: TritonServer) -> None:
    hits = "enginebay_prefix_hit_tokens_total"

    def ask(salt: str) -> float:
        before = metrics(server)[hits]
        body = {"text_input": f"shared {marker} " * 8, "max_tokens": 2, "cache_salt": salt}
        assert post(server, "generate", body)[0] == 200
        assert eventually(lambda: idle(server))
        time.sleep(0.3)
        return metrics(server)[hits] - before

    marker = random.random()
    assert ask("a") == 0
    assert ask("a") > 64
    assert ask("b") == 0


def test_two_hundred_rude_clients(server: TritonServer, oracle: LLM) -> None:
    """Streams hard-closed at random points, while two polite ones go on."""
    text = expected(oracle, "polite", 3000, ignore_eos=True)
    polite: dict[str, str] = {}

    def listen(name: str) -> None:
        ask, url = {"grpc": (generate_grpc, server.grpc_url), "http": (generate_http, server.http_url)}[name]
        polite[name] = "".join(ask(url, "polite", {**ENDLESS, "max_tokens": 3000}))

    listeners = [threading.Thread(target=listen, args=(name,)) for name in ("grpc", "http")]
    for thread in listeners:
        thread.start()
    seed = random.randrange(1 << 32)
    print("seed", seed)

    def rude(share: random.Random) -> None:
        for _ in range(25):
            prompt = "x" * share.choice((1, 20, 300))  # 300 is more than a step: closed amid its prefill
            patience = share.choice((0.0, 0.0, share.random() * 0.2))
            if share.random() < 0.5:
                stream = Stream(server, prompt_tensors(prompt, ENDLESS, stream=True))
                time.sleep(patience)
                stream.cancel()
            else:
                endpoint = share.choice(("generate_stream", "generate"))
                streaming = endpoint == "generate_stream"
                # Triton does not see this client leave without streaming, so that has to end by itself.
                limits = ENDLESS if streaming else {"max_tokens": 50}
                body = {"text_input": prompt, "stream": streaming, **limits}
                link = raw_request(server, endpoint, body)
                time.sleep(patience)
                reset(link)

    crowd = [threading.Thread(target=rude, args=(random.Random(seed + index),)) for index in range(8)]
    for thread in crowd:
        thread.start()
    for thread in [*crowd, *listeners]:
        thread.join()
    assert polite == {"grpc": text, "http": text}
    assert eventually(lambda: idle(server), 2 * SOON)
    assert post(server, "generate", {"text_input": "still here?", "max_tokens": 3})[0] == 200
