"""``POST /tokenize`` and ``/detokenize``, without the engine."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.server.errors import json_response
from vlmserve.server.guard import salt_of
from vlmserve.server.history import owner_of, with_files
from vlmserve.server.routes.reading import read
from vlmserve.server.schema.content import conversation
from vlmserve.server.schema.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from vlmserve.server.service import Service


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text or of a conversation's prompt."""
    service: Service = request.app.state.service
    async with read(request, TokenizeRequest) as body:
        service.names.check(body.model)
        if body.messages is not None:
            with service.bodies.share() as share:
                messages = await with_files(service, owner_of(request), conversation(body.messages), share)
                prompt = await service.preparation.prepare(
                    messages,
                    cache_salt=salt_of(request, None),
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    tools=body.tool_use,
                    template_settings=body.chat_template_kwargs,
                    mm_processor_kwargs=body.processor_kwargs,
                )
            tokens = prompt.token_ids
        else:
            text = body.text
            tokens = await service.preparation.text(
                lambda preparer: preparer.encode(text, add_special_tokens=body.add_special_tokens), len(text)
            )
        texts = service.preparer.token_texts(tokens) if body.return_token_strs else None
        return json_response(Tokenized(len(tokens), service.client.info.max_model_len, tokens, texts))


async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    service: Service = request.app.state.service
    async with read(request, DetokenizeRequest) as body:
        service.names.check(body.model)
        tokens = body.tokens
        return json_response(
            Detokenized(await service.preparation.text(lambda preparer: preparer.decode(tokens), len(tokens)))
        )


async def show_tokenizer(request: Request) -> Response:
    """Return the checkpoint's tokenizer_config.json with the chat template in use."""
    service: Service = request.app.state.service
    service.check_serving()
    await service.wake()
    return json_response(await asyncio.to_thread(service.preparer.tokenizer_info))
