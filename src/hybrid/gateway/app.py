"""The HTTP application: routes and error envelope, alone (`create_app`) or on Serve (`build`).

serve deploy serve/config.yaml        import_path: hybrid.gateway.app:build
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hybrid import __version__, config
from hybrid.config import ProjectConfig
from hybrid.errors import ConfigError, HybridError, InvalidRequest
from hybrid.gateway import agent_routes, routes, task_routes
from hybrid.gateway.services import Services
from hybrid.pools import HEAD

APP_NAME = "hybrid"
log = logging.getLogger("hybrid.gateway")


def create_app(services: Services | None = None) -> FastAPI:
    """The FastAPI application. `services` may be set later as `app.state.services`."""
    app = FastAPI(title="hybrid", version=__version__)
    app.state.services = services
    app.include_router(routes.router)
    app.include_router(agent_routes.router)
    app.include_router(task_routes.router)

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Whether the gateway answers."""
        return {"status": "ok", "version": __version__, "pid": os.getpid()}

    @app.exception_handler(HybridError)
    async def on_hybrid_error(request: Request, error: HybridError) -> JSONResponse:
        headers = {}
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        return JSONResponse(error.envelope(), status_code=error.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # Within the body, a union's branches (`str`, `list[str]`) are no field of the client's.
        path = [str(p) for p in first["loc"] if p != "body"]
        param = path[0] if path else "body"
        invalid = InvalidRequest(f"{'.'.join(path) or 'body'}: {first['msg']}", param=param)
        return await on_hybrid_error(request, invalid)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        body = {
            "message": f"{request.method} {request.url.path}: {error.detail}",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found" if error.status_code == 404 else "invalid_request",
        }
        return JSONResponse({"error": body}, status_code=error.status_code)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.exception("unexpected error in %s %s", request.method, request.url.path)
        wrapped = HybridError(f"internal error ({type(error).__name__}); see the gateway's log")
        return JSONResponse(wrapped.envelope(), status_code=500)

    return app


class Gateway:
    """The ingress deployment: connects the store, finds the model, serves the application."""

    async def __init__(  # type: ignore[misc] # Serve awaits an asynchronous constructor
        self, project: ProjectConfig, store_url: str, model: Any
    ) -> None:
        from hybrid.agents.events import Events
        from hybrid.agents.mailbox import Mailbox
        from hybrid.agents.payloads import payloads_of
        from hybrid.agents.spec import SpecStore
        from hybrid.agents.store import connect
        from hybrid.serving.handles import ModelHandle

        client = connect(store_url)
        mailbox = Mailbox(client, project.store, payloads_of(project))
        await mailbox.install()
        self.services = Services(
            config=project,
            models=ModelHandle(model),
            mailbox=mailbox,
            specs=SpecStore(client),
            events=Events(connect(store_url, connections=256), mailbox),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return create_app(self.services)


def build(args: Mapping[str, Any]) -> Any:
    """Serve's application builder: the gateway on the head, in front of the model.

    Args:
        args: `config`: path of a hybrid.yaml, or its content as a mapping; `store_url`: the
            store, by default `store.url` of the config or the variable HYBRID_STORE_URL.

    Raises:
        ConfigError: a key is missing or unknown, or no store is named.
    """
    from ray import serve

    from hybrid.serving.model import deployment

    unknown = set(args) - {"config", "store_url"}
    if unknown:
        raise ConfigError(f"args: unknown keys {sorted(unknown)} (allowed: config, store_url)")
    given = args.get("config", "hybrid.yaml")
    project = (
        config.parse(dict(given), where="args.config")
        if isinstance(given, Mapping)
        else config.load(Path(given))
    )
    store_url = args.get("store_url") or project.store.url or os.environ.get("HYBRID_STORE_URL")
    if not store_url:
        raise ConfigError(
            "store.url: missing; on a cluster the agents need a Redis-protocol store that every"
            " node reaches (or set HYBRID_STORE_URL)"
        )
    gateway = serve.deployment(
        name="gateway",
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0, "label_selector": HEAD.label_selector},
        logging_config={"enable_access_log": False},
        graceful_shutdown_timeout_s=60,
    )(serve.ingress()(Gateway))
    return gateway.bind(project, store_url, deployment(project))
