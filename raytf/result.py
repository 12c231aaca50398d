"""What `fit()` returns: Ray's Result with Keras's words on top."""

from __future__ import annotations

import dataclasses
import html
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray.train import Checkpoint, Result

from raytf.checkpoint.storage import FINAL, Storage, resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import NotFoundError
from raytf.faults.events import EventList
from raytf.faults.goodput import Ledger
from raytf.run import Run

__all__ = ["RunResult"]


def _checkpoints(storage: Storage) -> tuple[Checkpoint | None, list[Any]]:
    """The newest checkpoint, and all that are kept with their metrics, oldest first."""
    store = CheckpointStore(storage)
    filesystem = storage.for_ray()[1]
    kept = [
        (Checkpoint(store.path(step), filesystem), dict(store.manifest(step).metrics))
        for step in store.steps()
    ]
    return (kept[-1][0] if kept else None), kept


@dataclass(repr=False)
class RunResult(Result):
    """A finished run; is a `ray.train.Result`.

    Attributes:
        metrics: Keras's metric names (`val_*` from the whole validation set) and their last values.
        history: metric name -> one value per epoch.
        steps: steps completed in the run.
        weights_sha256: SHA-256 over the bytes of `model.get_weights()` in order.
        checkpoint: newest step, a `ray.train.Checkpoint` on its directory.
        best_checkpoints: (checkpoint, metrics) of every step that is kept, oldest first.
        url: the run's directory.
        generations: worker groups that formed; 1 if nothing failed.
        replayed_steps: steps that were done again after failures, as far as this driver saw them.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    weights_sha256: str = ""
    url: str = ""
    generations: int = 0
    replayed_steps: int = 0
    _storage: Storage | None = None
    _config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_run(
        cls,
        result: Result,
        outcome: Mapping[str, Any],
        storage: Storage,
        config: Mapping[str, Any],
        generations: int,
        replayed_steps: int = 0,
    ) -> RunResult:
        """Joins Ray's result of a run and what rank 0's session returned."""
        made = cls.of_finished(outcome, storage, config)
        return dataclasses.replace(
            made,
            error=result.error,
            metrics_dataframe=result.metrics_dataframe,
            generations=generations,
            replayed_steps=replayed_steps,
        )

    @classmethod
    def of_finished(
        cls, outcome: Mapping[str, Any], storage: Storage, config: Mapping[str, Any]
    ) -> RunResult:
        """The result of a run from what it left in its storage."""
        checkpoint, best = _checkpoints(storage)
        return cls(
            metrics=dict(outcome.get("metrics") or {}),
            checkpoint=checkpoint,
            error=None,
            path=storage.path,
            metrics_dataframe=None,
            best_checkpoints=best,
            _storage_filesystem=storage.for_ray()[1],
            return_value=dict(outcome),
            history={k: list(v) for k, v in (outcome.get("history") or {}).items()},
            steps=int(outcome.get("steps", 0)),
            weights_sha256=str(outcome.get("weights_sha256", "")),
            url=storage.url,
            generations=int(outcome.get("generation", 1)),
            _storage=storage,
            _config=config,
        )

    @property
    def events(self) -> EventList:
        """All events of the run, oldest first."""
        return self._run().events

    @property
    def goodput(self) -> Ledger:
        """Where the run's wall time went."""
        return self._run().goodput

    def _run(self) -> Run:
        return Run(self._storage if self._storage is not None else resolve(self.url or self.path))

    def load_model(self, build_model: Callable[..., Any] | None = None) -> Any:
        """Loads the trained model in this process; imports TensorFlow.

        Args:
            build_model: needed only if Keras cannot rebuild the model from its own config (the
                error says so).
        """
        from raytf.worker import export

        storage = self._final()
        return export.load_model(
            storage.fs, storage.path, build_model=build_model, config=self._config
        )

    def export(
        self,
        path: str,
        format: Literal["keras", "saved_model", "weights"] = "keras",
        build_model: Callable[..., Any] | None = None,
    ) -> None:
        """Writes the trained model to a local path or fsspec URL; imports TensorFlow.

        Args:
            path: file (`keras`, `weights`) or directory (`saved_model`).
            format: "keras" (`.keras` file), "saved_model" (served by `tf.saved_model.load`) or
                "weights".
            build_model: as in `load_model`.
        """
        from raytf.worker import export

        storage, target = self._final(), resolve(path)
        given = {"build_model": build_model, "config": self._config}
        if target.is_local:
            export.export(storage.fs, storage.path, target.path, format, **given)
            return
        with tempfile.TemporaryDirectory() as scratch:  # TensorFlow writes to local disks
            name = target.path.rsplit("/", 1)[-1]
            written = export.export(
                storage.fs, storage.path, os.path.join(scratch, name), format, **given
            )
            target.fs.put(written, target.path, recursive=os.path.isdir(written))

    def _final(self) -> Storage:
        if self._storage is None or not self._storage.exists(FINAL):
            raise NotFoundError(
                f"There is no trained model in {self.url or self.path!r}.", path=self.url
            )
        return self._storage.join(FINAL)

    def _facts(self) -> list[tuple[str, str]]:
        shown = ", ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
            for k, v in (self.metrics or {}).items()
        )
        facts = [("url", self.url), ("steps", str(self.steps)), ("metrics", shown)]
        if self.weights_sha256:
            facts.append(("weights_sha256", self.weights_sha256[:12] + "…"))
        return facts

    def __repr__(self) -> str:
        return "RunResult(" + ", ".join(f"{k}={v!r}" for k, v in self._facts()) + ")"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>"
            for k, v in self._facts()
        )
        table = f"<table><caption>RunResult</caption>{rows}</table>"
        return table + (self._run()._repr_html_() if self.url else "")
