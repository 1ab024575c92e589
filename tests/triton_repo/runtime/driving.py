"""Turns of a scheduler over an engine, without threads or text."""

from __future__ import annotations

from collections.abc import Callable

from fakes import HashEngine

from enginebay.triton_repo.runtime.engine import EngineLimits
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.plan import StepPlan
from enginebay.triton_repo.runtime.request import Request, SamplingParams
from enginebay.triton_repo.runtime.sampler import RowState, sample
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig
from enginebay.triton_repo.runtime.sequence import Sequence, Status

Check = Callable[[], None]


def request(name: str, prompt: list[int] | range, tokens: int = 8, **fields: object) -> Request:
    """A request by the fields of SamplingParams, and `priority` and `salt`."""
    own = {key: fields.pop(key) for key in ("priority", "salt") if key in fields}
    return Request(name, tuple(prompt), SamplingParams(max_tokens=tokens, **fields), **own)


class Driver:
    """A scheduler, an engine and the row states between them. Checks every invariant after every turn."""

    def __init__(
        self, limits: EngineLimits, config: SchedulerConfig | None = None, eos: frozenset[int] = frozenset()
    ) -> None:
        self.engine = HashEngine(limits)
        self.scheduler = Scheduler(limits, config or SchedulerConfig(), eos)
        self.packer = Packer(limits)
        self.rows: dict[Sequence, RowState] = {}
        self.output: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[StepPlan] = []

    def add(self, wanted: Request) -> Sequence:
        sequence = self.scheduler.add(wanted)
        self.rows[sequence] = RowState(
            wanted.sampling, wanted.prompt_ids, sequence.stop_ids, wanted.sampling.seed or 0
        )
        self.output[wanted.id] = []
        return sequence

    def turn(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.plans.append(plan)
        self.engine.move(plan.moves)
        if not plan.chunks:
            return plan
        assert plan.tokens <= self.scheduler.max_step_tokens
        logits = self.engine.run(self.packer.pack(plan))
        rows = [self.rows[chunk.sequence] for chunk in plan.chunks for _ in range(chunk.samples)]
        choices = iter(sample(logits, rows))
        sampled = [[next(choices).token for _ in range(chunk.samples)] for chunk in plan.chunks]
        for event in self.scheduler.commit(plan, sampled):
            for token in event.tokens:
                self.rows[event.sequence].append(token)
                self.output[event.sequence.id].append(token)
            if event.finish_reason is not None:
                assert event.sequence.status is Status.FINISHED
                self.reasons[event.sequence.id] = event.finish_reason
        self.scheduler.check()
        return plan

    def run(self, most: int = 10_000) -> None:
        """Turns until nothing is left."""
        for _ in range(most):
            if not self.scheduler.live:
                break
            assert self.turn().chunks, "sequences are live but nothing is computed"
        assert not self.scheduler.live, "starved"
        assert self.scheduler.pool.held == 0


def alone(wanted: Request, limits: EngineLimits) -> list[int]:
    """The tokens of a request that has a fresh engine to itself."""
    driver = Driver(limits)
    driver.add(wanted)
    driver.run()
    return driver.output[wanted.id]
