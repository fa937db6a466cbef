"""The one error type of requests, and its body in each dialect."""

from __future__ import annotations

from typing import Any

from ondevice.errors import (
    BudgetError,
    ConstraintError,
    ContextOverflowError,
    InfillNotSupportedError,
    ModelNotFoundError,
    OndeviceError,
    UsageError,
)

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_LLAMA_CPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
LLAMA_CPP_PATHS = frozenset(
    (
        "/apply-template",
        "/completion",
        "/completions",
        "/detokenize",
        "/infill",
        "/props",
        "/slots",
        "/tokenize",
    )
)
"""Paths of llama.cpp's own API."""
_STATUS = (
    (ContextOverflowError, 400, "context_length_exceeded"),
    (ConstraintError, 400, "unsupported_constraint"),
    (InfillNotSupportedError, 400, "unsupported_parameter"),
    (UsageError, 400, "invalid_value"),
    (ModelNotFoundError, 404, "model_not_found"),
    (BudgetError, 503, "budget_exceeded"),
)


class RequestError(Exception):
    """An error that becomes the answer to a request. field: the request's field at fault, if there is one."""

    def __init__(
        self, status: int, message: str, *, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code
        self.overflow: tuple[int, int] | None = None
        """Tokens of a prompt, and of the context that is too short for it; None for other errors."""

    @property
    def headers(self) -> dict[str, str]:
        """Additional headers of the answer."""
        return {"retry-after": "1"} if self.status in (429, 503) else {}

    @staticmethod
    def of(error: OndeviceError) -> RequestError:
        """The error that answers a request when the engine raises `error`."""
        for kind, status, code in _STATUS:
            if isinstance(error, kind):
                answer = RequestError(status, error.for_command_line, code=code)
                if isinstance(error, ContextOverflowError) and error.limit:
                    answer.overflow = error.tokens, error.limit
                return answer
        return RequestError(500, error.for_command_line, code="engine_error")


def message(path: str, error: RequestError) -> str:
    """An error's message in the dialect of `path`. Agents recognise by its words that a prompt is
    too long.
    """
    if error.overflow is None:
        return str(error)
    tokens, limit = error.overflow
    if path.startswith("/api/"):
        return f"the input length exceeds the context length: {tokens} tokens > {limit}"
    if path in LLAMA_CPP_PATHS:
        available = f"the available context size ({limit} tokens)"
        return f"request ({tokens} tokens) exceeds {available}, try increasing it"
    if path.startswith("/v1/messages"):
        return f"prompt is too long: {tokens} tokens > {limit} maximum"
    what = "prompt" if path == "/v1/completions" else "messages"
    # LangChain looks for the code in the words.
    return (
        f"This model's maximum context length is {limit} tokens. However, your {what} resulted in {tokens} "
        f"tokens. Please reduce the length of the {what}. (context_length_exceeded)"
    )


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    """The error's JSON in the dialect of `path`."""
    words = message(path, error)
    if path.startswith("/api/"):
        return {"error": words}
    if path in LLAMA_CPP_PATHS:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        if error.code == "context_length_exceeded":
            kind = "exceed_context_size_error"
        kind = _LLAMA_CPP_TYPES.get(error.status, kind)
        numbers = dict(zip(("n_prompt_tokens", "n_ctx"), error.overflow or (), strict=False))
        return {"error": {"code": error.status, "message": words, "type": kind} | numbers}
    if path.startswith("/v1/messages"):
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(error.status, other)
        return {"type": "error", "error": {"type": kind, "message": words}}
    other = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _OPENAI_TYPES.get(error.status, other)
    return {"error": {"message": words, "type": kind, "param": error.field, "code": error.code}}
