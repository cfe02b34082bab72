"""The tool call formats of models, and which one a model uses."""

from __future__ import annotations

import re
from dataclasses import replace

from vlmserve.frontend.gemma_tools import GemmaToolForm
from vlmserve.frontend.tools import ToolForm
from vlmserve.frontend.xml_tools import XMLToolForm
from vlmserve.prompt.template import ChatTemplate
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import ToolCallParser

_HERMES = ToolForm(
    "hermes", "arguments", trigger="<tool_call>", prefix="\n", suffix="\n</tool_call>", separator="\n<tool_call>"
)
"""Hermes and Qwen: https://github.com/NousResearch/Hermes-Function-Calling"""
_LLAMA3 = ToolForm("llama3_json", "parameters", separator="; ")
"""Llama 3.1 and 3.2: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/"""
_MISTRAL = ToolForm(
    "mistral", "arguments", trigger="[TOOL_CALLS]", opening=" [", closing="]", separator=", ", call_id_length=9
)
"""Mistral: https://docs.mistral.ai/capabilities/function_calling"""
_QWEN3_XML = XMLToolForm(
    "qwen3_xml", "", trigger="<tool_call>", prefix="\n", suffix="\n</tool_call>", separator="\n<tool_call>"
)
"""Qwen3-Coder and Qwen3.5: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct"""
_GEMMA4 = GemmaToolForm("gemma4", "", trigger="<|tool_call>", suffix="<tool_call|>", separator="<|tool_call>")
"""Gemma 4: https://ai.google.dev/gemma/docs"""
_FORMS = {form.name: form for form in (_HERMES, _LLAMA3, _MISTRAL, _QWEN3_XML, _GEMMA4)} | {"qwen3_coder": _QWEN3_XML}
"""By vLLM's names; Qwen3-Coder has two."""


def choose_form(template: ChatTemplate | None, tokenizer: Tokenizer, wanted: ToolCallParser) -> ToolForm:
    """Choose `wanted`, else the format of the chat template.

    If the template lacks tools or uses another format, the system message describes both.
    """
    source = "" if template is None or not template.knows_tools else template.source
    if wanted != "auto":
        form, native = _FORMS[wanted], bool(source)
    else:
        detected = _detect(source)
        form, native = detected or _HERMES, detected is not None
    if form is _MISTRAL:
        form = replace(form, opening="[" if "[TOOL_CALLS][" in source else " [")
    special = {tokenizer.token(id_) or "": id_ for id_ in tokenizer.special_ids}
    return replace(form.with_special(special), native=native)


def _detect(source: str) -> ToolForm | None:
    if "<|tool_call>" in source and "call:" in source:
        return _GEMMA4
    if "<tool_call>" in source and "<function=" in source and "<parameter=" in source:
        return _QWEN3_XML
    if "<tool_call>" in source and "arguments" in source and not re.search("<function=|arg_key", source):
        return _HERMES
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source and "name" in source:
        return _MISTRAL
    if "parameters" in source and ("python_tag" in source or "ipython" in source):
        return _LLAMA3
    return None
