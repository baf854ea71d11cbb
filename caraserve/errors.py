"""Every error that a person can meet, in one tree.

    CaraServeError                 status 500, a defect of ours unless a subclass says otherwise
    ├── ConfigError                a command-line or start-up mistake; one line, exit code 2
    ├── ModelLoadError             the base model's folder cannot be served; one line, exit code 1
    ├── InvalidRequest             400  the request is malformed; `param` names the field
    │   └── ContextLengthExceeded  400  prompt + max_tokens do not fit
    ├── NotFound                   404  no such model, adapter or path
    ├── AdapterRejected            400  an adapter folder that cannot be applied exactly
    ├── NonFiniteLogits            422  an adapter, or the base model, gives logits from which no token can be chosen
    ├── PayloadTooLarge            413  the body is over the limit
    ├── Unauthorized               401  a missing or wrong API key
    ├── Forbidden                  403  switched off by the operator
    ├── Overloaded                 429  the waiting queue is full; `retry_after_s`
    ├── Draining                   503  the server is stopping; `retry_after_s`
    ├── NotReady                   503  new requests are better sent elsewhere
    ├── ServerBusy                 503  memory or connections are used up; `retry_after_s`
    ├── Unreachable                503  no instance that can be reached has the adapter's bytes; `retry_after_s`
    ├── InstanceLost               502  the instance that was answering has gone
    ├── DeadlineExceeded           504  whoever asks waits no longer
    └── BackendFailed              500  an iteration failed on the device

Each class carries the HTTP status and OpenAI's `type` and `code`. imports nothing of ours.
"""

from typing import ClassVar


class CaraServeError(Exception):
    """The server did something wrong."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(CaraServeError):
    """An argument, environment variable or file given at start is wrong."""


class ModelLoadError(CaraServeError):
    """The base model cannot be served from the folder given."""


class InvalidRequest(CaraServeError):
    """A field of the request has a wrong type or value."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt with the tokens asked for, is longer than the model's context."""

    code = "context_length_exceeded"


class NotFound(CaraServeError):
    """The model, adapter or path named does not exist."""

    status = 404
    type = "NotFoundError"
    code = "model_not_found"


class AdapterRejected(CaraServeError):
    """An adapter that cannot be applied exactly; the message names the field or tensor."""

    status = 400
    type = "InvalidUserInput"


class NonFiniteLogits(CaraServeError):
    """The model asked for gives logits that are infinite or not numbers; the same request would end so again."""

    status = 422
    type = "invalid_request_error"
    code = "non_finite_logits"

    def __init__(self, name: str) -> None:
        """`name`: of the adapter, or of the base model."""
        message = (
            f"the logits of {name!r} are not finite, so no token can be chosen: its weights are too large or damaged"
        )
        super().__init__(message, param="model")


class PayloadTooLarge(CaraServeError):
    """The request body is over the limit."""

    status = 413
    type = "invalid_request_error"


class Unauthorized(CaraServeError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(CaraServeError):
    """The operator has switched this off."""

    status = 403
    type = "permission_error"


class Overloaded(CaraServeError):
    """The waiting queue is full; the same request may be sent again later."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(CaraServeError):
    """The server is stopping and takes no new requests."""

    status = 503
    type = "server_error"
    code = "draining"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(CaraServeError):
    """The server cannot answer as it should, yet or any more."""

    status = 503
    code = "not_ready"


class ServerBusy(CaraServeError):
    """The memory or the connections that the server may use are in use; the same request may be sent again later."""

    status = 503
    code = "server_busy"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(CaraServeError):
    """The adapter is known, but no instance that can be reached gives its bytes."""

    status = 503
    type = "server_error"
    code = "adapter_unavailable"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, param="model")
        self.retry_after_s = retry_after_s


class InstanceLost(CaraServeError):
    """Another instance was answering and has gone; the same request may be sent again."""

    status = 502
    code = "instance_lost"


class DeadlineExceeded(CaraServeError):
    """The answer was not whole when the time was over that whoever asks would wait."""

    status = 504
    code = "deadline_exceeded"


class BackendFailed(CaraServeError):
    """An iteration failed on the device; the requests in it are lost, others go on."""

    code = "backend_failed"
