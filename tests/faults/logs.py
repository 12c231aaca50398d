"""Event logs of runs as they look on storage, made by hand: for tests of what reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from raytf.faults.events import Event, Kind, file_name, to_line

START = 1_700_000_000.0
STEPS_PER_EPOCH, EPOCHS, BATCH = 50, 4, 64
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;|`*_"


class Log:
    """Writes a log: `at` moves the clock, verbs add events."""

    def __init__(self, run: str = "mnist", start: float = START) -> None:
        self.run, self.now, self.attempt, self.step = run, start, 0, 0
        self.events: list[Event] = []

    def add(self, kind: Kind, after_s: float = 0.0, writer: str = "run_actor", **given: Any) -> Log:
        names = ("rank", "node", "pid", "step", "phase", "generation")
        subject = {n: given.pop(n) for n in names if n in given}
        self.now += after_s
        fields = {"writer": writer, **given}
        self.events.append(
            Event(
                time=self.now,
                kind=kind,
                run=self.run,
                attempt=self.attempt,
                fields=fields,
                **subject,
            )
        )
        return self

    def begin(self, attempt: int, at_step: int = 0, after_s: float = 0.0) -> Log:
        self.attempt, self.step = attempt, at_step
        shape = {"epochs": EPOCHS, "steps_per_epoch": STEPS_PER_EPOCH, "global_batch_size": BATCH}
        if attempt == 1:
            self.add(Kind.RUN_STARTED, after_s)
            after_s = 0.0
        self.add(Kind.ATTEMPT_STARTED, after_s, workers=2, resources={"CPU": 1.0})
        self.group(attempt, at_step)
        return self.add(Kind.WORKER_READY, rank=0, node="node-0", **shape)

    def group(self, generation: int, at_step: int, after_s: float = 6.0) -> Log:
        for rank in (0, 1):
            where = {"rank": rank, "node": f"node-{rank}", "pid": 1000 + rank}
            self.add(Kind.WORKER_STARTED, after_s / 3, **where)
        self.add(Kind.GENERATION_FORMED, after_s / 3, generation=generation, workers=2)
        self.step = at_step
        if at_step:
            self.add(Kind.RESTORED, 0.4, step=at_step, source="store", rank=0)
        return self

    def train(
        self, to_step: int, every: int = 5, step_s: float = 0.05, save_every: int = 25
    ) -> Log:
        """Steps with reports, epochs with validation, saves."""
        while self.step < to_step:
            done = min(every, to_step - self.step)
            self.step += done
            spent = done * step_s
            split = {"step": spent * 0.9, "data_wait": spent * 0.08, "save_stall": spent * 0.02}
            epoch = (self.step - 1) // STEPS_PER_EPOCH
            logs = {"loss": self.loss(), "accuracy": 1 - self.loss() / 3}
            self.add(
                Kind.STEP_REACHED,
                spent,
                rank=0,
                step=self.step,
                logs=logs,
                epoch=epoch,
                examples_per_s=BATCH / step_s * 0.9,
                seconds=split,
            )
            if self.step % STEPS_PER_EPOCH == 0:
                self.add(Kind.PHASE, 0.0, rank=0, phase="validating")
                values = {"val_loss": self.loss() * 1.1, "val_accuracy": 0.95 - self.loss() / 3}
                self.add(
                    Kind.EPOCH_ENDED,
                    0.8,
                    step=self.step,
                    epoch=epoch,
                    seconds=3.3,
                    rows=STEPS_PER_EPOCH * BATCH,
                    logs={**logs, **values},
                )
            if self.step % save_every == 0:
                self.add(
                    Kind.CHECKPOINT_COMMITTED,
                    0.01,
                    step=self.step,
                    seconds=0.4,
                    stall_s=0.01,
                    deleted=[],
                    bytes=1_234_567,
                )
        return self

    def loss(self) -> float:
        return 2.3 * math.exp(-self.step / 60) + 0.02 * math.sin(self.step)

    def finish(self, error: str | None = None, text: str = "") -> Log:
        if error is not None:
            return self.add(Kind.ATTEMPT_ENDED, 0.5, error=error, text=text)
        result = {"steps": self.step, "metrics": {"loss": self.loss(), "val_loss": self.loss()}}
        return self.add(Kind.RUN_FINISHED, 0.5, step=self.step, result=result)


def unbroken() -> Log:
    return Log().begin(1).train(EPOCHS * STEPS_PER_EPOCH).finish()


def killed() -> Log:
    """Rank 1 is killed at step 137; the run goes on from step 125."""
    log = Log().begin(1).train(137)
    log.add(
        Kind.WORKER_KILLED,
        0.3,
        rank=1,
        node="node-1",
        pid=1001,
        step=137,
        phase="step",
        detect_s=0.3,
        fault="killed",
        summary="rank 1 on node node-1 was killed at step 137 (phase step)",
        evidence=["the process is gone", "exit signal 9"],
        victims=[0],
        error_type=None,
        text="",
    )
    log.add(
        Kind.DECISION,
        0.05,
        action="restart",
        reason="rank 1 on node node-1 was killed: the workers start again (failure 1 of 3)",
        counts_as="failure",
        delay_s=1.0,
    )
    return log.group(2, 125).train(EPOCHS * STEPS_PER_EPOCH).finish()


def driver_death() -> Log:
    """The driver dies at step 80 and is started again ten minutes later; it goes on from 75."""
    return Log().begin(1).train(80).begin(2, 75, 600.0).train(200).finish()


def hang(is_over: bool = True) -> Log:
    log = Log().begin(1).train(60)
    log.add(
        Kind.HANG_DETECTED,
        31.0,
        rank=0,
        node="node-0",
        pid=1000,
        step=60,
        phase="data",
        detect_s=31.0,
        fault="hang",
        text="no progress",
        evidence=["no progress for 31.0 s (limit 30.0 s)", "rank 1 waits in the collective"],
        stacks={
            "0": 'File "train.py", line 12 in slow_map\n  File "loop.py", line 9 in run',
            "1": 'File "collective.py", line 3 in all_reduce',
        },
    )
    log.add(Kind.DECISION, 0.1, action="replace", reason="rank 0 hung: it is replaced")
    if is_over:
        log.group(2, 50).train(200).finish()
    return log


def nan() -> Log:
    """A loss that is no number stops the run."""
    log = Log().begin(1).train(42)
    bad = {"loss": math.nan, "accuracy": 0.1}
    log.add(Kind.STEP_REACHED, 0.05, rank=0, step=43, epoch=0, logs=bad, examples_per_s=1000.0)
    log.add(Kind.NAN_DETECTED, 0.0, rank=0, node="node-0", step=43, phase="step", fault="nan")
    log.add(Kind.DECISION, 0.0, action="stop", reason='the loss is no number (on_nan="stop")')
    return log.finish("TrainingError", "the loss is no number at step 43")


def storage_failures() -> Log:
    """Saves fail three times; the run goes on."""
    log = Log().begin(1).train(70)
    for _ in range(3):
        log.add(Kind.CHECKPOINT_FAILED, 1.0, step=70, error="503 Slow Down", seconds=1.0)
    log.add(Kind.STRAGGLER_DETECTED, 1.0, rank=1, node="node-1", phase="data", share=1.8)
    return log.train(200).finish()


def hostile() -> Log:
    """Texts that want to be markup, wherever a text can be."""
    log = Log(run=HOSTILE).begin(1).train(55)
    log.add(
        Kind.WORKER_ERROR,
        1.0,
        rank=1,
        node=HOSTILE,
        step=55,
        phase=HOSTILE,
        evidence=[HOSTILE],
        text=f"{HOSTILE}\n{HOSTILE}",
        summary=HOSTILE,
        stacks={HOSTILE: HOSTILE},
        fault=HOSTILE,
    )
    log.add(Kind.DECISION, 0.0, action=HOSTILE, reason=HOSTILE)
    log.add(Kind.STEP_REACHED, 1.0, rank=0, step=56, epoch=1, logs={HOSTILE: 1.0, "loss": HOSTILE})
    log.add(Kind.EPOCH_ENDED, 1.0, step=57, epoch=1, logs={HOSTILE: 1.0})
    return log.finish(HOSTILE, HOSTILE)


ALL = {
    "unbroken": unbroken,
    "killed": killed,
    "driver_death": driver_death,
    "hang": hang,
    "nan": nan,
    "storage_failures": storage_failures,
    "hostile": hostile,
}


def lay_down(directory: Path, log: Log) -> Path:
    """Writes a log as the files of a run; the directory."""
    events = directory / "events"
    events.mkdir(parents=True, exist_ok=True)
    for seq, event in enumerate(log.events):
        name = file_name(event.attempt, event.writer or "driver")
        with open(events / name, "a", encoding="utf-8") as file:
            file.write(to_line(event.with_fields(seq=seq)) + "\n")
    run = {
        "version": 1,
        "run": "0" * 32,
        "created": log.events[0].time if log.events else START,
        "raytf": "0.1.0",
        "fingerprint": {"seed": 7, "global_batch_size": BATCH, "train_data": {"rows": 3200}},
    }
    (directory / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return directory


def lease(directory: Path, **changes: Any) -> None:
    """A lease.json."""
    holder = {
        "attempt": 1,
        "host": "elsewhere",
        "boot": "b",
        "space": "s",
        "pid": 42,
        "started": 1,
        "owner": "o",
        "count": 3,
        "released": False,
        "since": "2023-11-14T22:13:20Z",
        "time": "2023-11-14T22:13:20Z",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "lease.json").write_text(json.dumps(holder | changes), encoding="utf-8")
