from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.prompt.tokenizers_for_tests import CHATML_PARTS, CHATML_STRINGS, LLAVA_STYLE
from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.prompt.checkpoint import LLAVA_TEMPLATE
from vlmserve.prompt.template import ChatTemplate, ImagePart, Message

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    Message("system", ("Be brief.",), is_string=True),
    Message("user", (ImagePart(), "What is this?")),
    Message("assistant", ("A cat.",), is_string=True),
    Message("user", ("And this? ", ImagePart(), ImagePart())),
]
FEATURES = (
    "{{ bos_token }}{% set ns = namespace(count=0) %}\n"
    "{% for message in messages %}\n"
    "    {% if loop.index0 == 0 and message['role'] == 'system' %}{% continue %}{% endif %}\n"
    "    {% set ns.count = ns.count + 1 %}\n"
    "{% generation %}{{ ns.count }}: {{ message.content | tojson }}{% endgeneration %}\n"
    "{% endfor %}{{ strftime_now('%Y') }} {{ tools is none }} {{ add_generation_prompt }}"
)


def _as_parts(message: Message) -> dict[str, object]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts]
    return {"role": message.role, "content": parts}


@pytest.mark.parametrize("source", [LLAVA_STYLE, CHATML_PARTS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_parts_render_as_in_transformers(source: str, add_generation_prompt: bool) -> None:
    template = ChatTemplate(source, SPECIAL, "<image>")
    theirs, _ = render_jinja_template(
        conversations=[[_as_parts(message) for message in CONVERSATION]],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
    )
    assert template.render(CONVERSATION, add_generation_prompt=add_generation_prompt) == theirs[0]


@pytest.mark.parametrize("source", [CHATML_STRINGS, CHATML_PARTS, FEATURES])
def test_strings_render_as_in_transformers(source: str) -> None:
    messages = [Message("system", (" Be <b>brief</b>.\n",), True), Message("user", ("Who's “there”?",), True)]
    chat = [{"role": message.role, "content": message.parts[0]} for message in messages]
    theirs, _ = render_jinja_template(conversations=[chat], chat_template=source, add_generation_prompt=True, **SPECIAL)
    assert ChatTemplate(source, SPECIAL, None).render(messages) == theirs[0]


def test_our_llava_format_is_that_of_published_llava_checkpoints() -> None:
    ours, theirs = (ChatTemplate(source, SPECIAL, "<image>") for source in (LLAVA_TEMPLATE, LLAVA_STYLE))
    assert ours.render(CONVERSATION) == theirs.render(CONVERSATION)


def test_a_template_with_a_default_for_images_has_its_own() -> None:
    source = (
        "{% if not image_token is defined %}{% set image_token = '<look><image></look>' %}{% endif %}"
        "{% for message in messages %}{% for part in message.content %}"
        "{{ image_token if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    )
    messages = [Message("user", (ImagePart(), "What is this?"))]
    template = ChatTemplate(source, SPECIAL, "<image>")
    theirs, _ = render_jinja_template(
        conversations=[[_as_parts(message) for message in messages]], chat_template=source, **SPECIAL
    )
    assert template.takes_images
    assert template.render(messages) == theirs[0] == "<look><image></look>What is this?"
    named = ChatTemplate(source, {**SPECIAL, "image_token": "<image>"}, "<image>")
    assert named.render(messages) == "<image>What is this?", "what the tokenizer names counts, as in transformers"


@pytest.mark.parametrize(
    ("source", "strings", "parts", "images"),
    [
        (LLAVA_STYLE, False, True, True),
        (CHATML_STRINGS, True, False, False),
        (CHATML_PARTS, True, True, True),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", False, True, False),
    ],
)
def test_the_form_that_a_template_takes_is_found_out(source: str, strings: bool, parts: bool, images: bool) -> None:
    template = ChatTemplate(source, SPECIAL, "<image>")
    assert (template.takes_strings, template.takes_parts, template.takes_images) == (strings, parts, images)


def test_in_string_templates_an_image_is_its_placeholder() -> None:
    text = ChatTemplate(CHATML_STRINGS, SPECIAL, "<image>").render([Message("user", (ImagePart(), "What is this?"))])
    assert text == "<|im_start|>user\n<image>\nWhat is this?<|im_end|>\n<|im_start|>assistant\n"


def test_in_part_templates_that_know_no_images_an_image_is_its_placeholder() -> None:
    source = "{% for m in messages %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}"
    text = ChatTemplate(source, SPECIAL, "<image>").render([Message("user", (ImagePart(), "Hi"))])
    assert text == "[<image>][Hi]"


SETTABLE = "{% if enable_thinking is not defined or enable_thinking %}Think. {% endif %}" + CHATML_STRINGS


def test_settings_that_a_template_knows_render_as_in_transformers() -> None:
    template = ChatTemplate(SETTABLE, SPECIAL, None)
    assert template.settings == {"enable_thinking"}
    question = [Message("user", ("Hi",), is_string=True)]
    for settings in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        chat = [{"role": "user", "content": "Hi"}]
        theirs, _ = render_jinja_template([chat], chat_template=SETTABLE, add_generation_prompt=True, **settings)
        assert template.render(question, settings={**settings, "unknown": 1}) == theirs[0]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_settings_cannot_replace_what_is_the_requests(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot set {name}"):
        ChatTemplate(CHATML_STRINGS, SPECIAL, None).render(CONVERSATION[:1], settings={name: "x"})


def test_a_template_that_raises_refuses_the_request() -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    template = ChatTemplate(source + "{{ m.content }}{% endfor %}", SPECIAL, None)
    with pytest.raises(InvalidRequestError, match="no system here") as caught:
        template.render(CONVERSATION)
    assert caught.value.param == "messages"


def test_a_template_that_breaks_refuses_the_request() -> None:
    template = ChatTemplate("{{ messages[7].content + 1 }}", SPECIAL, None)
    with pytest.raises(InvalidRequestError, match="does not accept"):
        template.render(CONVERSATION)


def test_a_template_cannot_leave_the_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", SPECIAL, None)
    with pytest.raises(InvalidRequestError, match="unsafe"):
        template.render(CONVERSATION)


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="compile"):
        ChatTemplate("{% for %}", SPECIAL, None)
