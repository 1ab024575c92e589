"""The model `llm` as Triton's Python backend runs it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from enginebay.triton_repo.backend.control import ENVIRONMENT, Control
from enginebay.triton_repo.backend.metrics import Metrics
from enginebay.triton_repo.backend.responder import Responder
from enginebay.triton_repo.backend.settings import ServingSettings
from enginebay.triton_repo.backend.surface import parse_request
from enginebay.triton_repo.backend.threads import ENGINE_THREADS, started_threads_named
from enginebay.triton_repo.backend.warmup import warm_up
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.runtime.request import Output, OverloadedError, RequestError, UnavailableError
from enginebay.triton_repo.runtime.text import TextTokenizer

_PUBLISH_SECONDS = 1.0
ENGINE = "engine"


class Service:
    """Requests from Triton to the engine loop, its outputs to the responder.

    Loading raises what the engine folder is refused for; the server then reports the model as not ready, with
    that message. Warm-up is over when the constructor returns.
    """

    def __init__(self, pb_utils: Any, folder: Path, model_config: str, model: str, version: str) -> None:
        self._pb = pb_utils
        logging.getLogger("enginebay").addHandler(_TritonLog(pb_utils))
        settings = ServingSettings.from_parameters(json.loads(model_config).get("parameters", {}))
        self._warming: dict[str, threading.Event] | None = {}
        with started_threads_named(ENGINE_THREADS):
            self._llm = LLM.load(
                folder / ENGINE, sink=self._sink, options=settings.engine, config=settings.loop
            )
        if self._llm.tokenizer is None:
            self._llm.close()
            raise FileNotFoundError(
                f"{folder / ENGINE / 'tokenizer.json'}: no such file; this model serves text, so the engine "
                "folder needs the checkpoint's tokenizer"
            )
        self._tokenizer: TextTokenizer = self._llm.tokenizer
        self._loop = self._llm.loop
        began = time.monotonic()
        limits = self._llm.engine.limits
        warm_up(
            self._loop, limits, min(limits.max_batch, settings.max_batch or limits.max_batch), self._warming
        )
        self._warming = None
        pb_utils.Logger.log_info(f"enginebay: {model} is warm after {time.monotonic() - began:.1f} s")
        self._ids = itertools.count(1)
        self._refused = 0
        self._published = 0.0
        self._was_live = True
        self._metrics = Metrics(pb_utils, model, version, self._loop.stats())
        self._responder = Responder(
            pb_utils,
            self._tokenizer,
            responses=settings.responses_per_step,
            polls=settings.polls_per_second,
            patience=settings.unary_timeout_seconds,
            cancel=self._loop.cancel,
            tick=self._tick,
            log=pb_utils.Logger.log_error,
        )
        self._control = Control(self._drain)

    def accept(self, requests: Iterable[Any]) -> None:
        """Takes Triton's requests. Each will get exactly one final response, from here or later."""
        for request in requests:
            sender = request.get_response_sender()
            id = f"{next(self._ids)}"
            try:
                parsed, wanted = parse_request(request, self._pb, id, self._tokenizer)
            except RequestError as error:
                self._refused += 1
                self._responder.refuse(sender, str(error), self._pb.TritonError.INVALID_ARG)
                continue
            except Exception as error:  # one odd request must not end the worker
                self._refused += 1
                self._responder.refuse(
                    sender, f"{type(error).__name__}: {error}", self._pb.TritonError.INTERNAL
                )
                continue
            self._responder.open(id, sender, wanted)
            try:
                self._loop.submit(parsed)
            except RequestError as error:
                self._responder.refuse(sender, str(error), self._pb.TritonError.INVALID_ARG, id)
            except (OverloadedError, UnavailableError) as error:
                self._responder.refuse(sender, str(error), self._pb.TritonError.UNAVAILABLE, id)
            except Exception as error:
                self._responder.refuse(
                    sender, f"{type(error).__name__}: {error}", self._pb.TritonError.INTERNAL, id
                )

    def close(self) -> None:
        """Ends everything; Triton calls it when nothing is in flight."""
        self._control.close()
        self._loop.drain(timeout=0)
        self._llm.close()
        self._responder.close()

    def _sink(self, outputs: Sequence[Output]) -> None:
        if self._warming is None:
            self._responder.deliver(outputs)
            return
        for output in outputs:
            if output.final:
                self._warming[output.request_id].set()

    def _drain(self, seconds: float) -> None:
        if not self._loop.drain(seconds):
            self._responder.give_up("the server is stopping")
        self._responder.drain()

    def _tick(self, live: bool) -> None:
        """Publishes the counters once a second, and at once when the first stream begins or the last ends."""
        now = time.monotonic()
        turned = self._was_live != live
        self._was_live = live
        if turned or now - self._published >= _PUBLISH_SECONDS:
            self._published = now
            self._metrics.publish(self._loop.stats(), self._refused)
        if self._loop.failure is not None and not live and ENVIRONMENT in os.environ:
            # Whoever started the server sees the worker die and says so; nobody would restart it here.
            self._pb.Logger.log_error(f"enginebay: giving up: {self._loop.failure}")
            os._exit(1)


class _TritonLog(logging.Handler):
    """Python's logging into Triton's log."""

    def __init__(self, pb_utils: Any) -> None:
        super().__init__(logging.WARNING)
        self._logger = pb_utils.Logger

    def emit(self, record: logging.LogRecord) -> None:
        write = self._logger.log_error if record.levelno >= logging.ERROR else self._logger.log_warn
        write(self.format(record).encode(errors="backslashreplace").decode())
