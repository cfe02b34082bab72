from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.prompt.tokenizers_for_tests import CHATML_PARTS, CHATML_STRINGS, LLAVA_STYLE
from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.families.llava import TEMPLATE
from vlmserve.prompt.template import ChatTemplate, ImagePart, Message, Role, ToolCall

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
    "    {% if loop.index0 == 0 and message['role'] == 'system' %}{{ message.content }};{% continue %}"
    "{% endif %}\n"
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


def test_our_llava_format_equals_published_llava() -> None:
    ours, theirs = (ChatTemplate(source, SPECIAL, "<image>") for source in (TEMPLATE, LLAVA_STYLE))
    assert ours.render(CONVERSATION) == theirs.render(CONVERSATION)


def test_template_with_an_image_default_keeps_it() -> None:
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
    assert template.render(messages) == theirs[0] == "<look><image></look>What is this?"
    named = ChatTemplate(source, {**SPECIAL, "image_token": "<image>"}, "<image>")
    assert named.render(messages) == "<image>What is this?", "what the tokenizer names counts, as in transformers"


def test_in_string_templates_an_image_is_its_placeholder() -> None:
    text = ChatTemplate(CHATML_STRINGS, SPECIAL, "<image>").render([Message("user", (ImagePart(), "What is this?"))])
    assert text == "<|im_start|>user\n<image>\nWhat is this?<|im_end|>\n<|im_start|>assistant\n"


def test_image_becomes_placeholder_in_part_templates_without_images() -> None:
    source = "{% for m in messages %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}"
    text = ChatTemplate(source, SPECIAL, "<image>").render([Message("user", (ImagePart(), "Hi"))])
    assert text == "[<image>][Hi]"


SETTABLE = "{% if enable_thinking is not defined or enable_thinking %}Think. {% endif %}" + CHATML_STRINGS


def test_known_template_settings_render_as_in_transformers() -> None:
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
    source = "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no answers here') }}{% endif %}"
    template = ChatTemplate(source + "{{ m.content }}{% endfor %}", SPECIAL, None)
    with pytest.raises(InvalidRequestError, match="no answers here") as caught:
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


GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {{ '<turn>' + message['role'] + '\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}{%- for item in message['content'] -%}
        {%- if item['type'] == 'image' -%}<image>{%- else -%}{{ item['text'] | trim }}{%- endif -%}
    {%- endfor -%}{%- endif -%}
    {{ '</turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<turn>assistant\n' }}{%- endif -%}"""
MISTRAL = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system = messages[0]['content'] %}
    {%- else %}{%- set system = messages[0]['content'][0]['text'] %}{%- endif %}
    {%- set turns = messages[1:] %}
{%- else %}{%- set system = 'Default.' %}{%- set turns = messages %}{%- endif %}
{{- '[SYS]' + system + '[/SYS]' }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' }}{%- for block in message['content'] %}
            {%- if block['type'] == 'text' %}{{- block['text'] }}{%- else %}{{- '<image>' }}{%- endif %}
        {%- endfor %}{{- '[/INST]' }}{%- endif %}
    {%- elif message['role'] == 'system' %}{{- '[SYS]' + message['content'] + '[/SYS]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}
        {%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""
QWEN = """{%- macro written(content) %}{%- if content is string %}{{- content }}{%- else %}
    {%- for item in content %}{%- if 'text' in item %}{{- item.text }}{%- else %}{{- '<image>' }}{%- endif %}
    {%- endfor %}
{%- endif %}{%- endmacro %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
    {{- raise_exception('No user query found.') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be first.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + written(message.content) | trim + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
NO_SYSTEM = """{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system here') }}{%- endif %}
{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"""
TEMPLATES = {"gemma": GEMMA, "mistral": MISTRAL, "qwen": QWEN, "no system": NO_SYSTEM}
"""The constructs in which published templates lose or reject text."""
CHATS = {
    "two systems": ["system", "system", "user"],
    "one in between": ["system", "user", "assistant", "system", "user"],
    "one only in between": ["user", "assistant", "system", "user"],
    "one at the end": ["user", "assistant", "user", "system"],
    "systems only": ["system", "system"],
    "two of the user": ["user", "user", "assistant", "assistant", "user"],
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("roles", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("count", [1, 2])
def test_every_text_of_every_role_is_shown(source: str, roles: list[Role], count: int) -> None:
    messages = [
        Message(role, tuple(f"text {number}.{part}" for part in range(count)), is_string=count == 1)
        for number, role in enumerate(roles)
    ]
    text = ChatTemplate(source, SPECIAL, "<image>").render(messages)
    for message in messages:
        for part in message.parts:
            assert text.count(str(part)) == 1


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("role", ["system", "user"])
def test_empty_texts_are_accepted(source: str, role: Role) -> None:
    template = ChatTemplate(source, SPECIAL, "<image>")
    question = Message("user", ("Hi",), is_string=True)
    empty = Message(role, ("",), is_string=True)
    assert "Hi" in template.render([empty, question])
    assert template.render([Message(role, ("",)), question]) == template.render([empty, question])


@pytest.mark.parametrize("before", [(), ("system",)], ids=["alone", "system"])
def test_assistant_first_follows_an_empty_user(before: tuple[Role, ...]) -> None:
    roles: tuple[Role, ...] = (*before, "assistant", "user")
    messages = [Message(role, (f"the {role}",), True) for role in roles]
    for source in (GEMMA, MISTRAL, QWEN):
        text = ChatTemplate(source, SPECIAL, "<image>").render(messages)
        assert [text.count(f"the {role}") for role in roles] == [1] * len(roles)
    with_user = [*messages[:-2], Message("user", ("",), True), *messages[-2:]]
    gemma = ChatTemplate(GEMMA, SPECIAL, "<image>")
    assert gemma.render(messages) == gemma.render(with_user)


def test_other_faults_keep_the_template_message() -> None:
    source = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{{ m.content }}"
    messages = [Message("assistant", ("a",), tool_calls=(ToolCall("1", "f", {}),)), Message("user", ("b",))]
    with pytest.raises(InvalidRequestError, match="does not accept these messages: no calls"):
        ChatTemplate(source + "{% endfor %}", SPECIAL, None).render(messages)


def test_joined_systems_are_one_first_message() -> None:
    messages = [Message(role, (text,), True) for role, text in (("user", "a"), ("system", "b"), ("system", "c"))]
    assert (
        ChatTemplate(QWEN, SPECIAL, None)
        .render(messages)
        .startswith("<|im_start|>system\nb\n\nc<|im_end|>\n<|im_start|>user\na<|im_end|>\n")
    )
    assert ChatTemplate(NO_SYSTEM, SPECIAL, None).render(messages) == "user: b\n\nc\n\na\n"


def test_images_of_system_messages_keep_their_order() -> None:
    messages = [Message("user", (ImagePart(), "a")), Message("system", (ImagePart(), "b")), Message("user", ("c",))]
    text = ChatTemplate(GEMMA, SPECIAL, "<image>").render(messages)
    assert text.count("<image>") == 2
    assert text.index("a") < text.rindex("<image>") < text.index("b")


THINKING_PARTS = """{%- for m in messages %}{{ m.role + ': ' }}
{%- if m.content is string %}{{ m.content }}{%- else %}{%- for part in m.content %}
    {%- if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}{%- else %}{{ part.text }}{%- endif %}
{%- endfor %}{%- endif %}{%- for call in m.tool_calls or () %}{{ call.function.name + '()' }}{%- endfor %}
{{- ';' }}{%- endfor %}"""


def test_reasoning_is_a_part_where_templates_want_it() -> None:
    template = ChatTemplate(THINKING_PARTS, SPECIAL, None)
    called = Message("assistant", ("",), True, tool_calls=(ToolCall("1", "f", {}),), reasoning="Which?")
    messages = [Message("user", ("Hi",)), Message("assistant", ("Yes.",), True, reasoning="Hm."), called]
    shown = "user: Hi;assistant: [THINK]Hm.[/THINK]Yes.;assistant: [THINK]Which?[/THINK]f();"
    assert template.render(messages) == shown


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_templates_read_reasoning_under_their_name(name: str) -> None:
    source = "{% for m in messages %}{{ m.role }}: {% if m." + name + " %}({{ m." + name + " }}) {% endif %}"
    template = ChatTemplate(source + "{{ m.content }};{% endfor %}", SPECIAL, None)
    messages = [Message("user", ("Hi",)), Message("assistant", ("Yes.",), reasoning="Hm.")]
    assert template.render(messages) == "user: Hi;assistant: (Hm.) Yes.;"


def test_text_moves_into_reasoning_before_calls() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.thinking }}|{{ m.content }};{% endfor %}"
    )
    answer = Message("assistant", ("Look.",), tool_calls=(ToolCall("1", "f", {}),), reasoning="Hm.")
    text = ChatTemplate(source, SPECIAL, None).render([Message("user", ("Hi",)), answer])
    assert text == "|Hi;Hm.\n\nLook.|;"


@pytest.mark.parametrize(
    "source", [*TEMPLATES.values(), CHATML_STRINGS, CHATML_PARTS], ids=[*TEMPLATES, "strings", "parts"]
)
@pytest.mark.parametrize("content", [("It is a",), ("It is", " a")])
def test_a_continued_message_ends_the_prompt(source: str, content: tuple[str, ...]) -> None:
    messages = [Message("user", ("What is this?",), True), Message("assistant", content, len(content) == 1)]
    template = ChatTemplate(source, SPECIAL, "<image>")
    text = template.render(messages, continue_final_message=True)
    assert text.endswith(content[-1])
    assert template.render(messages, add_generation_prompt=False).startswith(text)


def test_hidden_message_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", SPECIAL, None)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        template.render([Message("user", ("Hi",)), Message("assistant", ("It",))], continue_final_message=True)
