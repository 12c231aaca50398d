"""Which errors of a store pass by themselves, which need fresh credentials, and which stay.

Pure. Stores wrap each other's errors, so the chain of causes is read, and classes are told by name:
no cloud package is imported here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

__all__ = ["is_expired", "is_transient"]

_LASTING = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
_LASTING_ERRNO = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
}
_PASSING_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,  # what s3fs makes of an internal error of the store
}
_PASSING_NAMES = {
    "ClientConnectionError",  # aiohttp and what derives from it
    "ClientPayloadError",
    "ConnectTimeoutError",  # botocore
    "ConnectionClosedError",
    "EndpointConnectionError",
    "HTTPClientError",
    "IncompleteRead",  # http.client
    "IncompleteReadError",
    "ProtocolError",  # urllib3
    "ReadTimeoutError",
    "ResponseStreamingError",
    "ServiceRequestError",  # azure
    "ServiceResponseError",
    "Timeout",  # requests
    "TransportError",  # google.auth
}
_PASSING_CODES = {
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestLimitExceeded",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_EXPIRED_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "TokenRefreshRequired",
}
_PASSING_STATUS = {408, 425, 429}
# pyarrow has one class for all and says more in words only.
_ARROW_PASSING = re.compile(
    r"AWS Error (SLOW_DOWN|NETWORK_CONNECTION|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING"
    r"|REQUEST_TIMEOUT)|curlCode: \d+|HTTP status (429|5\d\d)"
)
_ARROW_EXPIRED = re.compile(r"AWS Error EXPIRED_TOKEN|ExpiredToken")


def is_expired(error: BaseException) -> bool:
    """Whether credentials ran out, so that a filesystem with fresh ones may succeed."""
    return any(
        _code(each) in _EXPIRED_CODES
        or _status(each) == 401
        or (isinstance(each, OSError) and _ARROW_EXPIRED.search(str(each)) is not None)
        for each in _chain(error)
    )


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later: the server's fault, throttling, time-outs,
    broken connections. Missing files, missing rights and full disks are not of this kind.
    """
    if not isinstance(error, Exception):
        return False
    chain = list(_chain(error))
    for each in chain:  # what the store itself said counts before any wrapper's class
        status = _status(each)
        if status is not None and (status >= 500 or status in _PASSING_STATUS):
            return status != 501
        if _code(each) in _PASSING_CODES:
            return True
    if isinstance(error, _LASTING) or getattr(error, "errno", None) in _LASTING_ERRNO:
        return False
    return any(_passes(each) for each in chain)


def _passes(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if getattr(error, "errno", None) in _PASSING_ERRNO:
        return True
    if any(cls.__name__ in _PASSING_NAMES for cls in type(error).__mro__):
        return True
    return isinstance(error, OSError) and _ARROW_PASSING.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status an error carries: each cloud's package says it elsewhere."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[reportUnknownMemberType]
        return found if isinstance(found, int) else None
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None)
        if isinstance(found, str) and found.isdigit():
            found = int(found)
        if isinstance(found, int) and 100 <= found <= 599:
            return found
    return None


def _code(error: BaseException) -> str | None:
    """The store's own word for an error: botocore's and azure's."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("Error", {}).get("Code")  # type: ignore[reportUnknownMemberType]
    else:
        found = getattr(error, "error_code", None)
    return found if isinstance(found, str) else None
