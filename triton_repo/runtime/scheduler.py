"""Who computes which tokens in the next step.

One counter, no phases: every running sequence is given tokens so that `computed` catches up with `known`.
Decoding is a chunk of one, prefill a chunk of what the step's token budget leaves. When blocks run out, the
sequence of the lowest priority, among equals the newest, gives its blocks back and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass

from enginebay.triton_repo.runtime.admission import check_request
from enginebay.triton_repo.runtime.block_pool import BlockPool
from enginebay.triton_repo.runtime.engine import EngineLimits
from enginebay.triton_repo.runtime.kv_manager import KVManager, Namespace
from enginebay.triton_repo.runtime.plan import Chunk, StepPlan
from enginebay.triton_repo.runtime.request import FinishReason, Request
from enginebay.triton_repo.runtime.sequence import Sequence, Status
from enginebay.triton_repo.runtime.tiers import TieredKV

# Enough rows to keep matrix products busy, few enough that decoding waits for a prefill only briefly.
STEP_TOKENS = 256


@dataclass(frozen=True)
class SchedulerConfig:
    """Policy, within the engine's own limits. `max_batch` None takes the engine's.

    A request of priority p is served as if it had arrived `priority_stride` * p requests later, so at most
    that many later requests overtake it for each level: priorities never starve anyone.
    """

    max_batch: int | None = None  # sequences that run together
    max_step_tokens: int | None = None  # tokens of a step; None: STEP_TOKENS, or one for each sequence
    prefix_caching: bool = True
    priority_stride: int = 256
    reserved_blocks: int = 0  # leading blocks of the pool that are never given out


@dataclass(frozen=True)
class TokenEvent:
    """The tokens a step added to one sequence, in order. With a `finish_reason` the sequence is over."""

    sequence: Sequence
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stopped_by_token: bool = False  # the last of `tokens` is an end-of-sequence or stop token


@dataclass
class SchedulerCounters:
    """Running sums; see `Stats`."""

    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


def _kv_manager(limits: EngineLimits, config: SchedulerConfig, step_tokens: int) -> KVManager:
    reserved, caching = config.reserved_blocks, config.prefix_caching
    if limits.tiers:
        return TieredKV(limits, step_tokens, reserved, prefix_caching=caching)
    return KVManager(BlockPool(limits.num_blocks, reserved), limits.block_size, prefix_caching=caching)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Scheduler:
    """Owns the sequences and their blocks. Not thread-safe: one thread calls it.

    A turn is `schedule()`, the engine, `commit()`. Between them only `finish()` may be called.
    """

    def __init__(
        self, limits: EngineLimits, config: SchedulerConfig, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        self.limits = limits
        step_tokens = config.max_step_tokens or max(STEP_TOKENS, limits.max_batch)
        self.max_step_tokens = min(step_tokens, limits.max_step_tokens)
        # Every running sequence gets a token in every step, so there are never more of them than tokens.
        self.max_batch = min(config.max_batch or limits.max_batch, limits.max_batch, self.max_step_tokens)
        if self.max_batch < 1 or config.priority_stride < 0:
            raise ValueError(f"{config} leaves room for {self.max_batch} sequences in a step")
        self.kv = _kv_manager(limits, config, self.max_step_tokens)
        self.pool = self.kv.pool
        self.counters = SchedulerCounters()
        self._stride = config.priority_stride
        self._eos_ids = eos_ids
        self._arrivals = 0
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by order
        self._waiting: list[Sequence] = []  # by order

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may hold in the cache."""
        return self.kv.capacity

    @property
    def running(self) -> Items[Sequence]:
        return self._running

    @property
    def live(self) -> int:
        """Accepted sequences that are not finished."""
        return len(self._live)

    def add(self, request: Request, namespace: Namespace | None = None) -> Sequence:
        """Queues a request. RequestError where it can never be served, whatever else runs."""
        if request.id in self._live:
            raise ValueError(f"request '{request.id}' is already being served")
        room = check_request(request, self.limits, self.capacity)
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= self._eos_ids
        self._arrivals += 1
        sequence = Sequence(
            request,
            max_new_tokens=room,
            arrival=self._arrivals,
            rank=self._arrivals + request.priority * self._stride,
            stop_ids=stop_ids,
            namespace=namespace or Namespace(salt=request.salt),
            limits=self.limits,
        )
        insort(self._waiting, sequence, key=_order)
        self._live[request.id] = sequence
        return sequence

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Ends a sequence now and frees its blocks. Harmless when it is over already.

        `forget` says that what it computed is not to be trusted.
        """
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self.kv.close(sequence.table, forget=forget)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        del self._live[sequence.id]

    def schedule(self) -> StepPlan:
        """The next step. Without chunks where nothing is to do."""
        budget = self.max_step_tokens
        chunks: dict[Sequence, Chunk] = {}
        preemptions = self.counters.preemptions
        # Those that want one token first: a long prefill never delays a decode.
        decoding = [sequence for sequence in self._running if sequence.pending == 1]
        catching_up = [sequence for sequence in self._running if sequence.pending > 1]
        for sequence in (*decoding, *catching_up):
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one of the others
            count = min(sequence.pending, budget, self.kv.chunk_tokens)
            if count == 0:
                continue
            while not self.kv.grow(sequence.table, sequence.computed + count):
                victim = self._running[-1]
                budget += self._preempt(victim, chunks)
                if victim is sequence:
                    break
            else:
                chunks[sequence] = self._chunk(sequence, count)
                budget -= count
        if self.counters.preemptions == preemptions:
            self._start_waiting(chunks, budget)
        return StepPlan(tuple(chunks.values()), self.kv.take_moves())

    def commit(self, plan: StepPlan, sampled: Items[Items[int]]) -> tuple[TokenEvent, ...]:
        """Takes in what a step computed: for each chunk the tokens accepted, at most `chunk.samples` of them.

        Chunks of sequences finished since `schedule()` are passed over.
        """
        events = []
        for chunk, tokens in zip(plan.chunks, sampled, strict=True):
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue
            assert bool(tokens) == bool(chunk.samples), (
                f"{len(tokens)} tokens for {chunk.samples} sampled rows"
            )
            event = self._accept(sequence, tokens)
            sequence.computed = chunk.end - chunk.samples + len(event.tokens)
            self.kv.publish(sequence.table, sequence.tokens, sequence.computed)
            if event.finish_reason is not None:
                self.finish(sequence)
            elif sequence.long_rope and not sequence.table.namespace.long_rope:
                self._stop_running(sequence)  # to be computed again from its first token
                sequence.renew_table()
            if event.tokens:
                events.append(event)
                self.counters.generated_tokens += len(event.tokens)
        return tuple(events)

    def slots(self) -> tuple[int, int]:
        """(allocated, used) token slots of the blocks that are held now; a shared block counts once."""
        allocated = self.pool.held * self.limits.block_size
        empty = sum(s.table.length * self.limits.block_size - s.computed for s in self._running)
        return allocated, allocated - empty

    def check(self) -> None:
        """Asserts the invariants of the pool and of every sequence."""
        self.pool.check([sequence.table.blocks.tolist() for sequence in self._running])
        assert self._running == sorted(self._running, key=_order)
        assert len(self._running) <= self.max_batch
        for sequence in self._live.values():
            assert sequence.status is not Status.FINISHED
            if sequence.status is Status.WAITING:
                assert sequence.table.length == sequence.computed == 0
            assert sequence.computed < sequence.known
            assert sequence.computed <= sequence.table.length * self.limits.block_size

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start = sequence.computed
        return Chunk(
            sequence=sequence,
            start=start,
            tokens=sequence.tokens[start : start + count],
            blocks=sequence.table.blocks,
            samples=1 if count == sequence.pending else 0,
            position_shift=self.limits.rope_switch if sequence.long_rope else 0,
        )

    def _start_waiting(self, chunks: dict[Sequence, Chunk], budget: int) -> None:
        """Starts waiting sequences in order, as far as slots, budget and blocks reach."""
        if not self._waiting or len(self._running) >= self.max_batch or budget == 0:
            return
        # What the running ones still need for the tokens they know is not to be given away.
        promised = sum(self.kv.owed(s.table, s.known) for s in self._running)
        while self._waiting and len(self._running) < self.max_batch and budget > 0:
            sequence = self._waiting[0]
            hits = self.kv.match(sequence.table, sequence.tokens)
            # A block of headroom, so that it is not preempted as soon as it has started.
            goal = min(sequence.known + self.limits.block_size, sequence.cache_limit)
            if self.kv.needs(hits, goal) + promised > self.pool.free:
                return
            self._waiting.pop(0)
            self._start(sequence, hits)
            count = min(sequence.pending, budget, self.kv.chunk_tokens)
            grown = self.kv.grow(sequence.table, sequence.computed + count)
            assert grown, "the pool has fewer blocks than it said"
            promised += self.kv.owed(sequence.table, sequence.known)
            chunks[sequence] = self._chunk(sequence, count)
            budget -= count

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        self.kv.attach(sequence.table, hits)
        sequence.computed = len(hits) * self.limits.block_size
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=_order)
        if sequence.cached_tokens is None:  # not when it starts again after a preemption
            sequence.cached_tokens = sequence.computed
            self.counters.prefix_lookup_tokens += sequence.known
            self.counters.prefix_hit_tokens += sequence.computed
            self.counters.prompt_tokens += sequence.known

    def _preempt(self, sequence: Sequence, chunks: dict[Sequence, Chunk]) -> int:
        """Sends a running sequence back to wait. Returns the tokens of this step that become free."""
        self._stop_running(sequence)
        self.counters.preemptions += 1
        dropped = chunks.pop(sequence, None)
        return len(dropped.tokens) if dropped else 0

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.kv.close(sequence.table)
        sequence.computed = 0
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=_order)

    @staticmethod
    def _accept(sequence: Sequence, tokens: Items[int]) -> TokenEvent:
        kept = []
        reason: FinishReason | None = None
        stopped = False
        for token in tokens:
            sequence.append(token)
            kept.append(token)
            if token in sequence.stop_ids and sequence.generated > sequence.request.sampling.min_tokens:
                reason, stopped = "stop", True
            elif sequence.generated >= sequence.max_new_tokens:
                reason = "length"
            if reason is not None:
                break
        return TokenEvent(sequence, tuple(kept), reason, stopped)
