"""A killed run with its checkpoints on S3: each rank reads its share and hands it to the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pyarrow.fs as pafs
import pytest
import ray

from tests.contracts.stores import BUCKET, s3_server
from tests.e2e.runs import left_by, trainer, unbroken

pytestmark = [
    pytest.mark.ray,
    # Ray 2.60 warns about its own defaults, and Keras 3.15 uses NumPy's old __array__ protocol.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def s3(nothing_left_running: None) -> Iterator[dict[str, Any]]:
    """A server that the environment names, as a cluster's nodes would have it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
    with s3_server() as options, pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        patched.setenv("AWS_ACCESS_KEY_ID", options["key"])
        patched.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        assert not ray.is_initialized()  # its processes take the environment that is there then
        yield options
        ray.shutdown()


def test_killed_on_s3(s3: dict[str, Any]) -> None:
    result = trainer(
        f"s3://{BUCKET}/runs",
        max_failures=1,
        drill="kill rank=1 step=14",
    ).fit()
    assert result.url == f"s3://{BUCKET}/runs/run"
    assert result.generations == 2
    assert left_by(result) == unbroken()
    with result.checkpoint.as_directory() as directory:
        assert "manifest.json" in os.listdir(directory)
    again = trainer(f"s3://{BUCKET}/runs").fit()
    assert again.weights_sha256 == result.weights_sha256


@pytest.mark.slow
def test_killed_on_a_pyarrow_filesystem(s3: dict[str, Any]) -> None:
    filesystem = pafs.S3FileSystem(
        access_key=s3["key"],
        secret_key=s3["secret"],
        endpoint_override=s3["endpoint_url"],
        region="us-east-1",
    )
    result = trainer(
        f"{BUCKET}/arrow runs",
        max_failures=1,
        drill="kill rank=0 step=14",
        run={"storage_filesystem": filesystem},
    ).fit()
    assert left_by(result, f"{BUCKET}/arrow runs/run", filesystem) == unbroken()
