"""Check a run against the promises, from what it left on disk: event log, token journal, engines' own counts.

The event log is replayed through a fresh core, whose invariants are checked after every event; the journal is
read through a fresh token store; what was trained of episodes is compared with what was sampled (`turns`).
Needs `evidence.keep_journal` (and `evidence.count_tokens` for lost tokens)
in the job. Only reads. A run that ended before its last step was whole has unfinished responses, which are
counted in `unfinished`; in a run that is done they are a problem.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlboost_runtime.audit.turns import SampledTurns
from rlboost_runtime.coordinator.driver.core_driver import (
    FORGOTTEN,
    STEP_HEADER,
    OpenStep,
    StepHeader,
    step_header,
)
from rlboost_runtime.coordinator.driver.totals import RunTotals
from rlboost_runtime.coordinator.storage.journal import EventReader, Journal
from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Assign,
    EventsLost,
    Finished,
    TokensLost,
    VersionPublished,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.trainer.episodes.outcome import EpisodeResult
from rlboost_runtime.trainer.episodes.results import StepKey, kept_steps


@dataclass(slots=True)
class StepAudit:
    """One step's responses as the journal has them; `tokens` by response."""

    step: int
    policy_version: int
    tokens: dict[int, bytes] = field(default_factory=dict)
    prompts: dict[int, bytes] = field(default_factory=dict)
    instances: dict[int, list[str]] = field(default_factory=dict)
    """Where each response was made, in order."""

    @property
    def num_tokens(self) -> int:
        """Accepted tokens; each is an i32."""
        return sum(map(len, self.tokens.values())) // 4


@dataclass(slots=True)
class Audit:
    """What was found. `problems` is empty when every promise that was checked held."""

    problems: list[str] = field(default_factory=list)
    requested: int = 0
    finished: int = 0
    cancelled: int = 0
    unfinished: int = 0
    """Responses that were under way when the run ended."""
    assignments: Counter[int] = field(default_factory=Counter)
    """Assignments per response."""
    carried_to: dict[int, int] = field(default_factory=dict)
    """By a response of a step that was opened again: the response that took its tokens over."""
    tokens_accepted: int = 0
    tokens_generated: int | None = None
    """By the engines' own count; None where they did not count."""
    lost: dict[int, int] = field(default_factory=dict)
    """Tokens per response that an engine generated and the coordinator did not accept; only responses that
    lost any."""
    said: dict[int, int] = field(default_factory=dict)
    """Tokens per finished response, as the event log has them."""
    requests: int = 0
    """What the endpoint was asked for, turns of episodes among it."""
    turns_trained: int = 0
    """Turns whose tokens were trained, each of them compared with what was sampled."""
    commands_digest: str = ""
    steps: list[StepAudit] = field(default_factory=list)


def audit(run: RunFolder) -> Audit:
    """Read everything and return what was found."""
    found = Audit()
    core, totals = Core(), RunTotals()
    finished: Counter[int] = Counter()
    said_of_requests: Counter[int] = Counter()
    response_of: dict[int, int] = {}
    has_lost_events = False
    published: set[int] = set()
    events = EventReader(run.events)
    for event in events:
        has_lost_events |= isinstance(event, EventsLost)
        commands = core.handle(event)
        core.check()
        totals.observe(event, commands, core)
        if isinstance(event, Finished) and event.response < FIRST_REQUEST:
            finished[event.response] += 1
            found.said[event.response] = event.num_tokens
        elif isinstance(event, Finished):
            said_of_requests[event.response] = event.num_tokens
        if isinstance(event, TokensLost):
            finished[event.response] -= 1
        if isinstance(event, VersionPublished):
            published.add(event.version)
        for command in commands:
            if isinstance(command, Assign):
                found.assignments[command.response] += 1
                response_of[command.assignment] = command.response
    if events.problem:
        found.problems.append(events.problem)
    finished = +finished
    found.commands_digest = totals.commands_digest
    found.requested = totals.requested
    finished.update(core.counters.quarantined)
    found.finished = len(finished)
    found.cancelled = core.counters.cancelled
    is_done = (read_json(run.outcome) or {}).get("state", "done") == "done"
    num_unfinished = sum(step.num_unfinished for step in core.open_steps)
    open_steps = set() if is_done else {step.step for step in core.open_steps}
    found.unfinished = 0 if is_done else num_unfinished
    unsaid = num_unfinished if is_done and has_lost_events else 0  # all that came later is lost
    if found.requested != found.finished + found.cancelled + found.unfinished + unsaid:
        found.problems.append(
            f"{found.requested} responses requested, {found.finished} finished, {found.cancelled} cancelled"
        )
    lengths: dict[int, int] = {}
    turns = SampledTurns.read(run.requests)
    episodes = _Episodes(turns, {key.step: (key, results) for key, results in kept_steps(run.episodes)})
    for segment in sorted(run.journal.glob("step-*.seg")):
        step = int(segment.stem.split("-")[1])
        audited = _audit_step(
            run,
            step,
            finished,
            lengths,
            found,
            episodes,
            published=published,
            is_open=step in open_steps,
            has_lost_events=has_lost_events,
        )
        found.steps.append(audited)
    if not run.restored.exists():  # the lost head's requests are not all there
        turns.check_lengths(said_of_requests)
    found.problems += turns.problems
    found.requests, found.turns_trained = len(turns.requests), turns.num_trained
    lengths |= {n: len(tokens.ids) for n, tokens in turns.requests.items() if tokens.reason is not None}
    found.tokens_accepted = sum(lengths.values())
    _count_lost(run, response_of, lengths, found)
    return found


@dataclass(slots=True)
class _Episodes:
    """Episodes that the trainer has kept, by step, and the turns that they were made of."""

    turns: SampledTurns
    kept: dict[int, tuple[StepKey, dict[int, EpisodeResult]]]

    def audit(self, result: StepAudit, header: StepHeader, num: int, found: Audit, *, is_open: bool) -> None:
        """Compare a step's episodes with its turns."""
        nothing = StepKey(result.step, result.policy_version, ""), dict[int, EpisodeResult]()
        key, results = self.kept.get(result.step, nothing)
        if key.policy_version != result.policy_version:
            found.problems.append(
                f"step {result.step}: its episodes were played under version {key.policy_version},"
                f" not {result.policy_version}"
            )
        firsts = (header.first_response, *header.carried_from)
        for number in range(num):
            response, episode = header.first_response + number, results.get(number)
            if episode is None:
                if not is_open:
                    found.problems.append(f"step {result.step}: nothing was kept of episode {number}")
                continue
            said = found.said.get(response, episode.num_sampled)
            if said != episode.num_sampled:
                found.problems.append(
                    f"step {result.step}: episode {number}: {said} tokens said, {episode.num_sampled} kept"
                )
            made, wrong = self.turns.of_episode(
                [first + number for first in firsts], episode, result.policy_version
            )
            found.problems += [f"step {result.step}: episode {number}: {each}" for each in wrong]
            result.tokens[response] = b"".join(turn.ids.tobytes() for turn in made)
            result.instances[response] = [name for turn in made for _, name, _ in turn.segments]


def _audit_step(
    run: RunFolder,
    step: int,
    finished: Counter[int],
    lengths: dict[int, int],
    found: Audit,
    episodes: _Episodes,
    *,
    published: set[int],
    is_open: bool,
    has_lost_events: bool,
) -> StepAudit:
    """`published`: all versions, of which a step with in-flight updates may have those from its own on.

    `has_lost_events`: a power cut may have taken the events of the step's end; then the journal says which
    responses were finished. It may have taken publications too; then any version from the step's own on is
    allowed.
    """
    problems = found.problems
    reader = Journal.read(run.journal, step)
    records = iter(reader)
    opening = next(records, None)
    if opening is None:
        problems.append(reader.problem or f"{reader.path} is empty")
        return StepAudit(step, -1)
    header = step_header(opening)
    opened = OpenStep(header.request, header.first_response)
    store = TokenStore()
    store.open_step(step, opened.all_responses(), opened.limits(), header.request.stop_token_ids)
    for record in records:
        if record.startswith(STEP_HEADER):
            former, opened = opened, OpenStep(step_header(record).request, header.first_response)
            store.extend(opened.limits()[len(former.all_responses()) :])
        elif record.startswith(FORGOTTEN):
            for response in msgspec.msgpack.decode(record[1:], type=list[int]):
                store.forget(response)
        else:
            store.restore(record[1:])
    store.check()
    if reader.problem and not (reader.is_torn and is_open):
        problems.append(reader.problem)
    asked = header.request.policy_version
    result = StepAudit(step, asked)
    is_in_flight = header.request.in_flight_updates

    def may_have(version: int) -> bool:
        return version == asked or (
            is_in_flight and version > asked and (has_lost_events or version in published)
        )

    if header.request.are_episodes:
        episodes.audit(result, header, len(opened.all_responses()), found, is_open=is_open)
    for response in opened.all_responses() if not header.request.are_episodes else ():
        is_whole = has_lost_events and store.is_complete(response) is not None
        if finished[response] == 0 and not is_open and not is_whole:
            problems.append(f"step {step}: response {response} never finished")
        segments = store.segments(response)
        versions = {segment.policy_version for segment in segments}
        if not all(map(may_have, versions)):
            problems.append(f"step {step}: response {response} has tokens of versions {sorted(versions)}")
        lengths[response] = store.length(response)
        if finished[response] and found.said.get(response, lengths[response]) != lengths[response]:
            said = f"{found.said[response]} tokens said, {lengths[response]} in the journal"
            problems.append(f"step {step}: response {response}: {said}")
        for first in header.carried_from:
            found.carried_to[first + response - header.first_response] = response
        result.tokens[response] = store.token_ids(response)
        result.prompts[response] = opened.prompt_of(response).token_ids
        result.instances[response] = [segment.instance for segment in segments]
    return result


def _count_lost(run: RunFolder, response_of: dict[int, int], lengths: dict[int, int], found: Audit) -> None:
    if run.restored.exists():  # the lost head had counts of its own
        return
    generated: dict[int, int] = defaultdict(int)
    counted = False
    for assignment, count in _side_counts(run.path):
        counted = True
        response = response_of.get(assignment)
        response = None if response is None else found.carried_to.get(response, response)
        if response is not None and response in lengths:
            generated[response] += count
    if not counted:
        return
    found.tokens_generated = sum(generated.values())
    for response, accepted in lengths.items():
        missing = generated[response] - accepted
        if missing > 0:
            found.lost[response] = missing
        elif missing < 0:
            found.problems.append(
                f"response {response}: {accepted} accepted, only {generated[response]} generated"
            )


def _side_counts(folder: Path) -> Iterator[tuple[int, int]]:
    for path in folder.rglob("*.tokens"):
        for line in path.read_text().splitlines():
            match = re.fullmatch(r"(\d+) (\d+) (\d+)", line)
            if match:
                yield int(match[1]), int(match[2])
