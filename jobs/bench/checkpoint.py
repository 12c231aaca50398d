"""What a checkpoint costs on 2 workers: raytf, model.save, tf.train.Checkpoint, Ray's report.

    python jobs/bench/checkpoint.py [--blocks 7] [--quick]

400 MB of state (134 MB of weights, Adam's two slots). All arms run in one Ray Train worker group,
on the model that raytf trains there, in interleaved blocks. In each block, an epoch, raytf saves
once while it trains; the other arms run between epochs. Seconds, medians over blocks; what every
rank does counts as long as the slower one takes:
    stall          how long training waits for a save of raytf
    bare_copy      each rank's share of the same bytes, copied into buffers that are reused
    write          from the start of raytf's write to its commit, training beside it
    step_idle, step_busy      a training step; the latter wholly within a write
    keras_save     model.save (.keras), rank 0
    tf_save        tf.train.Checkpoint, rank 0
    report         save_weights, then ray.train.report with that directory
    restore        raytf finds, reads, verifies and assigns the state, on both ranks at once; that a
                   variable gets memory of its own when it is first changed comes later
    tf_restore     tf.train.Checkpoint, on both ranks at once
    s3_*           raytf with a bucket on loopback (moto_server), if it is installed; no aim

Files are in the page cache when they are read. Dirty pages are flushed before each arm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_worker
import common
from checkpoint_worker import WORKERS

# At most this much; see the issue on the checkpoint store.
STALL_TO_COPY, STALL_TO_SAVE, BUSY_TO_IDLE, RESTORE_TO_TF = 1.5, 0.15, 1.3, 0.7
WRITTEN_TO_STATE = 1.01  # headers
SIZES = {  # vocabulary, width of the embedding, of the hidden layers
    "full": (43_000, 512, 2048),
    "quick": (1000, 64, 128),
}


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any] | None]:
    """A bucket on loopback; gives s3fs's options, or None where the packages are missing."""
    try:
        import boto3
        import s3fs  # noqa: F401
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer
    except ImportError as error:
        common.say(f"S3 is left out: {error}")
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="bench")
        client.close()
        yield {"endpoint_url": endpoint, "key": "k", "secret": "s"}
    finally:
        server.stop()


def measure(folder: Path, blocks: int, quick: bool) -> list[dict[str, Any]]:
    """Runs both ranks under Ray Train; what each has told."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", RAY_AUTH_MODE="disabled", CUDA_VISIBLE_DEVICES="")
    import ray
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig

    # Read in Ray 2.60: the public name leads to the trainer of version 1.
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    ray.cloudpickle.register_pickle_by_value(checkpoint_worker)
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    with s3_server() as s3:
        DataParallelTrainer(
            checkpoint_worker.work,
            train_loop_config={
                "folder": str(folder),
                "blocks": blocks,
                "sizes": SIZES["quick" if quick else "full"],
                "s3": s3,
            },
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(
                name="report",
                storage_path=str(folder),
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORKERS)]


def combine(told: list[dict[str, Any]]) -> tuple[dict[str, list[float]], float]:
    """Both ranks' records as seconds by name, and bytes written per byte of state.

    The first save allocates the buffers: it is left out.
    """
    arms = {
        name: [max(values) for values in zip(*(t["arms"][name] for t in told), strict=True)]
        for name in told[0]["arms"]
    }
    stalls = zip(*(t["record"]["stall"] for t in told), strict=True)
    writes = list(zip(*(t["record"]["write"] for t in told), strict=True))[1:]
    arms["stall"] = [max(values) for values in stalls][1:]
    spans = [(min(w[1] for w in both), max(w[2] for w in both)) for both in writes]
    arms["write"] = [ended - began for began, ended in spans]
    arms["step_idle"], arms["step_busy"] = [], []
    for began, ended in told[0]["record"]["step"]:
        if began < spans[0][0]:
            continue  # of the first block
        if any(start <= began and ended <= stop for start, stop in spans):
            arms["step_busy"].append(ended - began)
        elif all(ended <= start or stop <= began for start, stop in spans):
            arms["step_idle"].append(ended - began)
    written = statistics.median(sum(w[3] for w in both) for both in writes)
    return arms, written / told[0]["state_bytes"]


def aims(median: dict[str, float], written: float) -> tuple[list[common.Aim], list[str]]:
    """The issue's, and what could not be judged."""
    wanted = [
        ("bare_copy", "stall", STALL_TO_COPY),
        ("keras_save", "stall", STALL_TO_SAVE),
        ("step_idle", "step_busy", BUSY_TO_IDLE),
        ("tf_restore", "restore", RESTORE_TO_TF),
    ]
    judged: list[common.Aim] = [("state / bytes written", 1 / written, 1 / WRITTEN_TO_STATE)]
    missing = []
    for theirs, ours, most in wanted:
        if theirs in median and ours in median:
            judged.append((f"{theirs} / {ours}", median[theirs] / median[ours], 1 / most))
        else:
            missing.append(f"{theirs} / {ours}")
    return judged, missing


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--blocks", type=int, default=7, help="saves, and turns of each other arm")
    flags.add_argument("--quick", action="store_true", help="a small state, to try it; no aims")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = measure(Path(folder), args.blocks, args.quick)
    measured, written = combine(told)
    megabytes = told[0]["state_bytes"] / 1e6
    median = common.medians({name: values for name, values in measured.items() if values}, 5)
    common.say(f"{megabytes:.0f} MB of state, {WORKERS} workers: seconds, and written / state")
    for name, value in median.items():
        common.say(f"  {name:<12}{value:9.4f}  ({len(measured[name])})")
    common.say(f"  {'written':<12}{written:9.4f}")
    judged, missing = ([], []) if args.quick else aims(median, written)
    result = {
        "unit": "s",
        "state_bytes": told[0]["state_bytes"],
        "written_to_state": written,
        "median": median,
        "blocks": {name: [round(v, 5) for v in values] for name, values in measured.items()},
    }
    return common.finish("checkpoint", result, judged, missing)


if __name__ == "__main__":
    sys.exit(main())
