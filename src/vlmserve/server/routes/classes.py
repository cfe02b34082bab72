"""``POST /classify``: the classes of texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.server.generation import Generation, GenerationRequest
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.embeddings import prompts_of, usage_of
from vlmserve.server.schema.classes import Classification, ClassificationList, ClassifyRequest
from vlmserve.server.service import Service
from vlmserve.types import SamplingParams


class ClassifyDialect(Dialect[ClassifyRequest]):
    kind = ClassifyRequest
    id_prefix = "classify-"
    operation = "classify"
    content_field = "input"

    def num_answers(self, body: ClassifyRequest) -> int:
        return len(body.prompts)

    async def ask(self, service: Service, body: ClassifyRequest) -> GenerationRequest:
        self._classes = service.preparer.vectors.classify()
        params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
        prompts = await prompts_of(service, body.prompts, body.truncate_prompt_tokens)
        return GenerationRequest(prompts, params, cache_salt=body.cache_salt or "", task=self._classes.task)

    async def complete(self, body: ClassifyRequest, generation: Generation) -> ClassificationList:
        await generation.finished()
        data = []
        for index, logits in enumerate(generation.results()):
            found = self._classes.probabilities(logits)
            label = self._classes.labels[int(found.argmax())]
            data.append(Classification(index, label, found.tolist(), len(found)))
        return ClassificationList(generation.id, generation.created, generation.model, data, usage_of(generation))


async def classify(request: Request) -> Response:
    """Return the most probable class of each text."""
    return await answer(request, ClassifyDialect())
