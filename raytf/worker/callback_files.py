"""Files that a callback appends to: what they held when a checkpoint was taken, brought back.

Owns nothing but the text of CSVLogger's file. A dead attempt may have written rows after its last
checkpoint, and the next attempt may run on a node that has no such file at all.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["KEPT_BYTES", "LogFile"]

logger = logging.getLogger("raytf")

KEPT_BYTES = 1024 * 1024  # a longer file is cut, not rewritten


class LogFile:
    """A file that only grows.

    Args:
        path: local, or what TensorFlow's file systems know (`gs://`).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: bytes | None = None

    def capture(self) -> dict[str, Any]:
        """`{"bytes": length}`, with the text as well up to KEPT_BYTES of it."""
        length = self._length()
        if length is None:
            return {"bytes": 0, "text": ""}
        if length > KEPT_BYTES:
            return {"bytes": length}
        if self._kept is None or len(self._kept) != length:  # it grows: same length, same text
            self._kept = self._read(length)
        try:
            return {"bytes": length, "text": self._kept.decode()}
        except UnicodeDecodeError:
            return {"bytes": length, "base64": base64.b64encode(self._kept).decode()}

    def restore(self, known: Mapping[str, Any]) -> None:
        """Makes the file hold exactly what it held; if it was too long to be kept, cuts it."""
        self._kept = None
        if "text" in known:
            self._write(str(known["text"]).encode())
        elif "base64" in known:
            self._write(base64.b64decode(known["base64"]))
        else:
            self._cut(int(known["bytes"]))

    def _cut(self, length: int) -> None:
        there = self._length() or 0
        if there < length:
            logger.warning(
                "%s held %d bytes when the checkpoint was taken and holds %d now; it was too long "
                "to be kept in the checkpoint. The run goes on with what is there.",
                *(self._path, length, there),
            )
        elif self._is_local():
            os.truncate(self._path, length)
        else:
            self._write(self._read(length))

    def _is_local(self) -> bool:
        return "://" not in self._path

    def _length(self) -> int | None:
        if self._is_local():
            return os.path.getsize(self._path) if os.path.exists(self._path) else None
        import tensorflow as tf

        return tf.io.gfile.stat(self._path).length if tf.io.gfile.exists(self._path) else None

    def _read(self, length: int) -> bytes:
        if self._is_local():
            with open(self._path, "rb") as file:
                return file.read(length)
        import tensorflow as tf

        with tf.io.gfile.GFile(self._path, "rb") as file:
            return file.read(length)

    def _write(self, data: bytes) -> None:
        if self._is_local():
            # Keras does not make the directory either: a path that is wrong stays an error.
            if not data and not os.path.exists(self._path):
                return
            temporary = f"{self._path}.resumed"
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, self._path)
            return
        import tensorflow as tf

        with tf.io.gfile.GFile(self._path, "wb") as file:
            file.write(data)
