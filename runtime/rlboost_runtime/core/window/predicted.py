"""The seeding window by prediction: closed when training would last as long as what is left to roll out.

While the window is open, the core asks again and again: if it closed now, when would the spot instances be
through, and when the trainer?

    rollout  = seconds that it took in the last steps + tokens more than then / tokens per second
    training = all tokens of the step x seconds per token + hand-over

tokens being those left for each spot instance. It closes when `rollout` no longer exceeds `training`. Tokens
left come from the responses themselves, each expected to become as long as finished ones that got as far
(`lengths`); what the last steps took is counted from the closing of the window to the last response. The pace
is what engines show in the last `PRESENT_S` of the open window: with long contexts few responses fit into a
cache, so it is far below that of the step as a whole, which stands in for it until reserved engines serve.
The hand-over, what the trainer takes to come back onto the GPUs, is measured by the trainer and does not grow
with the tokens. So a step whose responses happen to be long gets a longer window than its neighbour, and a
change in the number of instances is answered in the very step in which it happens, where Algorithm 1 needs
several steps to come near.

Where the rollout would outlast training, without any window, by no more than waking the engines and sending
them to sleep again takes, the window is skipped: a price on toggling. If the reserved engines work p times as
fast as the spot ones, a window of length T ends the step at

    T + sleep + training,  T = (excess + p wake - sleep) / (1 + p)

which is later than without it, at training + excess, exactly if excess <= wake + sleep.

That arithmetic flatters a window that is dear: what the reserved engines have begun goes on elsewhere, late.
So where waking and sleeping take more than `DEAR_SHARE` of a step, and doing without a window does not look
much worse, one step tries it, for each number of spot instances; from then on the faster way is taken, by
the seconds per token that steps of both kinds took.

Where steps overlap, engines go on with the next step: a longer window costs them nothing, while a trainer
that waits holds GPUs which they could use. There the rollout is to be through before the trainer, by a lead
that grows with each wait of the trainer, less `WAIT_SHARE` of the training time, until the waits are gone.

Until a step has taught the rates the window is the job's initial one; one that outlasts a whole rollout
teaches nothing and is cut to half of it. N_prem is the paper's.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from rlboost_runtime.core.base.cost_model import BOTH, StepRates, best_window_s, rollout_s
from rlboost_runtime.core.base.prior import FinishedRollout, WindowPrior
from rlboost_runtime.core.state.rates import GenerationRate, Lengths, StepTimes
from rlboost_runtime.core.state.responses import ResponseState, StepResponses
from rlboost_runtime.core.window.seeding_window import (
    SAME_COUNT,
    OpenWindow,
    SeedingWindow,
    StepObservation,
    instances_to_keep_up,
)

LOOK_S = 1.0
"""Least pause between two looks: each looks at every response of the step."""
PRESENT_S = 10.0
"""Over which the pace of an open window is taken."""
REMEMBERED = 3
"""Steps whose tails are averaged."""
REMEMBERED_FINISHES = 8
"""Steps whose ends are remembered: the shortest shows how long a step goes on after its last response, the
others ended with a trainer that was behind."""
WEIGHT = 0.8
"""Weight of the last step in what is learned."""
LONGEST = 2.0
"""No window is longer than this many times the longest whole rollout of the last steps, whatever the rates
are: where no engine makes progress, tokens left would hold it open for ever."""
FULL_SHARE = 0.85
"""Of its KV capacity, what a full engine uses: some is kept for the growth of what it decodes."""
FINISH_SHARE = 1 / 16
"""Of training, what comes after the last response at most: one micro-batch and the optimizer."""
ENGINES_SHARE = 0.8
"""Of what a step takes beside training, what its window may explain where the rest shows how late a trainer
is fed; beyond it the rest is an error of the window's."""
DEAR_SHARE = 0.05
"""Of a step: waking and sleeping that take more are worth a trial without."""
TRY_SHARE = 1.2
"""A step is tried without a window if it should take at most so many times what it takes with one."""
WAIT_SHARE = 0.03
"""Of training: what a trainer waits for in any case, its first and its last micro-batch."""
MOST_LEAD_SHARE = 0.5
"""Of training: the longest lead."""
STARVED_SHARE = 0.02
"""A trainer that waited longer than this share of its training time was waiting for the last responses."""

_HANDED_ON = (
    *("t_seed_s", "n_prem", "train_s_per_token", "busy_s_per_token", "slower", "step_tokens"),
    *("start_s", "wake_s", "sleep_s", "handover_s", "finish_s"),
)
"""Fields that the next run begins with. What steps took with a window and without is not among them: it
belongs to the fleets that there were. Nor is the lead, to the overlap of that run's steps."""


@dataclass(slots=True)
class PredictedWindow(SeedingWindow):
    """T_seed from the state of the open step; the rates it needs are learned from trained ones."""

    lengths: Lengths = field(default_factory=Lengths)
    pace: GenerationRate = field(default_factory=GenerationRate)
    step_times: StepTimes = field(default_factory=StepTimes)
    has_gate: bool = True
    train_s_per_token: float | None = None
    busy_s_per_token: float | None = None
    """From the closing to the end without waiting and hand-over."""
    start_s: float = 0.0
    """How much longer a step takes than that where no window would be needed."""
    step_tokens: float = 0.0
    """Tokens of a step."""
    slower: float | None = None
    """Rollouts take so many times what they would with every engine busy and full (`rates`)."""
    wake_s: float = 0.0
    """From the opening of a window until reserved engines serve."""
    sleep_s: float = 0.0
    """From its closing until the trainer has the GPUs."""
    handover_s: float = 0.0
    """From then until the trainer can train, as it reports."""
    finish_s: float = 0.0
    """From the last response to the end of the step, where the trainer waited for it."""
    lead_s: float = 0.0
    """How long before the trainer the rollout is to be through; 0 where steps do not overlap."""
    _with_window: dict[int, float] = field(default_factory=dict)
    """Seconds per token of steps with so many spot instances from begin to end."""
    _without: dict[int, float] = field(default_factory=dict)
    """The same of steps that skipped the window."""
    _look_at: float = -math.inf
    _looked_at: float = -math.inf
    _looked_with: int = -1
    _rollouts: deque[FinishedRollout] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _finishes: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_FINISHES))
    _opened_at: float = 0.0
    _closed_at: float | None = None
    _closed_with: int = 0
    _tokens_at_close: int = 0
    _closings: int = 0
    _is_woken: bool = False
    """The reserved engines serve in this window."""
    _marks: deque[tuple[float, float]] = field(default_factory=deque)
    """Moments of the open window, and the tokens that there were."""

    def restart(self) -> None:
        """A step begins."""
        self._look_at = self._looked_at = -math.inf
        self._closings, self._closed_at = 0, None
        self._is_woken = False
        self.skips_window = False

    def woken(self, after_s: float) -> None:
        """Take in what waking costs."""
        self._is_woken = True
        self.wake_s = _blend(self.wake_s or None, after_s)

    def asleep(self, after_s: float) -> None:
        """Take in what going to sleep costs."""
        self.sleep_s = _blend(self.sleep_s or None, after_s)

    def look(self, window: OpenWindow, book: StepResponses) -> float | None:
        """Plan the window again if it is time to; return when to look next."""
        n, tokens_per_s = window.num_spot, self.pace.tokens_per_s
        is_taught = self.lengths.is_known and self.train_s_per_token is not None
        if not is_taught or tokens_per_s is None or not n:
            return None
        assert self.train_s_per_token is not None
        look_at = self._look_at
        if n != self._looked_with:
            look_at = min(look_at, self._looked_at + LOOK_S)
        if window.now < look_at:
            return look_at
        left, total, made = self._tokens(book)
        alone_s = self._alone_s(n, left, self._present_pace(window, made) or tokens_per_s)
        excess_s = alone_s + self.lead_s - total * self.train_s_per_token - self.handover_s
        rest_s = max(0.0, excess_s) / (1.0 + self.num_reserved / n)
        if window.now == window.opened_at and not self._closings:
            self.skips_window = self.has_gate and (
                excess_s <= self.wake_s or self._is_better_without(n, alone_s, total)
            )
        if self.skips_window:
            rest_s = 0.0
        planned_s = window.now - window.opened_at + rest_s
        self.t_seed_s = min(planned_s, LONGEST * max(roll.whole_s for roll in self._rollouts))
        self._look_at = window.now + max(LOOK_S, rest_s / 2.0)
        self._looked_at, self._looked_with = window.now, n
        return self._look_at

    def close(self, window: OpenWindow, book: StepResponses) -> None:
        """The window has closed."""
        self._closings += 1
        self._is_woken = False
        self._opened_at = window.opened_at
        self._closed_at, self._closed_with = window.now, window.num_spot
        self._tokens_at_close = sum(r.num_tokens for r in book.responses.values())

    def learn(self, seen: StepObservation) -> None:
        """Take in one trained step."""
        if seen.n_prem <= 0:
            return
        if seen.t_train > 0:
            window_s = min(self.t_seed_s, seen.t_remote)
            self.n_prem = instances_to_keep_up(seen, window_s, self.num_reserved)
        if seen.t_fleet is not None:
            lead_s = self.lead_s + seen.t_train_wait - WAIT_SHARE * seen.t_train
            self.lead_s = min(max(0.0, lead_s), MOST_LEAD_SHARE * seen.t_train)
        if self._closings != 1 or self._closed_at is None:
            return  # no window at all, or several: the rates of such a step are not those of a plain one
        self._compare(seen)
        rest_s = seen.ended_at - seen.t_remote_wait - self._closed_at
        left = seen.num_tokens - self._tokens_at_close
        if rest_s <= 0 or left <= 0:
            self.t_seed_s = min(self.t_seed_s, seen.t_remote / 2.0)
            return
        if seen.t_train_wait > STARVED_SHARE * seen.t_train:
            self._finishes.append(seen.t_remote_wait)
            self.finish_s = min(self._finishes)
        num_spot = max(1.0, (self._closed_with + seen.n_hat) / 2.0)
        finish_s = min(self.finish_s, seen.t_remote_wait)
        training_s = seen.ended_at - self._closed_at - seen.t_train_wait - finish_s - seen.t_handover
        if training_s <= 0:
            return
        self.handover_s = _blend(self.handover_s or None, seen.t_handover)
        self._rollouts.append(FinishedRollout(left / num_spot, rest_s, seen.t_remote, num_spot))
        self.train_s_per_token = _blend(self.train_s_per_token, training_s / seen.num_tokens)
        self.step_tokens = _blend(self.step_tokens or None, float(seen.num_tokens))
        busy_s = training_s + finish_s
        self.busy_s_per_token = _blend(self.busy_s_per_token, busy_s / seen.num_tokens)
        window_s = self._closed_at - self._opened_at
        alone_s = rest_s if seen.t_fleet is None else max(0.0, seen.t_fleet - window_s)
        self._learn_slowness(num_spot, window_s, alone_s)
        if seen.t_fleet is None:  # else it has no start: the fleet works on the step before
            self._learn_start(seen, seen.t_step - busy_s - seen.t_handover)

    def rates(self) -> StepRates | None:
        """Return what a step takes; a reserved engine is taken to be like a spot instance."""
        ideal = self._ideal()
        if ideal is None or self.slower is None:
            return None
        slower = self.slower
        return replace(
            ideal,
            shared_s=slower * ideal.shared_s,
            chain_s=slower * ideal.chain_s,
            steps_s=slower * ideal.steps_s,
        )

    def prior(self) -> WindowPrior:
        """Return what has been learned, for the next run."""
        learned = {name: getattr(self, name) for name in _HANDED_ON}
        return WindowPrior(**learned, tokens_per_s=self.pace.tokens_per_s, rollouts=tuple(self._rollouts))

    def begin_with(self, prior: WindowPrior) -> None:
        """Begin with what a former run has learned."""
        for name in _HANDED_ON:
            setattr(self, name, getattr(prior, name))
        self._rollouts.extend(prior.rollouts)
        if self.finish_s:
            self._finishes.append(self.finish_s)
        if prior.tokens_per_s:
            self.pace.learn(1.0, 1, 1.0 / prior.tokens_per_s)

    def _ideal(self) -> StepRates | None:
        """Return what a step would take if engines were always busy and as full as they get."""
        engine = self.step_times.typical()
        if self.busy_s_per_token is None or engine is None or not self.lengths.is_known:
            return None
        busy_s = self.step_tokens * self.busy_s_per_token
        finish_s = min(self.finish_s, FINISH_SHARE * busy_s)
        tokens, contexts = self.step_tokens, self.step_tokens * self.lengths.mean_context
        return StepRates(
            tokens=tokens,
            shared_s=engine.kv_token_s * contexts,
            chain_s=engine.empty_s * self.lengths.longest,
            steps_s=engine.empty_s * contexts / (FULL_SHARE * engine.kv_tokens),
            reserved_engines=float(self.num_reserved),
            train_s=self.handover_s + busy_s - finish_s,
            wake_s=self.wake_s,
            start_s=self.start_s,
            fixed_s=finish_s,
        )

    def _is_better_without(self, num_spot: int, alone_s: float, tokens: float) -> bool:
        """Return True if a dear window is better skipped, or skipping it is worth a trial."""
        with_one = self._with_window.get(num_spot)
        if with_one is None or self.wake_s + self.sleep_s < DEAR_SHARE * with_one * tokens:
            return False
        without = self._without.get(num_spot)
        return alone_s < TRY_SHARE * with_one * tokens if without is None else without < with_one

    def _compare(self, seen: StepObservation) -> None:
        """Take in what a token took in a step without churn, with a window or without."""
        if abs(seen.n_prem - seen.n_hat) < SAME_COUNT and seen.num_tokens:
            took = self._without if self.skips_window else self._with_window
            took[seen.n_hat] = _blend(took.get(seen.n_hat), seen.t_step / seen.num_tokens)

    def _learn_slowness(self, num_spot: float, window_s: float, rest_s: float) -> None:
        """Take in how long a rollout took: so long with all engines, so long without the reserved engines."""
        ideal = self._ideal()
        if ideal is None:
            return
        all_engines = num_spot + self.num_reserved
        helped_s = max(0.0, window_s - self.wake_s)
        alone_s = rest_s + window_s - helped_s
        took = helped_s / rollout_s(ideal, all_engines) + alone_s / rollout_s(ideal, num_spot)
        self.slower = _blend(self.slower, took)

    def _learn_start(self, seen: StepObservation, before_s: float) -> None:
        """Take in how long a step took beside training, as far as that was not for want of engines."""
        rates = self.rates()
        if rates is None or not seen.n_hat or before_s <= 0:
            return
        window_s = best_window_s(rates, seen.n_hat)
        if window_s < ENGINES_SHARE * before_s:
            start_s = (before_s**BOTH - window_s**BOTH) ** (1.0 / BOTH)
            self.start_s = _blend(self.start_s or None, start_s)

    def _alone_s(self, num_spot: int, left: float, tokens_per_s: float) -> float:
        """Return the seconds that spot instances take for so many tokens: what it took them in the last
        steps, and at that pace what is more to do now than was then.

        With fewer instances more responses are in the tail: steps that ended with as many as now count alone
        if there are any.
        """
        alike = [roll for roll in self._rollouts if abs(roll.num_spot - num_spot) < SAME_COUNT]
        each = left / num_spot
        took = [roll.seconds + (each - roll.left) / tokens_per_s for roll in alike or self._rollouts]
        return sum(took) / len(took) if took else each / tokens_per_s

    def _present_pace(self, window: OpenWindow, made: float) -> float | None:
        """Return the tokens per second of an instance in the window as it is now; None: not seen yet."""
        if not self._is_woken or window.num_spot != self._looked_with:
            self._marks.clear()
        self._marks.append((window.now, made))
        while len(self._marks) > 1 and self._marks[1][0] <= window.now - PRESENT_S:
            self._marks.popleft()
        since, had = self._marks[0]
        if window.now - since < PRESENT_S or made <= had:
            return None
        return (made - had) / ((window.now - since) * (window.num_spot + self.num_reserved))

    def _tokens(self, book: StepResponses) -> tuple[float, float, float]:
        """Return the tokens left to generate, all of the step, as far as is known, and those so far."""
        left = total = made = 0.0
        for response in book.responses.values():
            so_far = response.num_tokens
            made += so_far
            if response.state is ResponseState.FINISHED:
                total += so_far
                continue
            expected = min(float(response.request.max_tokens), self.lengths.expected(so_far))
            total += expected
            left += max(0.0, expected - so_far)
        return left, total, made


def _blend(known: float | None, seen: float) -> float:
    return seen if known is None else (1.0 - WEIGHT) * known + WEIGHT * seen
