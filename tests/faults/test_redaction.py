"""Secrets go, everything else stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.redaction import is_secret_name, redact

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3In0.abcDEF123-_xyz"  # made up


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        ("cannot reach https://alice:hunter2@host/x", ["alice", "hunter2"]),
        ("cannot reach s3://AKKEY:se/cr+et@bucket/runs: 403", ["AKKEY", "se/cr+et"]),
        ("redis://:pw@host:6379", ["pw"]),
        ("https://ghp-not-shaped@github.com/a/b", ["ghp-not-shaped"]),
        ("GET /b?X-Amz-Signature=abc123&x=1&X-Amz-Credential=CRED", ["abc123", "CRED"]),
        ("https://a.blob.core.windows.net/c?sv=1&sig=q%3D%3D&se=2", ["q%3D%3D"]),
        ("https://h/x?token=t0k3n#frag", ["t0k3n"]),
        ("key AKIAIOSFODNN7EXAMPLE was refused", ["AKIAIOSFODNN7EXAMPLE"]),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", ["wJalrXUtnFEMI/K7MDENG"]),
        ("AWS_SESSION_TOKEN='FwoGZXIvYXdzE'", ["FwoGZXIvYXdzE"]),
        ('{"secret": "s3cr", "password": "p w"}', ["s3cr", "p w"]),
        ("{'key': 1, 'aws_secret_access_key': 'abc'}", ["abc"]),
        ("DefaultEndpointsProtocol=https;AccountKey=Zm9v==;E=1", ["Zm9v"]),
        ("Authorization: Basic dXNlcjpwYXNz", ["dXNlcjpwYXNz"]),
        ("'Authorization': 'AWS4-HMAC-SHA256 Credential=A/b, Signature=f00'", ["A/b", "f00"]),
        ("sent Bearer abcdefgh.ijkl", ["abcdefgh.ijkl"]),
        ("password: letmein", ["letmein"]),
        ("hf_abcdefghijklmnopqrstuv", ["abcdefghijklmnop"]),
        (f"cookie {JWT}", [JWT]),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nx==\n-----END RSA PRIVATE KEY-----", ["MIIEow"]),
    ],
)
def test_secrets_are_hidden(text: str, secrets: list[str]) -> None:
    shown = redact(text)
    assert "***" in shown
    for secret in secrets:
        assert secret not in shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/runs/mnist/step-0000000500",
        "abfs://container@account.dfs.core.windows.net/runs",
        "grpc://10.0.0.1:50051/worker",
        "http://127.0.0.1:8265/x@y",
        "http://[::1]:8265/x@y",
        "memory://a:b",
        "rank 1 was killed at step 30: 0x7f3a91",
        "tokens_per_s=12.5 secretary=ann keyboard=us",
        "if password == other: raise ValueError('tokens differ')",
        "SyntaxError: unexpected token: )",
        'File "/home/a/train.py", line 12, in train_step',
        "sha1 0a4d55a8d778e5022fab701977c5d840bbc486d0",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_what_stays_around_a_secret() -> None:
    assert redact("PUT s3://k:v@bucket/a?b=1 failed") == "PUT s3://***@bucket/a?b=1 failed"
    assert redact("https://h/x?token=t&y=2") == "https://h/x?token=***&y=2"


@settings(deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_twice_is_once(before: str, after: str) -> None:
    text = f"{before} https://u:p@h/?token=x {after}"
    assert redact(redact(text)) == redact(text)


def test_long_texts_are_quick() -> None:
    for piece in ("a://", "token=", "password: ", "-----BEGIN PRIVATE KEY-----", "eyJ.", "x" * 8):
        redact(piece * 20_000)  # a pattern that backtracks would run into the time limit


def test_secret_names() -> None:
    for name in ("password", "AWS_SECRET_ACCESS_KEY", "api_key", "auth_token", "Authorization"):
        assert is_secret_name(name)
    for name in ("key", "tokens", "steps", "writer", "keep_best"):
        assert not is_secret_name(name)
