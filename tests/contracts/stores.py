"""The filesystems that a checkpoint store must work on, each as an empty directory of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs

from raytf.checkpoint.files import RetryConfig
from raytf.checkpoint.store import CheckpointStore

BUCKET = "raytf-contract"
ODD = "runs [1] * a%20b #1 ü-漢 (x)&=+,;@'"


@dataclass
class Backend:
    """Makes stores on one filesystem.

    Attributes:
        url: of a run's directory, or a path on `filesystem`.
        filesystem: to be given explicitly; None: `url` says all.
        fsspec: the same place, as another process sees it.
        path: of the run's directory on it.
    """

    url: str
    filesystem: Any
    fsspec: Any
    path: str

    def store(self, name: str = "") -> CheckpointStore:
        """A new store, as another process would open it; `name`: of another run beside it."""
        url = self.url + name
        return CheckpointStore(
            url, storage_filesystem=self.filesystem, retry=RetryConfig(num_attempts=2)
        )


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """A real S3 server on loopback with one bucket; gives s3fs's options."""
    import boto3
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield {"endpoint_url": endpoint, "key": "k", "secret": "s"}
    finally:
        server.stop()


def local(tmp_path: Path, options: Callable[[], dict[str, Any]]) -> Backend:
    path = str(tmp_path / ODD / "mnist")
    return Backend(f"file://{path}", None, fsspec.filesystem("file"), path)


def memory(tmp_path: Path, options: Callable[[], dict[str, Any]]) -> Backend:
    path = f"/{uuid.uuid4().hex}/{ODD}/mnist"
    return Backend(f"memory:/{path}", None, fsspec.filesystem("memory"), path)


def s3(tmp_path: Path, options: Callable[[], dict[str, Any]]) -> Backend:
    fs = fsspec.filesystem("s3", **options())
    path = f"{BUCKET}/{uuid.uuid4().hex}/{ODD}/mnist"
    another = fsspec.filesystem("s3", skip_instance_cache=True, **options())
    return Backend(path, fs, another, path)


def arrow_local(tmp_path: Path, options: Callable[[], dict[str, Any]]) -> Backend:
    path = str(tmp_path / ODD / "mnist")
    return Backend(path, pafs.LocalFileSystem(), fsspec.filesystem("file"), path)


def arrow_subtree(tmp_path: Path, options: Callable[[], dict[str, Any]]) -> Backend:
    """Through fsspec's Arrow bridge, which knows no atomic write."""
    path = f"{ODD}/mnist"
    tree = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    return Backend(path, tree, fsspec.filesystem("file"), str(tmp_path / path))


BACKENDS = [local, memory, s3, arrow_local, arrow_subtree]
