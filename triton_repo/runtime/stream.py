"""From the tokens of one request to its outputs: text, stop strings, what may be shown and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from enginebay.triton_repo.runtime.detokenize import TokenStream
from enginebay.triton_repo.runtime.request import FinishReason, Output, Request, TokenLogprob, Usage
from enginebay.triton_repo.runtime.sampler import Choice, RowState
from enginebay.triton_repo.runtime.stop import StopMatcher


@dataclass(frozen=True)
class _Shown:
    """A token on its way out, and where its text lies in the text of the whole output."""

    token: int
    logprob: TokenLogprob | None
    start: int
    end: int


class OutputStream:
    """Everything of a running request that is not the scheduler's.

    A token goes out with the text it completes. Tokens whose text a stop string cuts off entirely are not
    shown, and neither is the end token unless `include_stop`; both count as generated.
    """

    def __init__(
        self,
        request: Request,
        text: TokenStream | None,
        stop_ids: frozenset[int],
        seed: int,
        submitted: float,
    ) -> None:
        self.request = request
        self.submitted = submitted
        self.row = RowState(request.sampling, request.prompt_ids, stop_ids, seed)
        self._text = text
        self._stop = StopMatcher(request.sampling.stop, include=request.sampling.include_stop)
        self._length = 0  # characters decoded
        self._sent = 0  # characters sent
        self._held: deque[_Shown] = deque()

    def take(
        self,
        choices: Items[Choice],
        reason: FinishReason | None,
        *,
        stopped_by_token: bool,
        cached_tokens: int,
    ) -> Output | None:
        """The output for newly accepted tokens, if there is anything to send. `reason` ends the request.

        A stop string may end it too: then the output says so and the caller has to end the sequence.
        """
        sampling = self.request.sampling
        text = ""
        stopped = False
        for index, choice in enumerate(choices):
            self.row.append(choice.token)
            if stopped_by_token and index == len(choices) - 1 and not sampling.include_stop:
                break
            piece = self._text.push(choice.token) if self._text is not None else ""
            start, self._length = self._length, self._length + len(piece)
            self._held.append(_Shown(choice.token, choice.logprob, start, self._length))
            if self.row.generated <= sampling.min_tokens:
                text += piece
                continue
            released = self._stop.push(piece)
            text += released.text
            if stopped := released.stopped:
                break
        if reason is not None and not stopped:
            released = self._stop.push(self._text.flush() if self._text is not None else "")
            text += released.text
            stopped = released.stopped
            text += "" if stopped else self._stop.flush()
        self._sent += len(text)
        if stopped:
            reason = "stop"
        shown = self._release(everything=reason is not None and not stopped, cut=stopped)
        if reason is None and not text and not shown:
            return None
        return Output(
            request_id=self.request.id,
            text=text,
            token_ids=tuple(item.token for item in shown),
            logprobs=tuple(item.logprob for item in shown if item.logprob is not None),
            finish_reason=reason,
            usage=None if reason is None else self._usage(cached_tokens),
        )

    def end(self, reason: FinishReason, *, cached_tokens: int, error: str | None = None) -> Output:
        """The final output of a request that did not end by itself."""
        return Output(
            request_id=self.request.id,
            text="",
            finish_reason=reason,
            usage=self._usage(cached_tokens),
            error=error,
        )

    def _release(self, *, everything: bool, cut: bool) -> list[_Shown]:
        shown = []
        while self._held:
            first = self._held[0]
            if not (everything or first.end <= self._sent or (cut and first.start < self._sent)):
                break
            shown.append(self._held.popleft())
        return shown

    def _usage(self, cached_tokens: int) -> Usage:
        return Usage(len(self.request.prompt_ids), self.row.generated, cached_tokens)
