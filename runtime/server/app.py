"""The server as an ASGI application: routes, health, metrics, keys, and the engine's life."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qtool._version import __version__
from qtool.runtime.server import metrics as metrics_module
from qtool.runtime.server.engine_client import EngineClient, EngineDeadError
from qtool.runtime.server.errors import error_body, install_handlers
from qtool.runtime.server.metrics import Metrics
from qtool.runtime.server.openai_routes import Service, build_router


class ApiKeyGate:
    """ASGI middleware: everything under /v1 needs `Authorization: Bearer KEY`; health and metrics stay open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "give this server's API key as `Authorization: Bearer KEY`"
                body = error_body(401, message, code="invalid_api_key")
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse(body, status_code=401, headers=headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(
    engine: EngineClient, *, model_name: str, api_key: str | None = None, metrics_prefix: str = "qtool_"
) -> FastAPI:
    """The application around an engine that is ready to run. Its lifespan starts the engine and ends it; `engine.stop`
    ends it sooner, and with an error what still runs.

    Args:
        engine: nobody else may use it while the application runs.
        model_name: the name that clients ask for.
        api_key: needed for everything under /v1; None: open.
        metrics_prefix: in front of every metric's name.
    """
    metrics = Metrics(model_name, engine.baseline, metrics_prefix)
    engine.on_step, engine.on_abort = metrics.on_step, metrics.on_abort
    engine.on_restart, engine.on_hang = metrics.on_restart, metrics.on_hang
    service = Service.of(engine, model_name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()
            service.tokenize_thread.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="qtool", version=__version__, lifespan=lifespan)
    install_handlers(app)
    app.include_router(build_router(service))

    @app.get("/health")
    async def health() -> Response:
        if engine.error is not None:
            return JSONResponse(error_body(503, str(engine.error)), status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics_text() -> Response:
        # where the engine is dead, or busy with a long step, what was counted until then is still worth reading
        with suppress(EngineDeadError, TimeoutError):
            metrics.set_gauges(await asyncio.wait_for(engine.stats(), timeout=1))
        return Response(metrics.render(), headers={"Content-Type": metrics_module.CONTENT_TYPE})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    if api_key is not None:
        app.add_middleware(ApiKeyGate, api_key=api_key)
    return app
