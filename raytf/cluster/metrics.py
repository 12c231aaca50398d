"""A run's numbers for Prometheus, through Ray's metrics: `raytf_*`, labelled by run.

Read from events and nothing else.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.util.metrics import Counter, Gauge

from raytf.faults.events import FAULT_KINDS, Event, Kind
from raytf.faults.goodput import Fold

__all__ = ["RunMetrics"]

_log = logging.getLogger("raytf")
_SAVES = {
    Kind.CHECKPOINT_COMMITTED: "committed",
    Kind.CHECKPOINT_FAILED: "failed",
    Kind.CHECKPOINT_SKIPPED: "skipped",
}


class RunMetrics:
    """Keeps the metrics of one run up to date.

    Args:
        run: name of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = {"run": run}
        self._fold = Fold()
        tags = ("run",)
        self._step = Gauge("raytf_step", "completed steps of the run", tag_keys=tags)
        self._rate = Gauge("raytf_examples_per_second", "examples trained on", tag_keys=tags)
        self._goodput = Gauge("raytf_goodput", "share of wall time spent training", tag_keys=tags)
        self._seconds = Gauge(
            "raytf_seconds", "wall time by what it was spent on", tag_keys=("run", "category")
        )
        self._faults = Counter("raytf_faults", "faults by kind", tag_keys=("run", "kind"))
        self._restarts = Gauge("raytf_restarts", "recoveries from faults", tag_keys=tags)
        self._saves = Counter(
            "raytf_checkpoints", "checkpoints by outcome", tag_keys=("run", "outcome")
        )

    def add(self, event: Event) -> None:
        """Takes an event, in order of time; trouble with the metrics ends nothing else."""
        try:
            self._add(event)
        except Exception:  # of Ray's metrics agent; a run does not fail for it
            _log.debug("metrics of %s lost", event.kind, exc_info=True)

    def _add(self, event: Event) -> None:
        self._fold.add(event)
        if event.kind is Kind.STEP_REACHED and event.step is not None:
            self._step.set(event.step, self._run)
            rate: Any = event.fields.get("examples_per_s")
            if rate is not None:
                self._rate.set(float(rate), self._run)
            self._account()
        elif event.kind in FAULT_KINDS:
            kind = str(event.fields.get("fault") or event.kind)
            self._faults.inc(1, {**self._run, "kind": kind})
            self._account()
        elif event.kind in _SAVES:
            self._saves.inc(1, {**self._run, "outcome": _SAVES[Kind(event.kind)]})

    def _account(self) -> None:
        ledger = self._fold.ledger()
        self._goodput.set(ledger.goodput, self._run)
        self._restarts.set(ledger.restarts, self._run)
        for category, seconds in ledger.seconds.items():
            self._seconds.set(seconds, {**self._run, "category": category})
