"""Every refusal as an OpenAI error object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from qtool.quant.errors import QtoolError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A refusal with an HTTP status of its own; `param` names the field at fault, `code` is for machines."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object for an HTTP status."""
    kind = "server_error" if status >= 500 else {401: "authentication_error"}.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's complaints as a 400 that names the field."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the request body is not valid JSON: {message}", code="invalid_json")
    if not path and first["type"] == "value_error":  # fields that do not go together
        return ApiError(400, message)
    if not path:
        return ApiError(400, f"the request body must be a JSON object: {message}")
    code = "unsupported_parameter" if "not supported" in message else None
    return ApiError(400, f"{'.'.join(path)}: {message}", param=path[0], code=code)


def _respond(error: ApiError) -> JSONResponse:
    body = error_body(error.status, error.message, error.param, error.code)
    return JSONResponse(body, status_code=error.status, headers=dict(error.headers or {}))


def install_handlers(app: FastAPI) -> None:
    """Make every exception that a route can raise leave the server as an OpenAI error object."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return _respond(error)

    async def on_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError | ValidationError)
        return _respond(from_validation(error.errors()))

    async def on_refusal(_: Request, error: Exception) -> JSONResponse:
        return _respond(ApiError(400, str(error)))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {request.url.path} here; see /v1/models, /v1/completions, /v1/chat/completions",
            405: f"{request.method} is not allowed on {request.url.path}",
        }.get(error.status_code, str(error.detail))
        return _respond(ApiError(error.status_code, message, headers=error.headers))

    async def on_crash(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _respond(ApiError(500, "internal error; the server's log has the details"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(ValidationError, on_validation)
    app.add_exception_handler(QtoolError, on_refusal)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_crash)
