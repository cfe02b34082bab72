"""The engine against transformers, by the data flow of a GPU: see `tests.static_device`."""

from tests.engine.test_parity import *  # noqa: F403
from tests.engine.test_parity import Oracle, engine_for, generate
from tests.static_device import StaticDevice, kernels, static_devices  # noqa: F401
from vlmserve.types import Prompt

pytestmark: list[object] = []  # There is one kind of kernels.


def test_short_prompts_and_ends_of_cached_ones_are_captured(
    llama: Oracle,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine = engine_for(llama, block_size=8)
    common = llama.prompt(0, [40])
    ends = [llama.prompt(seed, [length]) for seed, length in enumerate((9, 16, 12, 10, 15), 1)]
    for end in ends:
        for prompt in (end, Prompt(common.token_ids + end.token_ids)):
            assert generate(engine, [prompt], max_tokens=1) == [llama.greedy(prompt, 1)]
    # One graph for short prompts, whose tables are two blocks wide, and one for ends of long ones.
    assert static_devices[-1].executors[0].num_captured == 2


def test_nothing_is_captured_where_it_is_not_to_be(
    llama: Oracle,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine, prompt = engine_for(llama, enforce_eager=True), llama.prompt(0, [12])
    for _ in range(3):
        assert generate(engine, [prompt]) == [llama.greedy(prompt)]
    assert static_devices[-1].executors[0].num_captured == 0


def test_contexts_that_grow_while_steps_are_repeated(llama: Oracle) -> None:
    """From where kernels compute them in one part to where they split them."""
    engine = engine_for(llama)
    prompts = [llama.prompt(seed, [length]) for seed, length in enumerate((100, 120, 126, 40))]
    for some in (prompts, prompts[1:], prompts[:2]):
        assert generate(engine, some, max_tokens=36) == [llama.greedy(prompt, 36) for prompt in some]
