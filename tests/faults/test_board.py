"""TensorBoard's files, read back as TensorBoard reads them."""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raytf.faults.board import Board, Point, Points, Rewind
from raytf.faults.events import Event, Kind
from tests.faults import logs


@dataclass
class Seen:
    """What TensorBoard would show of a directory."""

    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    hparams: set[str] = field(default_factory=set)
    torn: int = 0


def records(data: bytes) -> Iterable[bytes | None]:
    """The records of an event file; None for a torn one, with which reading ends."""
    from tensorboardX.record_writer import masked_crc32c

    at = 0
    while at < len(data):
        head = data[at : at + 12]
        length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else None
        if length is None or struct.unpack("<I", head[8:])[0] != masked_crc32c(head[:8]):
            yield None
            return
        body, tail = data[at + 12 : at + 12 + length], data[at + 12 + length : at + 16 + length]
        if len(tail) != 4 or struct.unpack("<I", tail)[0] != masked_crc32c(body):
            yield None
            return
        yield body
        at += 16 + length


def read(directory: Path) -> Seen:
    """As TensorBoard does: files in order of name; a restart mark drops what is at or behind it,
    but for the first, which is taken for the start of the run.
    """
    from tensorboardX.proto.event_pb2 import Event as Proto
    from tensorboardX.proto.event_pb2 import SessionLog
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    seen, starts = Seen(), 0
    for path in sorted(directory.iterdir()):
        assert "tfevents" in path.name
        found = list(records(path.read_bytes()))
        seen.torn += found[-1] is None
        for number, record in enumerate(r for r in found if r is not None):
            event = Proto.FromString(record)
            assert (number == 0) == (event.file_version == "brain.Event:2")
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                starts += 1
                for series in () if starts == 1 else (*seen.scalars.values(), *seen.texts.values()):
                    series[:] = [point for point in series if point[0] < event.step]
            for value in event.summary.value:
                plugin = value.metadata.plugin_data
                if plugin.plugin_name == "hparams":
                    data = HParamsPluginData.FromString(plugin.content)
                    seen.hparams |= set(data.session_start_info.hparams)
                elif plugin.plugin_name == "text":
                    text = value.tensor.string_val[0].decode()
                    seen.texts[value.tag.removesuffix("/text_summary")].append((event.step, text))
                else:
                    seen.scalars[value.tag].append((event.step, value.simple_value))
    return seen


def board(directory: Path, attempt: int = 1, **options: Any) -> Board:
    return Board(str(directory), attempt=attempt, **options)


def show(directory: Path, events: Iterable[Event], **options: Any) -> Seen:
    made = board(directory, **options)
    for event in events:
        made.add(event)
    assert made.close(30)
    assert made.dropped == 0
    return read(directory)


def steps(seen: Seen, tag: str) -> list[int]:
    return [step for step, _ in seen.scalars[tag]]


def test_an_unbroken_run(tmp_path: Path) -> None:
    log = logs.unbroken()
    seen = show(tmp_path / "a" / "tensorboard", log.events)
    assert steps(seen, "train/loss") == list(range(5, 201, 5))
    assert steps(seen, "epoch/val_loss") == steps(seen, "epoch/loss") == [50, 100, 150, 200]
    assert steps(seen, "save/seconds") == list(range(25, 201, 25))
    reports = [e for e in log.events if e.kind is Kind.STEP_REACHED]
    told = [e.fields["logs"]["loss"] for e in reports]
    assert [v for _, v in seen.scalars["train/loss"]] == pytest.approx(told)
    assert seen.scalars["throughput/examples_per_s"][0][1] == pytest.approx(1152.0)
    assert 0.3 < seen.scalars["run/goodput"][-1][1] < 0.6
    assert seen.scalars["run/restarts"][-1][1] == 0
    assert "faults" not in seen.texts


@pytest.mark.parametrize("name", ["killed", "hang", "driver_death"])
def test_one_line_over_restarts(tmp_path: Path, name: str) -> None:
    seen = show(tmp_path, logs.ALL[name]().events)
    for tag, series in seen.scalars.items():
        line = [step for step, _ in series]
        assert line == sorted(set(line)), tag
    assert steps(seen, "train/loss")[-1] == 200
    assert steps(seen, "epoch/val_loss") == [50, 100, 150, 200]
    assert seen.scalars["run/restarts"][-1][1] == 1
    assert seen.scalars["run/lost_steps"][-1][1] > 0
    table = seen.texts["faults"][-1][1]
    assert table.count("\n") == 2  # head, rule, one row


def test_the_points_of_the_way_not_taken_are_gone(tmp_path: Path) -> None:
    seen = show(tmp_path, logs.killed().events)
    assert 137 not in steps(seen, "train/loss") and 130 in steps(seen, "train/loss")
    row = seen.texts["faults"][-1][1].splitlines()[-1]
    for part in (
        "killed",
        "| 1 |",
        "node-1",
        "step, step 137",
        "exit signal 9",
        "failure 1 of 3",
        "7.0 s, 12",
    ):
        assert part in row


def test_a_new_driver_goes_on(tmp_path: Path) -> None:
    """Two boards, one after the other, as attempts 1 and 2 write them."""
    events = logs.driver_death().events
    first = [e for e in events if e.attempt == 1]
    second = [e for e in events if e.attempt == 2]
    show(tmp_path, first)
    seen = show(tmp_path, second, attempt=2, past=iter(first))
    whole = show(tmp_path.with_name("whole"), events)
    assert seen.scalars == whole.scalars
    assert seen.texts["faults"][-1] == whole.texts["faults"][-1]
    assert len(list(tmp_path.iterdir())) == 2


def test_without_its_past_it_goes_on_too(tmp_path: Path) -> None:
    events = logs.driver_death().events
    show(tmp_path, [e for e in events if e.attempt == 1])
    seen = show(tmp_path, [e for e in events if e.attempt == 2], attempt=2)
    line = steps(seen, "train/loss")
    assert line == sorted(set(line)) and line[-1] == 200


def test_boards_of_one_attempt_do_not_write_over_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        show(tmp_path, logs.unbroken().events[:10])
    assert len(list(tmp_path.iterdir())) == 3


def test_steps_that_go_back_untold_are_a_rewind() -> None:
    points = Points()

    def report(step: int) -> list[Point | Rewind]:
        event = Event(
            time=float(step),
            kind=Kind.STEP_REACHED,
            run="r",
            attempt=1,
            step=step,
            fields={"logs": {"loss": 1.0}},
        )
        return points.of(event)

    report(10)
    assert not [p for p in report(20) if isinstance(p, Rewind)]
    back = report(15)
    assert back[0] == Rewind(15, 15.0) and Point("train/loss", 15, 15.0, 1.0) in back
    assert not [p for p in report(15) if isinstance(p, Rewind)]  # told twice


def test_numbers_only_and_nan(tmp_path: Path) -> None:
    seen = show(tmp_path, logs.nan().events)
    assert math.isnan(seen.scalars["train/loss"][-1][1])
    odd = Event(
        time=1.0,
        kind=Kind.STEP_REACHED,
        run="r",
        attempt=1,
        step=1,
        rank=0,
        fields={"logs": {"a": "text", "b": True, "c": None, "d": [1], "e": 2}, "seconds": "x"},
    )
    seen = show(tmp_path / "odd", [odd, *[Event(time=2.0, kind="new", run="r", attempt=1)]])
    assert {tag for tag in seen.scalars if tag.startswith("train")} == {"train/e"}


def test_texts_cannot_become_markup(tmp_path: Path) -> None:
    seen = show(tmp_path, logs.hostile().events)
    table = seen.texts["faults"][-1][1]
    assert "<" not in table and "`" not in table
    assert all(line.count("|") == 9 for line in table.splitlines())


def test_config_and_secrets(tmp_path: Path) -> None:
    config = {"lr": 1e-3, "data": {"rows": 10, "url": "s3://key:pass@bucket"}, "api_key": "xyz"}
    seen = show(tmp_path, logs.unbroken().events[:12], config=config)
    text = seen.texts["config"][0][1]
    assert "| lr | 0.001 |" in text and "| data.rows | 10 |" in text
    assert "xyz" not in text and "pass" not in text
    assert seen.hparams == {"lr", "data.rows", "data.url", "api_key"}


def test_files_are_uploaded(tmp_path: Path) -> None:
    sent: dict[str, bytes] = {}
    made = board(
        tmp_path,
        sync=lambda path: sent.__setitem__(Path(path).name, Path(path).read_bytes()),
        sync_s=0.0,
        part_bytes=2000,
    )
    for event in logs.killed().events:
        made.add(event)
    assert made.flush(30)
    assert made.close(30)
    here = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sent == here
    assert len(sent) > 2  # whole files are sent: they must stay small
    assert read(tmp_path).torn == 0


def test_an_upload_that_fails_is_tried_again(tmp_path: Path, caplog: Any) -> None:
    tries: list[str] = []

    def sync(path: str) -> None:
        tries.append(path)
        if len(tries) < 3:
            raise OSError("503 https://user:secret@store")

    made = board(tmp_path, sync=sync)
    made.add(logs.unbroken().events[8])
    with caplog.at_level(logging.WARNING, "raytf"):
        assert [made.flush(30) for _ in range(3)][-1]
    assert made.close(30)
    assert len(tries) == 3
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1 and "the run goes on" in told[0] and "secret" not in told[0]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_cannot_be_written_harms_nobody(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    made = board(tmp_path / "file" / "tensorboard")
    for event in logs.killed().events:
        made.add(event)
    assert made.close(30)
    assert made.dropped > 0
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_add_never_waits(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def sync(path: str) -> None:
        entered.set()
        assert gate.wait(30)

    made = board(tmp_path, sync=sync, sync_s=0.0, flush_s=0.0, max_queue=10)
    events = logs.unbroken().events
    reports = [e for e in events if e.kind is Kind.STEP_REACHED]
    made.add(reports[0])
    assert entered.wait(30)
    for event in reports:
        made.add(event)
    assert made.dropped == len(reports) - 8  # chatter fills 80 %
    for event in logs.killed().events:
        if event.kind is Kind.WORKER_KILLED:
            made.add(event)
    gate.set()
    assert made.close(30)
    assert "faults" in read(tmp_path).texts
    made.add(reports[0])  # after the end: dropped
    assert made.dropped == len(reports) - 7
