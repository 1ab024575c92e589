"""What serving through Triton costs: streams of a real server against the engine alone, in one run.

    python benchmarks/serving.py ENGINE --streams 16 --new 128 --threads 1,2

Each row: tokens per second of the engine alone (the same batcher in a process of its own, all requests at
once), tokens per second that the clients of the server see, their ratio, and the CPU time per token that the
server and its Python worker spend outside the engine's threads. Clients run on the same machine, in a process
of their own; their CPU time is given too. Rounds alternate; speeds are those of the fastest round of each,
which other work on the machine disturbed least, the rest are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT = (
    "Continue the story. Once upon a time there was an engineer who number {index} built a bay for engines"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--threads", default="1,2", help="of the engine; comma separated, one table row each")
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--responses-per-step", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("alone", "clients"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "alone":
        alone(args)
    elif args.role == "clients":
        clients(args)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    rows = [measure(args, int(threads)) for threads in args.threads.split(",")]
    if args.json:
        print(json.dumps(rows))
        return
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()))


def measure(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    from enginebay.triton_repo.backend.settings import ServingSettings
    from enginebay.triton_repo.package import PackageConfig, package_repo
    from enginebay.triton_repo.server import TritonServer

    rate = {} if args.responses_per_step is None else {"responses_per_step": args.responses_per_step}
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repo"
        package_repo(
            args.engine, repository, PackageConfig(settings=ServingSettings(threads=threads, **rate))
        )
        with TritonServer(repository) as server, Child(args, threads, "alone", "-") as engine:
            url = server.grpc_url if args.protocol == "grpc" else server.http_url
            with Child(args, threads, "clients", url) as load:
                pids = (server.pid, *server.worker_pids())
                rounds = [one_round(engine, load, pids) for _ in range(args.rounds)]
    middle = {key: statistics.median(entry[key] for entry in rounds) for key in rounds[0]}
    best = {key: max(entry[key] for entry in rounds) for key in ("alone", "served")}
    return {
        "threads": threads,
        "streams": args.streams,
        "alone tok/s": round(best["alone"], 1),
        "served tok/s": round(best["served"], 1),
        "ratio": round(best["served"] / best["alone"], 3),
        "server+worker us/token": round(middle["overhead"], 1),
        "engine us/token": round(middle["engine"], 1),
        "alone us/token": round(middle["alone cpu"], 1),
        "clients us/token": round(middle["client"], 1),
        "responses/token": round(middle["responses"], 3),
        "first token ms": round(middle["ttft"], 1),
    }


def one_round(engine: Child, load: Child, pids: tuple[int, ...]) -> dict[str, float]:
    before = cpu_seconds(pids)
    served = load.round()
    after = cpu_seconds(pids)
    alone = engine.round()
    tokens = served["tokens"]
    return {
        "alone": alone["tokens"] / alone["seconds"],
        "served": tokens / served["seconds"],
        "overhead": 1e6 * (after[0] - before[0]) / tokens,
        "engine": 1e6 * (after[1] - before[1]) / tokens,
        "alone cpu": 1e6 * alone["cpu"] / alone["tokens"],
        "client": 1e6 * served["cpu"] / tokens,
        "responses": served["responses"] / tokens,
        "ttft": 1e3 * served["ttft"],
    }


class Child:
    """A process of this file in another role, that runs a round for each line it is sent."""

    def __init__(self, args: argparse.Namespace, threads: int, role: str, url: str) -> None:
        command = [sys.executable, __file__, str(args.engine), "--role", role, "--url", url]
        command += ["--streams", str(args.streams), "--new", str(args.new), "--threads", str(threads)]
        command += ["--protocol", args.protocol]
        # In a session of its own, as the server is: schedulers share the processor between sessions.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.round()  # warms up

    def round(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark failed; its message is above")
        return dict(json.loads(line))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def alone(args: argparse.Namespace) -> None:
    from enginebay.triton_repo.runtime.llm import LLM
    from enginebay.triton_repo.runtime.ort_engine import EngineOptions
    from enginebay.triton_repo.runtime.request import Output, Request, SamplingParams

    sampling = SamplingParams(max_tokens=args.new, ignore_eos=True)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def sink(outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.usage is not None:
                ended.put(output.usage.completion_tokens)

    with LLM.load(args.engine, sink=sink, options=EngineOptions(threads=int(args.threads))) as llm:
        assert llm.tokenizer is not None

        def run() -> dict[str, float]:
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(args.streams):
                text = prompt()
                llm.loop.submit(Request(text, llm.tokenizer.encode(text), sampling))
            tokens = sum(ended.get() for _ in range(args.streams))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            return {"tokens": tokens, "seconds": seconds, "cpu": cpu}

        serve_rounds(run)


def clients(args: argparse.Namespace) -> None:
    from enginebay.triton_repo.client import generate_grpc, generate_http

    ask = generate_grpc if args.protocol == "grpc" else generate_http
    parameters = {"max_tokens": args.new, "temperature": 0, "ignore_eos": True}

    def run() -> dict[str, float]:
        totals: list[tuple[int, int, float]] = []

        def one() -> None:
            answer = ask(args.url, prompt(), parameters)
            responses = sum(1 for _ in answer)
            totals.append((answer.tokens, responses, answer.first_token_seconds or 0.0))

        began, cpu = time.perf_counter(), time.process_time()
        threads = [threading.Thread(target=one) for _ in range(args.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
            "tokens": sum(tokens for tokens, _, _ in totals),
            "responses": sum(responses for _, responses, _ in totals),
            "ttft": statistics.median(ttft for _, _, ttft in totals),
        }

    serve_rounds(run)


_count = iter(range(1 << 62))


def prompt() -> str:
    """Different each time, so that the prefix cache helps neither side."""
    return f"{os.getpid()}-{next(_count)} " + PROMPT.format(index=next(_count))


def serve_rounds(run: Callable[[], dict[str, float]]) -> None:
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


def cpu_seconds(pids: tuple[int, ...]) -> tuple[float, float]:
    """CPU time of all threads of the processes: outside the engine, and of its threads."""
    from enginebay.triton_repo.backend.threads import ENGINE_THREADS

    outside = engine = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            if (task / "comm").read_text().strip() == ENGINE_THREADS:
                engine += seconds
            else:
                outside += seconds
    return outside, engine


if __name__ == "__main__":
    main()
