"""The tokenizer of pixie: byte-level BPE in which every digit and every capital letter stays a token of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from vlmserve.pixie.phrasings import SYSTEM_PROMPTS
from vlmserve.pixie.questions import Example, sample_example, text_only

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<image>", "<|user|>", "<|assistant|>", "<|system|>")
PAD, BOS, EOS, IMAGE, USER, ASSISTANT, SYSTEM = range(len(SPECIAL_TOKENS))
VOCAB_SIZE: Final = 1000

CHAT_TEMPLATE: Final = """\
{{- bos_token }}
{%- set functions = namespace(text='') %}
{%- for tool in tools or [] %}
    {%- set function = tool.function %}
    {%- set names = ((function.parameters or {}).properties or {}) | join(', ') %}
    {%- set functions.text = functions.text + ('; ' if functions.text else 'Functions: ') %}
    {%- set functions.text = functions.text + function.name + '(' + names + ')' %}
{%- endfor %}
{%- set functions.text = functions.text if functions.text | length <= 350 else '' %}
{%- if functions.text and messages[0]['role'] != 'system' %}
    {{- '<|system|>' + functions.text }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Roles are system, user, assistant and tool.') }}
    {%- endif %}
    {{- '<|user|><tool_response>\\n' if message['role'] == 'tool' else '<|' + message['role'] + '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'image' %}
                {{- '<image>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] | trim }}
            {%- else %}
                {{- raise_exception('Parts of a message are texts and images.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '\\n</tool_response>' }}
    {%- endif %}
    {%- if functions.text and loop.first and message['role'] == 'system' %}
        {{- '\\n' + functions.text }}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {%- set arguments = call.function.arguments %}
        {%- set text = arguments if arguments is string else arguments | tojson(separators=(',', ':')) %}
        {{- '' if loop.first and not message['content'] else '\\n' }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + text + '}\\n</tool_call>' }}
    {%- endfor %}
    {%- if message['role'] == 'assistant' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def _corpus(num_examples: int) -> Iterator[str]:
    yield from SYSTEM_PROMPTS * 20
    rng = random.Random(0)
    for seed in range(num_examples):
        # Every third one without an image: refused questions have the most words and need the merges.
        example = text_only(rng) if seed % 3 == 0 else sample_example(seed)
        for turn in example.turns:
            yield from turn


def train_tokenizer(num_examples: int = 30_000) -> Tokenizer:
    """Train on generated questions and answers; the result depends on ``num_examples`` only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[A-Z0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_examples), trainer)
    return tokenizer


def encode_example(tokenizer: Tokenizer | PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[bool]]:
    """Write an example as the chat template does, with one ``<image>`` id for each image.

    Returns the ids and, of the same length, which of them the model is to say: the answers with their ``</s>``.
    """

    def encode(text: str) -> list[int]:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return encoded if isinstance(encoded, list) else encoded.ids

    ids = [BOS]
    if example.system is not None:
        ids += [SYSTEM, *encode(example.system)]
    spoken = [False] * len(ids)
    for number, (question, answer) in enumerate(example.turns):
        images = [IMAGE] * (len(example.scenes) if number == 0 else 0)
        asked = encode(question)
        ids += [USER, *(asked + images if example.text_first else images + asked), ASSISTANT]
        spoken += [False] * (len(ids) - len(spoken))
        ids += [*encode(answer), EOS]
        spoken += [True] * (len(ids) - len(spoken))
    return ids, spoken
