from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from raytf.cluster.keras_choice import check_keras_choice, check_process
from raytf.config import SUPPORTED_KERAS
from raytf.errors import ConfigError


def versions(**installed: str) -> Any:
    return installed.get


GOOD = f"{SUPPORTED_KERAS[0][0]}.{SUPPORTED_KERAS[0][1]}.1"


@pytest.mark.parametrize(
    ("legacy", "environ"),
    [(False, {}), (False, {"TF_USE_LEGACY_KERAS": "0"}), (True, {"TF_USE_LEGACY_KERAS": "1"})],
)
def test_no_contradiction(legacy: bool, environ: dict[str, str]) -> None:
    check_keras_choice(legacy, environ, versions(keras=GOOD, tf_keras="2.21.0"))


@pytest.mark.parametrize(
    ("legacy", "said", "advice"),
    [
        (False, "1", "legacy_keras=True"),
        (False, "True", "legacy_keras=True"),
        (True, "0", "legacy_keras=False"),
        (True, "", "legacy_keras=False"),
    ],
)
def test_the_environment_says_otherwise(legacy: bool, said: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_keras_choice(
            legacy, {"TF_USE_LEGACY_KERAS": said}, versions(keras=GOOD, tf_keras="2.21.0")
        )
    assert "Unset the variable" in str(caught.value)
    assert advice in str(caught.value)


def test_a_missing_tf_keras_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"raytf\[legacy-keras\]"):
        check_keras_choice(True, {}, versions(keras=GOOD))


@pytest.mark.parametrize("version", ["2.15.0", "3.0.5", "3.99.0", "4.0.0rc1"])
def test_an_unknown_keras(version: str) -> None:
    with pytest.raises(ConfigError, match=version):
        check_keras_choice(False, {}, versions(keras=version))
    check_keras_choice(True, {}, versions(keras=version, tf_keras="2.21.0"))


def test_no_keras_at_all() -> None:
    with pytest.raises(ConfigError, match="not installed"):
        check_keras_choice(False, {}, versions())


def modules(
    decided: str | None = None, handle: object = None, package: str | None = None
) -> dict[str, Any]:
    loader = types.ModuleType(package or "keras")
    if package is None:
        loader._tfll_name = "keras"  # type: ignore[attr-defined]
    if decided is not None:
        loader._tfll_keras_version = decided  # type: ignore[attr-defined]
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.keras = loader  # type: ignore[attr-defined]
    context = types.ModuleType("context")
    context._context = types.SimpleNamespace(_context_handle=handle)  # type: ignore[attr-defined]
    return {"tensorflow": tensorflow, "tensorflow.python.eager.context": context}


def test_a_fresh_process() -> None:
    check_process(False, {})
    check_process(True, modules())
    check_process(False, modules("keras_3"))
    check_process(True, modules("tf_keras"))


@pytest.mark.parametrize(("legacy", "decided"), [(False, "tf_keras"), (True, "keras_3")])
def test_tf_keras_is_already_the_other(legacy: bool, decided: str) -> None:
    with pytest.raises(ConfigError, match=f"is {decided}"):
        check_process(legacy, modules(decided))


@pytest.mark.parametrize(
    ("package", "legacy"), [("keras._tf_keras.keras", False), ("tf_keras.api._v2.keras", True)]
)
def test_tf_keras_has_been_loaded(package: str, legacy: bool) -> None:
    check_process(legacy, modules(package=package))
    with pytest.raises(ConfigError, match="worker_runtime_env"):
        check_process(not legacy, modules(package=package))


@pytest.mark.tf
@pytest.mark.parametrize("flag", ["0", "1"])
def test_the_real_tensorflow(flag: str) -> None:
    code = (
        "import os, sys\n"
        f"os.environ['TF_USE_LEGACY_KERAS'] = '{flag}'\n"
        "import tensorflow as tf\n"
        "from raytf.cluster.keras_choice import check_process\n"
        "from raytf.errors import ConfigError\n"
        "def refused(legacy):\n"
        "    try:\n"
        "        check_process(legacy, sys.modules)\n"
        "    except ConfigError as error:\n"
        "        return str(error).split(' in this')[0]\n"
        "print(refused(True), refused(False), sep='|')\n"
        "tf.keras.layers\n"
        "print(refused(True), refused(False), sep='|')\n"
        "tf.constant(1)\n"
        f"print(refused({bool(int(flag))}), sep='|')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    first, second, third = ran.stdout.splitlines()
    used = "tf.keras has already been used"
    assert first == "None|None"
    assert second == (f"{used}|None" if flag == "0" else f"None|{used}")
    assert third == "TensorFlow has already been used"


def test_tensorflow_has_been_used() -> None:
    with pytest.raises(ConfigError, match="already been used"):
        check_process(False, modules(handle=object()))
