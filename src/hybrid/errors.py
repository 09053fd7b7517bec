"""Every error hybrid raises on purpose: each kind has one HTTP status and one exit code.

A message says what was wrong, where, and what to do. `HybridError.envelope()` is the body that
the HTTP endpoints answer with; `exit_code` is what the `hybrid` command ends with.
"""

from __future__ import annotations

import email.utils
import re
import time
from datetime import UTC
from typing import Any, ClassVar

_RETRY_AFTER_MAX_S = 86400.0


class HybridError(Exception):
    """Base of all errors of this package.

    Attributes:
        status: the HTTP status an endpoint answers with.
        exit_code: the exit status of the `hybrid` command.
        code: a stable machine-readable name of the kind.
        param: the request field or configuration key at fault, where there is one.
        retry_after: seconds after which a retry may succeed, where that is known.
    """

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep keyword attributes when the error crosses a process boundary."""
        return _rebuild, (type(self), self.message, self.param, self.retry_after)

    def envelope(self) -> dict[str, Any]:
        """The error body in OpenAI's schema: message, type, param, code."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def _rebuild(
    kind: type[HybridError], message: str, param: str | None, retry_after: float | None
) -> HybridError:
    return kind(message, param=param, retry_after=retry_after)


def from_envelope(error: Any, status: int, retry_after: str | None = None) -> HybridError:
    """The error that an endpoint's envelope stands for, by its code, else by its status.

    Without a code of ours a status from 500 on is Unavailable, which is tried again.

    Args:
        error: the body's `error` object, as `HybridError.envelope` makes it; of another server
            perhaps only a message.
    """
    if not isinstance(error, dict):
        error = {"message": error}
    kinds: list[type[HybridError]] = [HybridError, *_all_kinds(HybridError)]
    code = error.get("code")
    kind = next((k for k in kinds if k.code == code), None)
    if kind is None:  # not one of ours: another server's 5xx is worth another attempt
        by_status: dict[int, type[HybridError]] = {
            401: Unauthorized,
            404: NotFound,
            408: Unavailable,
            409: Conflict,
            429: RateLimited,
        }
        kind = by_status.get(status, Unavailable if status >= 500 else InvalidRequest)
    message = str(error.get("message") or f"HTTP {status}")
    return kind(message, param=error.get("param"), retry_after=retry_after_s(retry_after))


def retry_after_s(header: str | None) -> float | None:
    """Seconds that a Retry-After header, a number or an HTTP date, asks for: 0 to a day.

    None: there is no such header, or it is neither.
    """
    text = (header or "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        seconds = float(text)
    else:
        try:
            when = email.utils.parsedate_to_datetime(text)
            seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _RETRY_AFTER_MAX_S)


def _all_kinds(kind: type[HybridError]) -> list[type[HybridError]]:
    return [k for sub in kind.__subclasses__() for k in (sub, *_all_kinds(sub))]


class ConfigError(HybridError):
    """hybrid.yaml or a flag is wrong: the message names file, key, value and what is allowed."""

    status, exit_code, code = 400, 2, "invalid_config"


class DataError(HybridError):
    """A corpus or data set cannot be used: missing, empty, not UTF-8, without the field."""

    status, exit_code, code = 400, 3, "invalid_data"


class InvalidRequest(HybridError):
    """A request is malformed; `param` names the field."""

    status, exit_code, code = 400, 2, "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt and completion do not fit the model's context window."""

    status, exit_code, code = 400, 2, "context_length_exceeded"


class Unauthorized(HybridError):
    """No credentials, or wrong ones."""

    status, exit_code, code = 401, 4, "unauthorized"


class NotFound(HybridError):
    """A named model, adapter, agent or task does not exist."""

    status, exit_code, code = 404, 5, "not_found"


class ModelNotFound(NotFound):
    """The request names a model or adapter that the current release does not hold."""

    status, exit_code, code = 404, 5, "model_not_found"


class Conflict(HybridError):
    """A compare-and-set lost, or a name is already taken."""

    status, exit_code, code = 409, 6, "conflict"


class StaleLease(Conflict):
    """The caller's attempt number is not current: another host holds or finished the task."""

    status, exit_code, code = 409, 6, "stale_lease"


class AdapterRefused(HybridError):
    """An adapter cannot be served or published as asked: wrong base, rank, shapes, NaN.

    Never answered by the base model instead.
    """

    status, exit_code, code = 422, 7, "adapter_refused"


class IntegrityError(HybridError):
    """Stored bytes do not match their digest, or a file is truncated."""

    status, exit_code, code = 500, 8, "integrity_error"


class RegistryError(HybridError):
    """The registry cannot be read or written (disk full, no permission, unreachable)."""

    status, exit_code, code = 503, 8, "registry_error"


class CheckpointError(HybridError):
    """No checkpoint can be written or restored."""

    status, exit_code, code = 500, 9, "checkpoint_error"


class TrainingError(HybridError):
    """A training run failed or produced something that must not be published."""

    status, exit_code, code = 500, 9, "training_error"


class RateLimited(HybridError):
    """A bounded queue is full; `retry_after` says when to come back."""

    status, exit_code, code = 429, 10, "rate_limited"


class BudgetExceeded(HybridError):
    """A root task spent its tokens, money or hops."""

    status, exit_code, code = 402, 10, "budget_exceeded"


class TaskFailed(HybridError):
    """An agent's task ended as failed or dead; the message carries its last error."""

    status, exit_code, code = 502, 11, "task_failed"


class Cancelled(HybridError):
    """The task or request was cancelled by its owner."""

    status, exit_code, code = 409, 11, "cancelled"


class DeadlineExceeded(HybridError):
    """The deadline of a task or request passed before it was done."""

    status, exit_code, code = 504, 12, "deadline_exceeded"


class StoreUnavailable(HybridError):
    """The Redis-protocol store does not answer, or lacks a property we need (says which)."""

    status, exit_code, code = 503, 13, "store_unavailable"


class Unavailable(HybridError):
    """A service this call needs is not up, or is draining."""

    status, exit_code, code = 503, 14, "unavailable"


class PlacementError(HybridError):
    """No node has the labels and resources asked for; the message says which are lacking."""

    status, exit_code, code = 503, 14, "cannot_place"


class PortInUse(HybridError):
    """A port that hybrid was told to listen on is taken."""

    status, exit_code, code = 503, 14, "port_in_use"


class Unsupported(HybridError):
    """The backend cannot do what was asked."""

    status, exit_code, code = 501, 15, "unsupported"


class MissingExtra(HybridError):
    """An optional dependency is not installed; the message names the extra."""

    status, exit_code, code = 501, 15, "missing_extra"
