"""The copy of a head at the job's output, a folder: what is there after each round, and what comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from obstore import exceptions

from rlboost_runtime.backup import fence, restore
from rlboost_runtime.backup import growing as growing_file
from rlboost_runtime.backup import streamer as streaming
from rlboost_runtime.backup.fence import HeadReplaced
from rlboost_runtime.backup.layout import FORMAT, PART_BYTES, claim_key, part_key, state_key
from rlboost_runtime.backup.note import backup_status
from rlboost_runtime.backup.restore import Restored
from rlboost_runtime.backup.streamer import Streamer
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.storage.journal import EventReader, SegmentReader
from rlboost_runtime.errors import ConfigError, NotFound, RuntimeFault
from rlboost_runtime.run.bucket import COMPLETE
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer.artifacts.output import OutputCopies
from tests.fakes.heads import Head

if TYPE_CHECKING:
    pass


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    made = Head(tmp_path / "home", tmp_path / "out")
    made.book()
    made.ticks(1.0, 2.0)
    made.run.metrics.write_text('{"step": 0}\n')
    (made.run.files / "rewards.py").write_text("def score(prompt, response):\n    return 0.0\n")
    return made


def brought(head: Head, tmp_path: Path, name: str = "draft") -> tuple[RunFolder, Restored]:
    draft = RunFolder(tmp_path / name / "r")
    draft.path.mkdir(parents=True)
    state = restore.find_copy(head.bucket, head.url)
    return draft, restore.download(head.bucket, state, draft, head.url, lambda words: None)


def test_what_was_copied_comes_back(head: Head, tmp_path: Path) -> None:
    head.checkpoint(3)
    assert head.streamer().round() is False
    draft, found = brought(head, tmp_path)
    assert (found.checkpoint, found.problems) == ("step-000003", [])
    for name in ("events.log", "metrics.jsonl", "job.json", "files/rewards.py"):
        assert (draft.path / name).read_bytes() == (head.run.path / name).read_bytes()
    assert (draft.checkpoints / "step-000003" / "weights.bin").read_bytes() == b"weights" * 1000
    assert [event.at for event in EventReader(draft.events)] == [1.0, 2.0]
    assert draft.events.stat().st_mtime == pytest.approx(head.state().at, abs=1e-3)
    ledger = Ledger(draft.ledger)
    assert ledger.open_machines() == ["spot-1"]
    ledger.close()
    status = backup_status(head.run, head.state().at + 7.0)
    assert status is None  # `attempt` says it, `round` does not


def test_no_secret_is_copied(head: Head) -> None:
    head.run.token.parent.mkdir()
    head.run.token.write_text("secret-token")
    head.run.environment.write_text('{"HF_TOKEN": "secret-value"}')
    head.streamer().round()
    everything = b"".join(path.read_bytes() for path in head.output.rglob("*") if path.is_file())
    assert b"secret-token" not in everything
    assert b"secret-value" not in everything
    assert b"local-0" in everything


def test_each_round_sends_only_what_is_new(head: Head) -> None:
    streamer = head.streamer()
    assert not streamer.attempt()
    before = backup_status(head.run)
    assert before is not None
    assert before.lag_bytes == 0
    streamer.attempt()
    same = backup_status(head.run)
    assert same is not None
    assert same.requests == before.requests + 1  # the state alone
    head.ticks(3.0)
    streamer.attempt()
    after = backup_status(head.run)
    assert after is not None
    assert after.requests == same.requests + 2
    assert head.state().grown["events.log"].size == head.run.events.stat().st_size


def test_a_file_of_several_parts_comes_back_whole(head: Head, tmp_path: Path) -> None:
    segment = head.run.journal / "step-000000.seg"
    content = os.urandom(2 * PART_BYTES + 1234)
    streamer = head.streamer()
    for size in (10, PART_BYTES, PART_BYTES + 1, len(content)):
        segment.write_bytes(content[:size])
        streamer.round()
    draft, found = brought(head, tmp_path)
    assert (draft.journal / segment.name).read_bytes() == content
    assert found.problems == []
    # another process goes on where this one was
    streamer.close()
    segment.write_bytes(content + b"more")
    head.streamer().round()
    assert head.state().grown[f"journal/{segment.name}"].life == 0
    assert (brought(head, tmp_path, "again")[0].journal / segment.name).read_bytes() == content + b"more"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_began_anew_is_another_life(head: Head, tmp_path: Path, restarted: bool) -> None:
    segment = head.run.journal / "step-000000.seg"
    segment.write_bytes(b"a" * 5000)
    streamer = head.streamer()
    streamer.round()
    segment.write_bytes(b"b" * 9000)  # emptied, and already longer than before
    (head.streamer() if restarted else streamer).round()
    copy = head.state().grown[f"journal/{segment.name}"]
    assert (copy.life, copy.size) == (1, 9000)
    draft, _ = brought(head, tmp_path)
    assert (draft.journal / segment.name).read_bytes() == b"b" * 9000
    assert not head.there(part_key(1, f"journal/{segment.name}", 0, 0)).exists()


def test_metrics_that_were_rewound_come_back_as_they_are(head: Head, tmp_path: Path) -> None:
    streamer = head.streamer()
    head.run.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    streamer.round()
    other = head.run.path / "other"
    other.write_text('{"step": 0}\n')
    os.replace(other, head.run.metrics)
    streamer.round()
    assert brought(head, tmp_path)[0].metrics.read_text() == '{"step": 0}\n'


def test_the_journal_there_is_never_behind_the_event_log(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = head.run.journal / "step-000000.seg"
    segment.write_bytes(b"first")
    streamer = head.streamer()
    real: Callable[..., int] = growing_file.GrowingFile.advance

    def advance(file: Any, *arguments: Any) -> int:
        sent = real(file, *arguments)
        if file.name.startswith("journal/"):  # right after the journal was copied, both go on
            with segment.open("ab") as more:
                more.write(b"more")
            head.ticks(9.0)
        return sent

    monkeypatch.setattr(growing_file.GrowingFile, "advance", advance)
    length = head.run.events.stat().st_size
    streamer.round()
    assert head.state().grown["journal/step-000000.seg"].size == len(b"first")
    assert head.state().grown["events.log"].size == length


def test_a_backlog_is_sent_over_several_rounds(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    streamer = head.streamer()
    streamer.round()
    monkeypatch.setattr(streaming, "ROUND_BYTES", PART_BYTES)
    (head.run.journal / "step-000000.seg").write_bytes(os.urandom(3 * PART_BYTES))
    head.ticks(3.0)
    at, length = head.state().at, head.state().grown["events.log"].size
    assert streamer.round() is True
    assert (head.state().at, head.state().grown["events.log"].size) == (at, length)
    rounds = 1
    while streamer.round():
        rounds += 1
    assert rounds >= 2
    assert head.state().at > at
    assert head.state().grown["events.log"].size > length


def test_a_large_ledger_makes_the_pause_longer(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    streamer = head.streamer()
    assert streamer.pause_s == streaming.EVERY_S
    monkeypatch.setattr(streaming, "SMALL_BYTES_PER_S", head.run.ledger.stat().st_size / 100)
    streamer.round()
    assert streamer.pause_s >= 100.0
    streamer.round()  # nothing of it is new
    assert streamer.pause_s == streaming.EVERY_S


def test_a_deleted_segment_stays_there_until_a_checkpoint_makes_up_for_it(head: Head) -> None:
    segment = head.run.journal / "step-000003.seg"
    segment.write_bytes(b"tokens of step 3")
    streamer = head.streamer()
    streamer.round()
    head.checkpoint(3, copied=False)
    segment.unlink()
    streamer.round()
    assert "journal/step-000003.seg" in head.state().grown
    streamer = head.streamer()  # also for another process
    streamer.round()
    assert "journal/step-000003.seg" in head.state().grown
    copies = OutputCopies(str(head.output), head.run, keep=2)
    copies.begin(is_new=False)
    copies.checkpoint(head.run.checkpoints / "step-000003")
    copies.close()
    streamer.round()
    assert "journal/step-000003.seg" not in head.state().grown
    assert not head.there(part_key(1, "journal/step-000003.seg", 0, 0)).exists()


# --- what is damaged there ---------------------------------------------------------------------------------


def test_a_missing_part_cuts_the_file(head: Head, tmp_path: Path) -> None:
    segment = head.run.journal / "step-000000.seg"
    content = os.urandom(2 * PART_BYTES)
    segment.write_bytes(content)
    head.streamer().round()
    head.there(part_key(1, f"journal/{segment.name}", 0, 1)).unlink()
    draft, found = brought(head, tmp_path)
    assert (draft.journal / segment.name).read_bytes() == content[:PART_BYTES]
    assert found.problems == [f"journal/{segment.name}: {PART_BYTES} of {2 * PART_BYTES} bytes are missing"]


def test_a_torn_part_is_said_and_its_reader_stops_before_it(head: Head, tmp_path: Path) -> None:
    head.ticks(3.0, 4.0)
    head.streamer().round()
    path = head.there(part_key(1, "events.log", 0, 0))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"Tick")] ^= 1
    path.write_bytes(data)
    draft, found = brought(head, tmp_path)
    assert found.problems == ["events.log: its checksum is another one"]
    reader = EventReader(draft.events)
    assert [event.at for event in reader] == [1.0, 2.0, 3.0]
    assert "is damaged" in reader.problem


def test_what_lies_beyond_the_state_does_not_count(head: Head, tmp_path: Path) -> None:
    head.streamer().round()
    path = head.there(part_key(1, "events.log", 0, 0))
    path.write_bytes(path.read_bytes() + b"of a round that never wrote its state")
    draft, found = brought(head, tmp_path)
    assert found.problems == []
    assert draft.events.read_bytes() == head.run.events.read_bytes()


def test_a_ledger_that_is_not_as_it_was_written_is_refused(head: Head, tmp_path: Path) -> None:
    head.streamer().round()
    path = head.there(head.state().whole["ledger.sqlite"].key)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeFault, match=r"damaged: ledger.sqlite: its checksum is another one"):
        brought(head, tmp_path)


@pytest.mark.parametrize("how", ["flipped", "missing", "not whole", "another head's"])
def test_an_unfit_checkpoint_falls_back_to_the_one_before(head: Head, tmp_path: Path, how: str) -> None:
    head.checkpoint(3)
    head.checkpoint(4)
    head.streamer().round()
    folder = head.there("checkpoints/step-000004")
    match how:
        case "flipped":
            (folder / "weights.bin").write_bytes(b"Weights" * 1000)
        case "missing":
            (folder / "weights.bin").unlink()
        case "not whole":
            (folder / COMPLETE).unlink()
        case _:
            complete = json.loads((folder / COMPLETE).read_bytes())
            complete["digests.json"]["sha256"] = "0" * 64
            (folder / COMPLETE).write_text(json.dumps(complete))
    draft, found = brought(head, tmp_path)
    assert found.checkpoint == "step-000003"
    assert [path.name for path in draft.checkpoints.iterdir()] == ["step-000003"]
    assert found.problems[0].startswith("checkpoint step-000004: ")
    assert not any(folder.glob("*"))  # the new head must not take it for its own


def test_a_checkpoint_that_the_event_log_does_not_cover_is_not_used(head: Head, tmp_path: Path) -> None:
    head.checkpoint(3)
    head.streamer().round()
    head.checkpoint(4)  # it arrives, and then the head is lost
    assert brought(head, tmp_path)[1].checkpoint == "step-000003"


def test_without_any_whole_checkpoint_nothing_is_restored(head: Head, tmp_path: Path) -> None:
    head.checkpoint(3)
    head.streamer().round()
    head.there("checkpoints/step-000003/weights.bin").unlink()
    with pytest.raises(RuntimeFault, match="no checkpoint of r is whole"):
        brought(head, tmp_path)
    assert head.there(f"checkpoints/step-000003/{COMPLETE}").exists()


def test_names_from_the_bucket_stay_in_the_folder(head: Head, tmp_path: Path) -> None:
    head.streamer().round()
    state = head.state()
    state.whole["../evil"] = state.whole["job.json"]
    state.grown["../../evil"] = state.grown["events.log"]
    head.there(state_key(1)).write_bytes(msgspec.json.encode(state))
    brought(head, tmp_path)
    assert not list(tmp_path.rglob("evil"))


# --- who is the head ---------------------------------------------------------------------------------------


def test_a_head_that_finds_a_newer_one_says_so_and_stops(head: Head) -> None:
    streamer = head.streamer()
    streamer.attempt()
    fence.claim(head.bucket, RunFolder(head.run.path.parent), 2)
    with pytest.raises(HeadReplaced, match="another machine is the head of r now"):
        streamer.attempt()
    with pytest.raises(HeadReplaced):  # also when it comes back
        head.streamer().attempt()
    assert streaming.last_round(head.run, head.job) is False


def test_of_two_that_become_the_head_one_does(head: Head, tmp_path: Path) -> None:
    others = [RunFolder(tmp_path / name / "r") for name in ("a", "b")]
    for other in others:
        other.path.mkdir(parents=True)
    fence.claim(head.bucket, others[0], 1)
    with pytest.raises(HeadReplaced):
        fence.claim(head.bucket, others[1], 1)
    assert [fence.own_number(other) for other in others] == [1, None]


def test_a_live_head_is_not_replaced(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamer = head.streamer()
    streamer.round()
    draft = RunFolder(tmp_path / "draft" / "r")
    draft.path.mkdir(parents=True)
    monkeypatch.setattr(restore.time, "sleep", lambda seconds: streamer.round())
    ages = iter([5.0, 0.2])
    monkeypatch.setattr(restore, "silent_for", lambda bucket, number: next(ages))
    with pytest.raises(ConfigError, match="another head of r is alive: it copied to"):
        restore.take_over(head.bucket, draft, head.state(), head.url, lambda words: None)
    assert not head.there(claim_key(2)).exists()


def test_a_silent_head_is_replaced(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head.streamer().round()
    draft = RunFolder(tmp_path / "draft" / "r")
    draft.path.mkdir(parents=True)
    assert 0.0 <= fence.silent_for(head.bucket, 1) < 5.0
    monkeypatch.setattr(restore, "SILENT_S", 0.3)
    monkeypatch.setattr(restore, "_LOOK_S", 0.1)
    said: list[str] = []
    assert restore.take_over(head.bucket, draft, head.state(), head.url, said.append) == 2
    assert said
    assert fence.own_number(draft) == 2
    assert not list(head.there("head").glob("clock-*"))


def test_a_new_run_does_not_write_over_the_copy_of_an_open_one(head: Head, tmp_path: Path) -> None:
    head.streamer().round()
    other = Head(tmp_path / "elsewhere", head.output)
    other.book()
    streamer = other.streamer()
    assert streamer.attempt() is False
    status = backup_status(other.run)
    assert status is not None
    assert "has not ended" in status.problem
    head.run.outcome.write_text('{"state": "stopped"}')
    assert streaming.last_round(head.run, head.job)
    streamer.attempt()
    assert fence.own_number(other.run) == 2


def test_the_copies_of_the_heads_before_are_deleted_by_the_restored_one(head: Head, tmp_path: Path) -> None:
    head.streamer().round()
    draft, _ = brought(head, tmp_path)
    fence.claim(head.bucket, draft, 2)
    draft.restored.write_text('{"taken": false}')
    streamer = Streamer(draft, head.job, head.bucket)
    streamer.round()
    assert head.state(2).head == 2
    assert not [path for path in head.there("head/000001").rglob("*") if path.is_file()]


# --- places that cannot be resumed from --------------------------------------------------------------------


def test_an_empty_place_has_no_copy(head: Head) -> None:
    with pytest.raises(NotFound, match="there is no copy of a head at file:"):
        restore.find_copy(head.bucket, head.url)


def test_a_run_that_is_done_is_not_resumed(head: Head) -> None:
    head.run.outcome.write_text('{"state": "done"}')
    head.streamer().round()
    with pytest.raises(ConfigError, match="r is done: there is nothing to resume"):
        restore.find_copy(head.bucket, head.url)


def test_another_format_is_not_read(head: Head) -> None:
    head.streamer().round()
    said = json.loads(head.there(state_key(1)).read_bytes()) | {"format": FORMAT + 1, "version": "9.9"}
    head.there(state_key(1)).write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=rf"written by RLBoost 9\.9 in format {FORMAT + 1}"):
        restore.find_copy(head.bucket, head.url)


# --- failures of the bucket --------------------------------------------------------------------------------


def test_a_bucket_that_refuses_is_said_and_tried_again(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    streamer = head.streamer()
    streamer.attempt()
    at = head.state().at
    real = streaming.obstore.put

    def refuse(*_: Any, **__: Any) -> None:
        raise exceptions.GenericError("503 Slow Down\nmore")

    monkeypatch.setattr(streaming.obstore, "put", refuse)
    head.ticks(5.0)
    assert streamer.attempt() is False
    status = backup_status(head.run, at + 100.0)
    assert status is not None
    assert (status.problem, status.lag_s) == ("503 Slow Down", 100.0)
    assert status.lag_bytes > 0
    monkeypatch.setattr(streaming.obstore, "put", real)
    streamer.attempt()
    status = backup_status(head.run)
    assert status is not None
    assert (status.problem, status.lag_bytes) == ("", 0)


def test_no_error_of_ours_ends_the_run(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    streamer = head.streamer()
    monkeypatch.setattr(Streamer, "_complete_checkpoints", lambda self: {}["a mistake"])
    assert streamer.attempt() is False
    status = backup_status(head.run)
    assert status is not None
    assert status.problem == "'a mistake'"


def test_a_backlog_after_a_failed_round_leaves_the_event_log_as_it_was(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round sent the event log and failed before its state: the ledger of the last state is behind it."""
    streamer = head.streamer()
    streamer.attempt()
    length = head.state().grown["events.log"].size
    head.ticks(3.0)
    real = streaming.obstore.put

    def refuse(bucket: Any, key: str, *arguments: Any, **options: Any) -> None:
        if key == state_key(1):
            raise exceptions.GenericError("503")
        real(bucket, key, *arguments, **options)

    monkeypatch.setattr(streaming.obstore, "put", refuse)
    streamer.attempt()
    monkeypatch.setattr(streaming.obstore, "put", real)
    monkeypatch.setattr(streaming, "ROUND_BYTES", PART_BYTES)
    (head.run.journal / "step-000000.seg").write_bytes(os.urandom(3 * PART_BYTES))
    assert streamer.attempt() is True
    assert head.state().grown["events.log"].size == length
    while streamer.attempt():
        pass
    assert head.state().grown["events.log"].size > length


def test_a_torn_journal_of_the_copy_is_cut_where_it_is_damaged(head: Head, tmp_path: Path) -> None:
    segment = head.run.journal / "step-000000.seg"
    segment.write_bytes(b"\0\0\0\0RLJ2" + b"\x10\0\0\0 torn")
    head.streamer().round()
    draft, found = brought(head, tmp_path)
    reader = SegmentReader(draft.journal / segment.name)
    assert list(reader) == []
    assert reader.is_torn
    assert found.problems == []
