import asyncio

from vlmserve.frontend.engine_stream import EngineStream
from vlmserve.types import EngineOutput, Missed


def test_merged_outputs_keep_missed_tokens() -> None:
    async def read() -> EngineOutput:
        stream = EngineStream("request", lambda request_id: None)
        stream.put(EngineOutput("request", [1], missed=Missed(never_seen=5)))
        stream.put(EngineOutput("request", [2]))
        return await anext(stream)

    output = asyncio.run(read())
    assert output.token_ids == [1, 2]
    assert output.missed == Missed(never_seen=5)
