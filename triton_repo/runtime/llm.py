"""From an engine folder to answers: engine, tokenizer and loop put together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from enginebay.triton_repo.runtime.engine import Engine
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig, Sink
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.request import Output, Request, SamplingParams
from enginebay.triton_repo.runtime.text import TextTokenizer


class LLM:
    """An engine folder being served in this process.

    With a `sink` all outputs go there (see `EngineLoop`) and requests go in through `loop.submit`. Without
    one, `generate` runs a request and yields its outputs. `tokenizer` is None where the folder has none.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer | None,
        sink: Sink | None = None,
        config: LoopConfig | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._queues: dict[str, SimpleQueue[Output]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._own_sink = sink is None
        self.loop = EngineLoop(engine, tokenizer, sink or self._dispatch, config)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        sink: Sink | None = None,
        options: EngineOptions | None = None,
        config: LoopConfig | None = None,
    ) -> Self:
        """Loads an engine folder. The errors are those of `OrtEngine` and `TextTokenizer`."""
        engine = OrtEngine(folder, options)
        has_tokenizer = (folder / "tokenizer.json").exists()
        tokenizer = TextTokenizer(folder, engine.limits) if has_tokenizer else None
        return cls(engine, tokenizer, sink, config)

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[Output]:
        """Submits a request at once and returns its outputs as they come, the final one last.

        Closing the iterator early cancels the request. Errors are those of `EngineLoop.submit`.
        """
        if not self._own_sink:
            raise RuntimeError("this LLM has a sink: submit to `loop` and read the outputs there")
        request = Request(
            id=f"local-{next(self._numbers)}",
            prompt_ids=tuple(prompt_ids),
            sampling=sampling or SamplingParams(),
            priority=priority,
        )
        queue: SimpleQueue[Output] = SimpleQueue()
        with self._lock:
            self._queues[request.id] = queue
        try:
            self.loop.submit(request)
        except BaseException:
            self._forget(request.id)
            raise
        return self._outputs(request.id, queue)

    def close(self) -> None:
        """Cancels what runs and ends the loop's thread."""
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outputs(self, request_id: str, queue: SimpleQueue[Output]) -> Iterator[Output]:
        try:
            while True:
                output = queue.get()
                yield output
                if output.final:
                    return
        finally:
            self.loop.cancel(request_id)
            self._forget(request_id)

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        with self._lock:
            for output in outputs:
                queue = self._queues.get(output.request_id)
                if queue is not None:
                    queue.put(output)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._queues.pop(request_id, None)
