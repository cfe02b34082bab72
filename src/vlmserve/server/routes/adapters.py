"""vLLM's ``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from vlmserve.errors import AdapterError, UnknownModelError
from vlmserve.server.errors import RefusedError
from vlmserve.server.guard import account_of
from vlmserve.server.routes.reading import read
from vlmserve.server.schema.models import LoadAdapterRequest, UnloadAdapterRequest
from vlmserve.server.service import Service


async def load_adapter(request: Request) -> Response:
    """Load or replace a LoRA adapter, by itself or in an X-LoRA mixture."""
    service: Service = request.app.state.service
    check_admin(request)
    async with read(request, LoadAdapterRequest) as body:
        return PlainTextResponse(await load(service, body))


async def unload_adapter(request: Request) -> Response:
    """Unload a LoRA adapter; running requests keep it."""
    service: Service = request.app.state.service
    check_admin(request)
    async with read(request, UnloadAdapterRequest) as body:
        return PlainTextResponse(await unload(service, body))


async def load(service: Service, body: LoadAdapterRequest) -> str:
    """Load an adapter, and return the text of the response. Raises VLMServeError."""
    _check_model(service, body.model)
    name = body.lora_name
    if body.mixture is not None:
        await service.adapters.mix(service.client, body.mixture, name, body.lora_path, replace=body.load_inplace)
        return f"Success: LoRA adapter '{name}' added to '{body.mixture}' successfully."
    if service.names.is_own(name):
        raise AdapterError(f"{name!r} is the name of the model itself", param="lora_name")
    if name in service.client.calls.adapters and not body.load_inplace:
        raise AdapterError(f"there is an adapter {name!r} already; load_inplace replaces it", param="lora_name")
    await service.adapters.load(service.client, name, body.lora_path)
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload(service: Service, body: UnloadAdapterRequest) -> str:
    """Unload an adapter, and return the text of the response. Raises VLMServeError."""
    _check_model(service, body.model)
    if body.mixture is not None:
        await service.adapters.leave_out(service.client, body.mixture, body.lora_name)
    else:
        await service.adapters.unload(service.client, body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _check_model(service: Service, name: str | None) -> None:
    if not service.names.is_own(name):
        raise UnknownModelError(f"There is no model {name!r:.100} here, only {service.model_name!r}", param="model")


def check_admin(request: Request) -> None:
    """Raise RefusedError (403) for a key that may not change the server."""
    account = account_of(request)
    if account is not None and not account.key.admin:
        message = "This API key may not change the server; 'vlmserve keys add --admin' makes one that may"
        raise RefusedError(HTTPStatus.FORBIDDEN, message, "admin_key_needed")
