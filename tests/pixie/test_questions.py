"""Questions and answers, checked against what was drawn by a reading of the questions of its own."""

from __future__ import annotations

import random
import re

import pytest

from vlmserve.pixie.questions import TASK_KINDS, TASKS, Example, pair, sample_example, scene_seed, single, text_only
from vlmserve.pixie.refusals import INTRODUCTION, NO_IMAGE, REFUSAL, is_held_out
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, Item, Scene, sample_scene
from vlmserve.pixie.vocabulary import COLOURS, PLACES, PLURALS, SHAPES

MANY = 400
SINGULAR = {plural: shape for shape, plural in PLURALS.items()}


def examples(task: str) -> list[Example]:
    return [sample_example(seed, task) for seed in range(MANY)]


def words_of(question: str) -> list[str]:
    question = question.lower().replace("upper", "top").replace("lower", "bottom").replace("center", "middle")
    return re.findall(r"[a-z]+", question.replace("centre", "middle"))


def matching(scene: Scene, question: str) -> list[Item]:
    """Items that fit the colour and the shape that are named, if any are."""
    words = [SINGULAR.get(word, word) for word in words_of(question)]
    colours, shapes = set(words) & set(COLOURS), set(words) & set(SHAPES)
    return [i for i in scene.items if (not colours or i.colour in colours) and (not shapes or i.shape in shapes)]


def at_named_place(scene: Scene, question: str) -> list[Item]:
    """Items in the row and column that are named; a row or column alone means all of it."""
    words = set(words_of(question))
    thirds = [(int(i.centre[0] * 3 / scene.size[0]), int(i.centre[1] * 3 / scene.size[1])) for i in scene.items]
    columns = [n for n, name in enumerate(("left", "?", "right")) if name in words]
    rows = [n for n, name in enumerate(("top", "?", "bottom")) if name in words]
    if "middle" in words:
        columns, rows = [1], [1]
    return [
        item
        for item, (column, row) in zip(scene.items, thirds, strict=True)
        if (not columns or column in columns) and (not rows or row in rows)
    ]


@pytest.mark.parametrize("task", TASKS)
def test_equal_seeds_give_equal_examples(task: str) -> None:
    for seed in range(30):
        example = sample_example(seed, task)
        assert example == sample_example(seed, task)
        assert example.task == task
        assert all(question.strip() == question and answer.strip() == answer for question, answer in example.turns)
        assert all(scene.kind in TASK_KINDS[task] for scene in example.scenes)


def test_scene_kinds_get_suitable_tasks() -> None:
    rng = random.Random(0)
    for seed in range(MANY):
        scene = sample_scene(seed)
        example = single(scene, rng)
        assert scene.kind in TASK_KINDS[example.task]
    with pytest.raises(ValueError, match="number"):
        single(sample_scene(0, "grid"), rng, "number")


def test_place_answers_name_the_only_item_there() -> None:
    seen = set()
    for example in examples("place"):
        (scene,), ((question, answer),) = example.scenes, example.turns
        found = at_named_place(scene, question)
        seen.add(answer)
        if answer == "nothing":
            assert not found
            assert scene.kind == "grid"
        else:
            assert len(found) == 1
            assert answer in (found[0].name, found[0].colour, found[0].shape)
            asks_colour = re.search("colou?r", question) is not None
            assert (answer in COLOURS) == asks_colour
            assert (answer in SHAPES) == (not asks_colour and re.search(r"\bshape\b", question) is not None)
    assert {"nothing", "red", "circle"} <= seen


def test_attribute_answers_are_the_only_ones() -> None:
    for example in examples("attribute"):
        (scene,), ((question, answer),) = example.scenes, example.turns
        (item,) = matching(scene, question) if len(scene.items) > 1 else scene.items
        assert answer == (item.colour if re.search("colou?r", question) else item.shape)


def test_counts_are_those_of_the_scene() -> None:
    seen = set()
    for example in examples("count"):
        (scene,), ((question, answer),) = example.scenes, example.turns
        assert answer == str(len(matching(scene, question)))
        seen.add(answer)
    assert {"0", "1", "2", "3", "4"} <= seen


def test_descriptions_name_everything_in_reading_order() -> None:
    for example in examples("describe"):
        (scene,), ((_, answer),) = example.scenes, example.turns
        if scene.writing is not None:
            assert answer == f"the {scene.kind} {scene.writing.text}"
        else:
            assert re.split(", | and ", answer) == [item.name for item in scene.items]
            assert answer.count(" and ") == (len(scene.items) > 1)


@pytest.mark.parametrize("task", ["number", "word"])
def test_writings_are_read(task: str) -> None:
    for example in examples(task):
        (scene,), ((question, answer),) = example.scenes, example.turns
        assert scene.writing is not None
        assert answer == (scene.writing.colour if re.search("colou?r", question) else scene.writing.text)


def test_where_answers_name_the_only_matching_item() -> None:
    seen = set()
    for example in examples("where"):
        (scene,), ((question, answer),) = example.scenes, example.turns
        (item,) = matching(scene, question)
        x, y = item.centre[0] / scene.size[0], item.centre[1] / scene.size[1]
        assert answer == PLACES[3 * int(y * 3) + int(x * 3)]
        seen.add(answer)
    assert seen == set(PLACES)


def test_exists_answers_are_right_and_balanced() -> None:
    answers = []
    for example in examples("exists"):
        (scene,), ((question, answer),) = example.scenes, example.turns
        writing = {"number", "word"} & set(words_of(re.sub("one word", "", question, flags=re.I)))
        right = scene.kind in writing if writing else bool(matching(scene, question))
        assert answer == ("yes" if right else "no")
        answers.append(answer)
    assert 0.3 < answers.count("yes") / MANY < 0.7


def test_pairs_are_compared_rightly_and_both_ways() -> None:
    seen = set()
    for example in examples("pair"):
        (first, second), ((question, answer),) = example.scenes, example.turns
        seen.add(answer)
        if answer in ("yes", "no"):
            attribute = "shape" if "shape" in question else "colour"
            same = getattr(first.items[0], attribute) == getattr(second.items[0], attribute)
            assert answer == ("yes" if same else "no")
        elif "more" in question:
            difference = len(first.items) - len(second.items)
            assert answer == ("the same number" if not difference else "the first" if difference > 0 else "the second")
        else:
            rng = random.Random(0)
            shown = first if "first" in question else second
            assert answer == single(shown, rng, "describe").turns[0][1]
    assert {"yes", "no", "the first", "the second", "the same number"} <= seen


def test_any_scene_pair_can_be_asked_about() -> None:
    rng = random.Random(1)
    for seed in range(0, 60, 2):
        assert len(pair(sample_scene(seed), sample_scene(seed + 1), rng).scenes) == 2


def test_follow_ups_refer_back_in_few_turns() -> None:
    for example in examples("follow_up"):
        (scene,) = example.scenes
        assert 2 <= len(example.turns) <= 4
        for n, (question, answer) in enumerate(example.turns):
            if re.search(r"where is it", question, re.I):
                (item,) = [item for item in scene.items if item.place is not None and PLACES[item.place] == answer]
                earlier = " ".join(word for turn in example.turns[:n] for word in turn)
                assert item.shape in earlier
            elif re.search(r"(colou?r is it|its colou?r)", question, re.I) and scene.writing is not None:
                assert answer == scene.writing.colour
            elif re.search(r"how many of them are", question, re.I):
                assert answer == str(len(matching(scene, question)))


def test_refused_questions_have_fixed_answers() -> None:
    rng = random.Random(2)
    for example in [*examples("refusal"), *(text_only(rng) for _ in range(200))]:
        ((_, answer),) = example.turns
        assert answer in (REFUSAL, INTRODUCTION, NO_IMAGE)
        assert not (answer == NO_IMAGE and example.scenes)


def test_evaluation_refuses_questions_that_training_never_asks() -> None:
    def asked(held_out: bool) -> set[str]:
        rng = random.Random(3)
        drawn = (text_only(rng, held_out=held_out).turns[0] for _ in range(4000))
        return {question for question, answer in drawn if answer == REFUSAL}

    trained, held_out = asked(False), asked(True)
    assert len(trained) > 150
    assert not trained & {question for question in held_out if is_held_out(question)}


def test_seeds_of_training_and_evaluation_never_meet() -> None:
    largest = HELD_OUT_SEEDS // 64 - 1
    assert scene_seed(largest, 63) < HELD_OUT_SEEDS
    assert scene_seed(HELD_OUT_SEEDS, 0) >= HELD_OUT_SEEDS
    with pytest.raises(ValueError, match="end"):
        scene_seed(largest + 1, 0)
    for seed in range(60):
        assert all(scene.seed < HELD_OUT_SEEDS for scene in sample_example(seed).scenes)
        assert all(scene.seed >= HELD_OUT_SEEDS for scene in sample_example(HELD_OUT_SEEDS + seed).scenes)
