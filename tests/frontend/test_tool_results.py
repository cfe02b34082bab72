"""What functions give back, images among it, as chat templates of all kinds show it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from tests.frontend.test_requests import data_url, user
from tests.frontend.test_tools import MISTRAL, QWEN, USE
from tests.media.images_for_tests import encoded, noise
from tests.prompt.tokenizers_for_tests import CHATML_PARTS, LLAVA_STYLE, byte_level, write_checkpoint
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.settings.config import MediaConfig

PARTS = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endmacro %}"
)
SHOWS = PARTS + QWEN.replace("+ message.content", "+ show(message.content)")
"""As Qwen3-VL writes it: images wherever they are."""
SHOWS_TO_USERS = PARTS + QWEN.replace("{{- '\\n' + message.content", "{{- '\\n' + show(message.content)").replace(
    "'\n' + message.content }}", "'\n' + show(message.content) }}"
)
"""Images of users only; a result has to be a string."""
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML_PARTS
)
TEMPLATES = {
    "shows": SHOWS, "shows to users": SHOWS_TO_USERS, "strings": QWEN, "our own": CHATML_PARTS,
    "images first": LLAVA_STYLE, "alternating": ALTERNATING,
}  # fmt: skip
IMAGES = [data_url(encoded(noise(30 + 4 * seed, 30, seed=seed))) for seed in range(4)]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    return {"role": "assistant", "tool_calls": [{"id": id_, "type": "function", "function": function} for id_ in ids]}


def result(id_: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


BEFORE = [user(IMAGES[0], "Look."), calls("a", "b")]
RESULTS = [result("a", [text("One."), IMAGES[1]]), result("b", [IMAGES[2], text("Two.")])]
THEN = user("And this?", IMAGES[3])


def preparer_for(folder, template: str) -> RequestPreparer:
    tokenizer = byte_level()
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return RequestPreparer(write_checkpoint(folder, tokenizer, chat_template=template), MediaConfig())


@pytest.fixture(params=list(TEMPLATES))
def preparer(request, tmp_path) -> RequestPreparer:
    return preparer_for(tmp_path, TEMPLATES[request.param])


def keys(preparer: RequestPreparer, messages: list[Any]) -> list[bytes]:
    return [span.image.key for span in preparer.chat(messages, tools=USE).images]


def shown(preparer: RequestPreparer, messages: list[Any]) -> str:
    return preparer.decode(preparer.chat(messages).token_ids).replace("<image>" * 4, "<image>")


@pytest.mark.parametrize("then", [[], [THEN], [user("Well?")], [{"role": "assistant", "content": "Hm."}, THEN]])
def test_all_result_images_are_seen_in_order(preparer, then):
    order = [key for image in IMAGES for key in keys(preparer, [user(image)])]
    assert len(set(order)) == 4
    assert keys(preparer, [*BEFORE, *RESULTS, *then]) == order[: 4 if THEN in then else 3]
    turned = [*BEFORE, result("a", RESULTS[1]["content"]), result("b", RESULTS[0]["content"]), *then]
    assert keys(preparer, turned)[1:3] == [order[2], order[1]]


def test_earlier_turns_stay_unchanged_as_conversation_grows(preparer):
    before = preparer.decode(preparer.chat([*BEFORE, *RESULTS, THEN], add_generation_prompt=False).token_ids)
    after = shown(preparer, [*BEFORE, *RESULTS, THEN, {"role": "assistant", "content": "Hm."}, user("So?")])
    assert after.startswith(before.replace("<image>" * 4, "<image>"))


def test_images_stand_inside_results_where_templates_allow(tmp_path):
    expected = "<tool_response>\nOne.<image>\n</tool_response>"
    for name, template in (("native", SHOWS), ("our own", CHATML_PARTS)):
        assert expected in shown(preparer_for(tmp_path / name, template), [*BEFORE, *RESULTS])


@pytest.mark.parametrize("name", ["shows to users", "strings"])
def test_other_images_follow_their_numbered_results(tmp_path, name):
    prompt = shown(preparer_for(tmp_path, TEMPLATES[name]), [*BEFORE, *RESULTS, THEN]).replace("\n", "")
    assert "<tool_response>One.[image 1]</tool_response>" in prompt
    assert "<tool_response>[image 2]Two.</tool_response>" in prompt
    assert prompt.endswith(
        "<|im_start|>user[image 1]<image>[image 2]<image>And this?<image><|im_end|><|im_start|>assistant"
    )
    again = [*BEFORE, *RESULTS, calls("c"), result("c", [IMAGES[3]])]
    assert "[image 3]<image><|im_end|>" in shown(preparer_for(tmp_path, TEMPLATES[name]), again).replace("\n", "")


def test_text_results_become_strings_where_templates_need_them(tmp_path):
    listed = [user("Look."), calls("a"), result("a", [text("One."), text("Two.")])]
    assert "<tool_response>\nOne.\nTwo.\n</tool_response>" in shown(preparer_for(tmp_path, QWEN), listed)


def test_template_sees_ends_of_overlong_ids(tmp_path):
    strict = "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}" + (
        "{{ raise_exception('length 9') }}{% endif %}{% endfor %}{% endfor %}" + MISTRAL
    )
    preparer = preparer_for(tmp_path, strict)
    assert preparer.answers.tool_form.call_id_length == 9
    assert "[TOOL_CALLS]" in shown(preparer, [user("Look."), calls("toolu_0123456789"), result("toolu_0123456789", "")])
    with pytest.raises(InvalidRequestError, match="length 9"):
        preparer.chat([user("Look."), calls("short"), result("short", "")])


def test_unrequested_result_is_rejected_where_function_is_needed(tmp_path):
    named = QWEN.replace("<tool_response>\n' + message.content", "<tool_response>\n' + message.name + message.content")
    preparer = preparer_for(tmp_path, named)
    assert "get_weatherRain" in shown(preparer, [user("Look."), calls("a"), result("a", "Rain")])
    with pytest.raises(InvalidRequestError, match="no call before its result has the id 'b'"):
        preparer.chat([user("Look."), calls("a"), result("b", "Rain")])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_truncated_call_is_shown_as_text(tmp_path, template):
    cut = calls("a", "b")
    cut["tool_calls"][1]["function"] = {"name": "get_weather", "arguments": '{"city": "Ber</s>'}
    preparer = preparer_for(tmp_path, template)
    written = shown(preparer, [user("Look."), cut, result("a", "Rain"), result("b", "No arguments.")])
    assert '{"name": "get_weather", "arguments": {"city": "Ber</s>' in written
    assert written.index("Look.") < written.index("Bern") < written.index("No arguments.")


def test_arguments_that_are_nested_without_end_are_refused(tmp_path):
    deep = calls("a")
    deep["tool_calls"][0]["function"] = {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}
    with pytest.raises(InvalidRequestError, match="at most 100 levels"):
        preparer_for(tmp_path, QWEN).chat([user("Look."), deep])
