"""Takes secrets out of text before it is written anywhere. Pure.

Owns what counts as a secret: credentials in URLs, signed query strings, keys of clouds and tokens
with a known shape, `Authorization`, and values next to a name that says secret. It would rather
hide too much than too little; what is hidden reads `***`.
"""

from __future__ import annotations

import re

__all__ = ["is_secret_name", "redact"]

_HIDDEN = "***"
_NAMES = (
    r"(?:[A-Za-z0-9_]{0,40}(?:secret|password|passwd|passphrase|credentials?|private_?key"
    r"|access_?key(?:_?id)?|account_?key|api_?key|auth_?token|access_?token|session_?token"
    r"|refresh_?token|security_?token|sas_?token|client_?secret|connection_?string)"
    r"|[A-Za-z0-9]{0,40}_token|pwd|token)"
)
_SECRET_NAME = re.compile(rf"{_NAMES}|authorization|cookie", re.IGNORECASE)

# Each pattern keeps its group "before". Repetitions are bounded: `text` may be a long stack.
_RULES = (
    # A name and password, or a token alone on http. A port is no password, and the container in
    # abfs://container@account is no user.
    re.compile(
        r"(?P<before>\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)(?!\[)[^\s/:@\"'<>]{0,300}"
        r":(?!\d+(?:[/?#\s,\"']|$))[^\s@\"'<>]{0,500}(?=@)"
    ),
    re.compile(r"(?P<before>\bhttps?://)[^\s/:@\"'<>?#]{1,500}(?=@)", re.IGNORECASE),
    re.compile(
        r"(?P<before>[?&;](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|sig|signature"
        rf"|AWSAccessKeyId|key|auth|code|{_NAMES})=)[^&;#\s\"'<>]+",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?P<before>\b(?:proxy-)?authorization[\"']?\s{0,3}[:=]\s{0,3}[bru]?[\"']?)[^\r\n\"']+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<before>\bBearer\s)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    # name=value, and "name": "value" as in dicts and JSON. `token: x` in prose is left alone.
    re.compile(
        rf"(?P<before>\b{_NAMES}[\"']?\s{{0,3}}=\s{{0,3}}[bru]?[\"']?)(?!=)[^\s\"',;&)}}\]]+",
        re.IGNORECASE,
    ),
    re.compile(
        rf"(?P<before>[\"']{_NAMES}[\"']\s{{0,3}}:\s{{0,3}}[bru]?(?P<quote>[\"']))[^\"'\r\n]+",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?P<before>\b[A-Za-z0-9_]{0,40}(?:secret|password|passwd|access_key|api_key|account_key)"
        r"\s{0,3}:\s{0,3})(?![\"'\s])[^\s,;]+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<before>)\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"(?P<before>)\bAIza[0-9A-Za-z_-]{30,}"),
    re.compile(
        r"(?P<before>)\b(?:gh[opsu]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-)[A-Za-z0-9_-]{16,}"
    ),
    re.compile(r"(?P<before>)\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),  # JWT
    re.compile(
        r"(?P<before>-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----)(?:(?!-----END)[\s\S])+",
    ),
)


def redact(text: str) -> str:
    """The text with what looks like a secret replaced by `***`. Doing it twice changes nothing."""
    for rule in _RULES:
        text = rule.sub(lambda found: f"{found['before']}{_HIDDEN}", text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether a text stored under this name must not be shown (`aws_secret_access_key`)."""
    return _SECRET_NAME.fullmatch(name) is not None
