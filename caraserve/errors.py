"""Every error that a person can meet, in one tree.

    CaraServeError                 status 500, a defect of the server unless a subclass differs
    ├── ConfigError                a command-line or start-up mistake; one line, exit code 2
    ├── ModelLoadError             the base model's folder cannot be served; one line, exit code 1
    ├── InvalidRequest             400  the request is malformed; `param` names the field
    │   ├── ContextLengthExceeded  400  prompt + max_tokens do not fit
    │   └── ThreadsUnsupported     400  the request refers to a conversation that the server is to keep
    ├── NotFound                   404  no such model, adapter or path
    ├── AdapterRejected            400  an adapter folder that cannot be applied exactly
    ├── GrammarFailed              422  a structured output's grammar fails in the middle of the answer
    │   ├── GrammarTooComplex      422  it has grown too complex
    │   └── GrammarDeadEnd         422  it allows no token of the vocabulary
    ├── NonFiniteLogits            422  an adapter, or the base model, computes no finite logits, or no finite embedding
    ├── AdapterBusy                409  the adapter's name is being changed; `retry_after_s`
    ├── AdapterAliased             409  aliases stand for the adapter that would be replaced or deleted
    ├── VersionDiffers             412  the adapter is not of the version that If-Match requires
    ├── PayloadTooLarge            413  the body is over the limit
    ├── Unauthorized               401  a missing or wrong API key
    ├── Forbidden                  403  switched off by the operator
    ├── Overloaded                 429  a full queue: loop.py, tokenizer/process_pool.py, tokenizer/grammar.py
    │   ├── RateLimited            429  the key's rate or requests under way are used up: http/access/rate_limits.py
    │   ├── Displaced              429  a waiting request left a full queue for one of another client: the same files
    │   ├── ForwardRefused         429  a forwarded request is not taken; `code` says why: http/dispatch.py
    │   └── TooManyForwards        429  too many forwarded requests in a minute: cluster/routing/forward_auth.py
    ├── Draining                   503  the server is stopping; `retry_after_s`
    ├── NotReady                   503  new requests should go to another server
    ├── ServerBusy                 503  memory or connections are used up; `retry_after_s`
    ├── StorageFull                507  the disk has no room for an adapter or a setting
    ├── Unreachable                503  no instance that can be reached has the adapter's bytes; `retry_after_s`
    ├── InstanceLost               502  the instance that was answering has gone
    ├── DeadlineExceeded           504  the client's deadline has passed
    ├── ReaderTooSlow              408  the client reads its answer too slowly
    └── BackendFailed              500  an iteration failed on the device
        └── CopyFailed             500  an adapter could not be copied to the device

Each class carries the HTTP status and OpenAI's `type` and `code`. This module imports nothing of the package.
"""

from typing import ClassVar


class CaraServeError(Exception):
    """The server did something wrong."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None  # `ForwardRefused` has one for each reason

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


class ThreadsUnsupported(InvalidRequest):
    """The request refers to a conversation that the server is to keep; the code is Anthropic's, by which its clients
    send the whole conversation instead."""

    code = "thread_unsupported_request"


class NotFound(CaraServeError):
    """The model, adapter or path named does not exist."""

    status = 404
    type = "NotFoundError"
    code = "model_not_found"

    def __init__(self, message: str, *, param: str | None = None, reason: str = "") -> None:
        """`reason`: why there is none, at the end of the message; empty if that is not known."""
        super().__init__(message + reason, param=param)
        self.reason = reason


class AdapterRejected(CaraServeError):
    """The adapter cannot be applied exactly; the message names the field or tensor."""

    status = 400
    type = "InvalidUserInput"


class GrammarFailed(CaraServeError):
    """The grammar of a structured output failed in the middle of the answer."""

    status = 422
    type = "invalid_request_error"


class GrammarTooComplex(GrammarFailed):
    """The grammar became too complex; the message names the limit."""

    code = "grammar_too_complex"


class GrammarDeadEnd(GrammarFailed):
    """The grammar allows text that no token of the vocabulary begins."""

    code = "grammar_dead_end"


class NonFiniteLogits(CaraServeError):
    """The model's logits, or a prompt's embedding, are infinite or not numbers; the same request would fail again."""

    status = 422
    type = "invalid_request_error"
    code = "non_finite_logits"

    def __init__(self, name: str) -> None:
        """`name`: of the adapter, or of the base model."""
        message = f"{name!r} computes numbers that are not finite: its weights are too large or damaged"
        super().__init__(message, param="model")


class AdapterBusy(CaraServeError):
    """The adapter's name is being changed by another request; the same request may be sent again later."""

    status = 409
    type = "conflict_error"
    code = "adapter_busy"

    def __init__(self, message: str, *, retry_after_s: float, param: str = "name") -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class AdapterAliased(CaraServeError):
    """Aliases stand for the adapter; the message names them."""

    status = 409
    type = "conflict_error"
    code = "adapter_aliased"


class VersionDiffers(CaraServeError):
    """The adapter is not of the version that the request requires."""

    status = 412
    type = "invalid_request_error"
    code = "adapter_version_differs"


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


class RateLimited(Overloaded):
    """The client's key has a limit, and the request would exceed it."""

    def __init__(self, limit: str, unit: str, retry_after_s: float) -> None:
        """`limit`: in words. `unit`: what it counts; concurrency has an error code of its own."""
        super().__init__(
            f"this key is limited to {limit}; try again in {retry_after_s:.3g} s", retry_after_s=retry_after_s
        )
        if unit == "concurrency":
            self.code = "concurrency_limit_exceeded"


class Displaced(Overloaded):
    """The request waited in a full queue, in which its client had more requests than a client that sent another one."""

    code = "displaced"


class ForwardRefused(Overloaded):
    """This instance does not take the request that another instance has forwarded."""

    def __init__(self, reason: str, *, retry_after_s: float) -> None:
        """`reason`: of `router.Reason`; the code of the error is `forward_refused_` and the reason."""
        super().__init__(f"this instance does not take the request now: {reason}", retry_after_s=retry_after_s)
        self.code = f"forward_refused_{reason.replace('-', '_')}"


class TooManyForwards(Overloaded):
    """More requests were forwarded within a minute than this instance can tell from repetitions."""

    code = "too_many_forwards"


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
    """All memory or connections of the server are in use; the same request may be sent again later."""

    status = 503
    code = "server_busy"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StorageFull(CaraServeError):
    """The disk has no room, or a limit of this process forbids a file of this size."""

    status = 507
    code = "storage_full"


class Unreachable(CaraServeError):
    """The adapter is known, but no instance that can be reached has its bytes."""

    status = 503
    type = "server_error"
    code = "adapter_unavailable"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, param="model")
        self.retry_after_s = retry_after_s


class InstanceLost(CaraServeError):
    """The instance that was answering has gone; the same request may be sent again."""

    status = 502
    code = "instance_lost"


class DeadlineExceeded(CaraServeError):
    """The answer was not complete at the deadline that the client gave."""

    status = 504
    code = "deadline_exceeded"


class ReaderTooSlow(CaraServeError):
    """The client read its answer too slowly for the memory that the answer took."""

    status = 408
    code = "reader_too_slow"


class BackendFailed(CaraServeError):
    """An iteration failed on the device; the requests in it are lost, others go on."""

    code = "backend_failed"


class CopyFailed(BackendFailed):
    """An adapter could not be copied to the device; requests for other adapters go on."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the adapter could not be copied to the device: {cause}")
