from __future__ import annotations

import json
import math
import typing
from pathlib import Path

import pytest

from rlboost_runtime.coordinator.storage.journal import (
    EventLog,
    EventReader,
    decode_event,
    encode_command,
    encode_event,
    read_events,
)
from rlboost_runtime.core.base import messages as m
from rlboost_runtime.core.core import Core
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.seams import SystemDisk

EVENTS: list[m.Event] = [
    m.RunStarted(0.0, m.CoreConfig(max_spot_instances=3, seeding_eta=math.pi, affinity_slack=0.1 + 0.2)),
    m.CoordinatorRestarted(1e-9),
    m.StepStarted(2.0, 1, 0, (m.ResponseRequest(7, 0, 11, 99), m.ResponseRequest(8, 0, 11, 99))),
    m.StepStarted(2.0, 2, 0, ()),
    m.RequestArrived(2.1, m.ResponseRequest(m.FIRST_REQUEST, m.FIRST_REQUEST, 11, 99)),
    m.RequestWithdrawn(2.2, m.FIRST_REQUEST),
    m.StepTrained(0.1 + 0.2, 1, 5e-324, 1.7976931348623157e308),
    m.VersionPublished(3.0, 0),
    m.LeaseReturned(3.5),
    m.TrainerLost(4.0),
    m.InstanceJoined(4.5, "spot-1/0", "spot-1", m.Pool.SPOT, 3, 16, 100_000),
    m.InstanceReady(5.0, "a", 3, 0),
    m.VersionFetched(5.2, "a", 3, 1),
    m.VersionRefused(5.5, "a", 3, 0, 'digest "x"\nof chunk\u2028 3 ü'),
    m.Slept(6.0, "a", 3),
    m.Heartbeat(6.5, "a", 3, 2**53 + 1, ((1, 2), (3, 4))),
    m.Disconnected(7.0, "a", 3),
    m.Reconnected(7.5, "a", 3, (5, 6)),
    m.NoticeReceived(8.0, "a", 3, 120.0),
    m.InstanceLeft(8.5, "a", 3, m.LossCause.NOTICED),
    m.Finished(9.0, 7, 0, m.FinishReason.LENGTH),
    m.TokensLost(9.1, 7, 40),
    m.EventsLost(9.2, 100, 7, 64),
    m.Released(9.5, "a", 0, 4, m.ReleaseReason.ENGINE_FAILED),
    m.MachineLaunched(10.0, "spot-0"),
    m.LaunchFailed(10.5, "spot-0", "no capacity", 2.5),
    m.MachineGone(11.0, "spot-0"),
    m.RunEnding(11.5, "done"),
    m.Tick(123456789.123456789),
]
COMMANDS: list[m.Command] = [
    m.Assign("a", 1, 0, 2),
    m.Abort("a", 1, 0),
    m.LoadVersion("a", 1, 0),
    m.Sleep("a", 1),
    m.Wake("a", 1),
    m.Evict("a", 1, m.LossCause.HUNG),
    m.DeliverGroup(0, 0),
    m.EndRequest(m.FIRST_REQUEST, m.FinishReason.LENGTH),
    m.GrantLease(0),
    m.RecallLease(0),
    m.LaunchMachine("spot-0"),
    m.TerminateMachine("spot-0", "done"),
]


def replay(folder: Path, lines: list[bytes]) -> tuple[Core, list[list[m.Command]]]:
    log = folder / "events.log"
    log.write_bytes(b"".join(lines))
    core = Core()
    return core, [core.handle(event) for event in read_events(log)]


def test_every_kind_is_covered_here() -> None:
    assert {type(e) for e in EVENTS} == set(typing.get_args(m.Event))
    assert {type(c) for c in COMMANDS} == set(typing.get_args(m.Command))


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_comes_back_exactly(event: m.Event) -> None:
    line = encode_event(event)
    back = decode_event(line)
    assert back == event
    assert repr(back) == repr(event), "types too: enums, tuples, floats"
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_a_command_is_written_exactly(command: m.Command) -> None:
    fields = json.loads(encode_command(command))
    assert fields.pop("command") == type(command).__name__
    assert type(command)(**fields) == command


def test_a_line_of_another_version_is_read_leniently() -> None:
    assert decode_event(b'{"event":"Tick","at":1.5,"phase":"moon"}') == m.Tick(1.5)
    older = decode_event(b'{"event":"RunStarted","at":0.0,"config":{"max_spot_instances":2}}')
    assert older == m.RunStarted(0.0, m.CoreConfig(max_spot_instances=2))


def test_a_heartbeat_of_an_earlier_version_is_read() -> None:
    logged = encode_event(beat := m.Heartbeat(6.5, "a", 3, 7, ((1, 2),)))
    assert decode_event(logged.replace(b'"Heartbeat"', b'"Beat"')) == beat


@pytest.mark.parametrize("line", [b"", b"{", b"7", b'{"event":"Moon"}', b'{"event":"Tick"}', b'{"at":1.0}'])
def test_nonsense_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any problem of the line
        decode_event(line)


@pytest.mark.parametrize("counts", ["[1]", "[1,2,3]", "7"])
def test_a_token_count_that_is_no_pair_is_refused(counts: str) -> None:
    line = encode_event(m.Heartbeat(6.5, "a", 3, 1, ((1, 2),))).decode().replace("[1,2]", counts)
    with pytest.raises(ValueError):  # noqa: PT011 - any problem of the line
        decode_event(line)


def test_a_replay_gives_the_same_commands_and_survives_a_torn_last_line(tmp_path: Path) -> None:
    events = [
        m.RunStarted(0.0, m.CoreConfig(max_spot_instances=1, reserved_instances=0)),
        m.VersionPublished(0.5, 0),
        m.InstanceJoined(1.0, "a", "spot-0", m.Pool.SPOT, 1, 4, 1000),
        m.InstanceReady(1.5, "a", 1, 0),
        m.StepStarted(2.0, 0, 0, (m.ResponseRequest(0, 0, 5, 20),)),
        m.Finished(3.0, 0, 9, m.FinishReason.STOP),
    ]
    lines = [encode_event(e) for e in events]
    core, commands = replay(tmp_path, lines)
    assert [type(c) for batch in commands for c in batch] == [
        m.LaunchMachine,
        m.LoadVersion,
        m.GrantLease,
        m.Assign,
        m.DeliverGroup,
    ]
    assert core.response(0).num_tokens == 9
    torn, fewer = replay(tmp_path, [*lines[:-1], lines[-1][:20]])
    assert fewer == commands[:-1]
    assert torn.response(0).finish_reason is None


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    lines = [encode_event(e) for e in EVENTS[:3]]
    with pytest.raises(RuntimeFault, match=f"line 2 at byte {len(lines[0])} is damaged"):
        replay(tmp_path, [lines[0], lines[1][:9] + b"\n", lines[2]])


def test_any_flipped_bit_of_a_log_is_found_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    written = EventLog(path, SystemDisk())
    for event in EVENTS:
        written.append(event)
    written.close()
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)
    assert list(read_events(path)) == EVENTS
    assert json.loads(lines[1])["event"] == "CoordinatorRestarted", "each line is JSON by itself"
    for place in range(0, len(good) - 1, 7):
        line = good[:place].count(b"\n")
        path.write_bytes(good[:place] + bytes([good[place] ^ 2]) + good[place + 1 :])
        reader = EventReader(path)
        assert list(reader) == EVENTS[:line]
        assert f"line {line + 1} at byte {sum(map(len, lines[:line]))} is damaged" in reader.problem
    path.write_bytes(b"".join([lines[0], lines[2], *lines[3:]]))  # one is missing
    reader = EventReader(path)
    assert list(reader) == EVENTS[:1]
    assert reader.problem


def test_a_log_of_an_older_version_is_read_and_goes_on_with_checksums(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(b"".join(map(encode_event, EVENTS[:3])))
    old = EventReader(path)
    assert list(old) == EVENTS[:3]
    going_on = EventLog(path, SystemDisk(), old.place)
    going_on.append(EVENTS[3])
    reader = EventReader(path)
    assert (list(reader), reader.num_unchecked, reader.problem) == (EVENTS[:4], 3, "")
    path.write_bytes(path.read_bytes() + encode_event(EVENTS[4]))  # none without one comes after that
    assert "line 5" in (next(r.problem for r in [EventReader(path)] if len(list(r)) == 4))


def test_a_finished_response_whose_tokens_were_lost_begins_again() -> None:
    core = Core()
    requests = tuple(m.ResponseRequest(number, 0, 11, 99) for number in (7, 8))
    events: list[m.Event] = [
        m.RunStarted(0.0, m.CoreConfig(max_spot_instances=0)),
        m.VersionPublished(0.5, 0),
        m.StepStarted(1.0, 1, 0, requests),
        m.Finished(2.0, 7, 40, m.FinishReason.STOP),
        m.Finished(2.0, 8, 40, m.FinishReason.STOP),
    ]
    for event in events:
        core.handle(event)
    assert core.complete_groups() == [0]
    core.handle(m.TokensLost(3.0, 7, 40))
    core.handle(m.TokensLost(3.0, 99, 40))  # of another step: nothing
    core.check()
    assert core.complete_groups() == []
    assert core.response(7).finish_reason is None
    core.handle(m.EventsLost(3.5, 1000, 7, 64))
    core.handle(m.InstanceJoined(4.0, "spot-1/0", "spot-1", m.Pool.SPOT, 7, 8, 9999))
    commands = core.handle(m.InstanceReady(5.5, "spot-1/0", 7, 0))
    assert m.Assign("spot-1/0", 7, 1000, 7) in commands
    (delivered,) = core.handle(m.Finished(6.0, 7, 12, m.FinishReason.STOP))[:1]
    assert delivered == m.DeliverGroup(1, 0)
    core.check()
