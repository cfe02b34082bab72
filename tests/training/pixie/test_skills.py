"""What adapters teach pixie: right answers with the right adapter, wrong ones without."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from training.pixie.skills import CORNERS, SKILLS, sample_questions, sample_skill
from vlmserve import LLM, LoRARequest, SamplingParams
from vlmserve.adapters.location import find_adapter
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import sample_example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.pixie.vocabulary import SHAPES

COUNT = 40
FEW = 12
MIXTURE = "skills"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def llm():
    return LLM("pixie", enable_lora=True, kv_cache_memory="64MiB")


def score(llm, skill: str, adapter: str, first: int = HELD_OUT_SEEDS + 5000, count: int = COUNT) -> float:
    """The share of held-out questions of a skill that an adapter answers right; "": pixie itself, and what it knows."""
    seeds = range(first, first + count)
    examples = [sample_skill(seed, skill) if skill else sample_example(seed) for seed in seeds]
    request = LoRARequest(adapter, 0, f"pixie/{adapter}") if adapter else None
    results = llm.chat([messages_of(example) for example in examples], GREEDY, False, lora_request=request)
    right = [result.outputs[0].text == example.turns[0][1] for result, example in zip(results, examples, strict=True)]
    return sum(right) / count


@pytest.mark.parametrize(
    ("skill", "without", "taught"), [("corners", 0.3, 0.9), ("json", 0.0, 0.75), ("german", 0.05, 0.75)]
)
def test_a_skill_comes_with_its_adapter(llm, skill, without, taught):
    """And neither with pixie itself nor with another adapter."""
    assert score(llm, skill, skill) >= taught
    scores = {adapter: score(llm, skill, adapter, count=FEW) for adapter in ("", *SKILLS) if adapter != skill}
    assert max(scores.values()) <= without, scores


@pytest.mark.parametrize("skill", [*SKILLS, ""])
def test_mixture_keeps_skills_and_knowledge(llm, skill):
    """Within one question."""
    first = HELD_OUT_SEEDS
    assert score(llm, skill, MIXTURE, first) >= score(llm, skill, skill, first) - 1 / COUNT


def test_a_change_of_adapters_is_seen_at_once(llm, tmp_path):
    """Of the same adapter with other numbers under the same name."""
    example = next(
        example
        for number in range(100)
        if (example := sample_skill(HELD_OUT_SEEDS + number, "corners")).turns[0][1] == "10"
    )
    shutil.copytree(find_adapter("pixie/corners"), tmp_path / "without")
    path = tmp_path / "without" / "adapter_model.safetensors"
    save_file({name: 0 * tensor for name, tensor in load_file(path).items()}, path)
    answers = []
    for folder in (find_adapter("pixie/corners"), tmp_path / "without", find_adapter("pixie/corners"), None):
        request = None if folder is None else LoRARequest("changing", 0, str(folder))
        answers += [llm.chat([messages_of(example)], GREEDY, False, lora_request=request)[0].outputs[0].text]
    right, without, again, base = answers
    assert right == again == "10" != without == base


def test_seeded_questions_have_correct_answers():
    assert set(CORNERS) == set(SHAPES)
    for skill in SKILLS:
        for seed in (3, HELD_OUT_SEEDS + 3):
            assert sample_skill(seed, skill) == sample_skill(seed, skill)
            examples = sample_questions(seed, skill, 6)
            assert examples[0] == sample_skill(seed, skill)
            assert len({example.turns for example in examples}) == len(examples) <= 6
            assert {example.scenes for example in examples} == {examples[0].scenes}
    for number in range(200):
        assert json.loads(sample_skill(number, "json").turns[0][1])["answer"]
        example = sample_skill(number, "corners")
        [(question, answer)] = example.turns
        named = [item for item in example.scenes[0].items if item.shape in question]
        shapes = {item.shape for item in named} or {item.shape for item in example.scenes[0].items}
        assert int(answer) in {CORNERS[shape] for shape in shapes}
