"""Templates of strangers: what they may take of the machine."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest

from vlmserve import cancellation
from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.prompt import template_limits
from vlmserve.prompt.template import ChatTemplate, Message

SHOWS = "{% for m in messages %}{{ m.content }}{% endfor %}"
NESTED = "{% for a in range(100000) %}{% for b in range(100000) %}"
DOUBLES = "{% set ns = namespace(x='ab', y=['a']) %}{% for i in range(99) %}{% set ns."
ATTACKS = {
    "nested loops": NESTED + "x{% endfor %}{% endfor %}",
    "nested loops of long text": NESTED + "x" * 10_000 + "{% endfor %}{% endfor %}",
    "loops without output": NESTED + "{% endfor %}{% endfor %}",
    "loops in a set block": "{% set s %}" + NESTED + "x{% endfor %}{% endfor %}{% endset %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "callers": "{% macro f(n) %}" + NESTED + "{{ caller() }}{% endfor %}{% endfor %}{% endmacro %}"
    "{% call f(1) %}" + "x" * 1000 + "{% endcall %}",
    "doubled by +": DOUBLES + "x = ns.x + ns.x %}{% endfor %}",
    "doubled by ~": DOUBLES + "x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by %": DOUBLES + "x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubled by format": DOUBLES + "x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubled by format_map": DOUBLES + "x = '{a}{a}'.format_map({'a': ns.x}) %}{% endfor %}",
    "doubled by the format filter": DOUBLES + "x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
    "doubled by replace": DOUBLES + "x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "doubled by the replace method": DOUBLES + "x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "doubled by join": DOUBLES + "x = ns.x.join([ns.x] * 3) %}{% endfor %}",
    "doubled by the join filter": DOUBLES + "x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
    "doubled by indent": DOUBLES + "x = ('\n' ~ ns.x)|indent(ns.x ~ ns.x, true) ~ '\n' %}{% endfor %}",
    "doubled by a macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}" + DOUBLES + "x = f(ns.x) %}{% endfor %}",
    "doubled by a set block": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set s %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = s %}{% endfor %}",
    "nested lists": DOUBLES + "y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
    "nested tuples": DOUBLES + "y = (ns.y, ns.y) %}{% endfor %}{{ ns.y|tojson }}",
    "nested objects": DOUBLES + "y = {'a': ns.y, 'b': ns.y} %}{% endfor %}{{ ns.y|string }}",
    "nested objects by dict": DOUBLES + "y = dict(a=ns.y, b=ns.y) %}{% endfor %}{{ ns.y ~ '' }}",
    "a repeated string": "{{ 'a' * 10000000000 }}",
    "a repeated list": "{% set x = [1] * 10000000000 %}",
    "repeated the other way round": "{{ 10000000000 * 'a' }}",
    "a power": "{{ 10 ** 10000000000 }}",
    "squares": DOUBLES.replace("x='ab'", "x=3") + "x = ns.x * ns.x %}{% endfor %}",
    "a width": "{{ '{:9999999999}'.format(1) }}",
    "a computed width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "a width after %": "{{ '%9999999999d' % 1 }}",
    "a precision after %": "{{ '%.9999999999f' % 1 }}",
    "a computed width after %": "{{ '%*d' % (9999999999, 1) }}",
    "a width of a named value": "{{ '%(a)9999999999d' % {'a': 1} }}",
    "center": "{{ 'a'|center(9999999999) }}",
    "the center method": "{{ 'a'.center(9999999999) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "zfill": "{{ 'a'.zfill(9999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(9999999999) }}",
    "indent": "{{ ('a\n' * 100000)|indent(10000) }}",
    "JSON": "{{ ([1] * 100000)|tojson(indent=10000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "slices": "{{ [1]|slice(1000000000)|list }}",
    "mapped": "{{ range(100000)|map('center', 9999)|join }}",
    "a long source": "a" * 2**21,
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("when", ["at load", "in a request"])
def test_a_hostile_template_is_stopped(attack, when, monkeypatch):
    """Without limits each takes minutes or gigabytes. In a request: what the probes at load do not reach."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(template_limits, "MAX_TOTAL_BYTES", 2**26)
    monkeypatch.setattr(template_limits, "MAX_VALUE_BYTES", 2**22)
    source = SHOWS + ATTACKS[attack]
    if when == "in a request":
        source = SHOWS + "{% if messages|length == 9 %}" + ATTACKS[attack] + "{% endif %}"
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises((ModelLoadError, InvalidRequestError), match="chat template"):
            ChatTemplate(source, {}, None).render([Message("user", ("Hi",), is_string=True)] * 9)
        assert time.thread_time() - began < 20
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_a_long_conversation_is_within_the_limits():
    source = (
        "{% set ns = namespace(text='') %}{% macro show(m) %}<{{ m.role }}>{{ m.content|trim }}\n{% endmacro %}"
        "{% for m in messages %}{% set ns.text = ns.text + show(m) %}{% endfor %}"
        "{{ ns.text ~ '%s|{:>5}'|format('x') }}{{ 'a,b'.split(',')|join('-') }}{{ 99999|string }}{{ 4|default(99999) }}"
    )
    messages = [Message("user", ("word " * 100,), is_string=True)] * 500
    text = ChatTemplate(source, {}, None).render(messages)
    assert text.startswith("<user>word word")
    assert text.endswith("x|{:>5}a-b999994")


WHEN_LONG = SHOWS + "{% if messages|length >= 9 %}" + ATTACKS["loops without output"] + "{% endif %}"


def turns(count: int) -> list[Message]:
    return [Message("user", ("Hi",), is_string=True)] * count


def test_slow_rendering_is_told_from_a_quick_one(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.5)
    template = ChatTemplate(WHEN_LONG, {}, None)
    with template_limits.only_quick():
        assert "Hi" in template.render(turns(2))
        with pytest.raises(template_limits.SlowRenderingError):
            template.render(turns(9))
    with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.5 s"):
        template.render(turns(9))


def test_client_whose_renderings_time_out_gets_less_time(monkeypatch, caplog):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(template_limits, "REDUCED_SECONDS", 0.1)
    template = ChatTemplate(WHEN_LONG, {}, None)
    token = cancellation.client.set("slow")
    try:
        for seconds in (0.2, 0.2, 0.2, 0.1, 0.1):
            assert_times_out(template, seconds)
        assert "Hi" in template.render(turns(2))
        assert caplog.text.count("for one client") == 1
        cancellation.client.set("another")
        assert_times_out(template, 0.2)
        cancellation.client.set("slow")
        assert_times_out(template, 0.1)
        monkeypatch.setattr(template_limits, "MEMORY_SECONDS", 0.0)
        assert_times_out(template, 0.2)
    finally:
        cancellation.client.reset(token)


def assert_times_out(template: ChatTemplate, seconds: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"takes longer than {seconds} s"):
        template.render(turns(9))


def test_slow_probe_of_an_assistant_first_is_reported(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    slow = "{% if messages[0].role == 'assistant' %}" + ATTACKS["loops without output"] + "{% endif %}"
    template = ChatTemplate(slow + SHOWS, {}, None)
    with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.1 s"):
        template.render([Message("assistant", ("Hi",), is_string=True), *turns(1)])


def test_timeouts_of_many_clients_are_forgotten(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(template_limits, "REDUCED_SECONDS", 0.05)
    monkeypatch.setattr(template_limits, "MAX_CLIENTS", 2)
    template = ChatTemplate(WHEN_LONG, {}, None)
    token = cancellation.client.set("first")
    try:
        for name, seconds in (("first", 0.1), ("second", 0.1), ("third", 0.1), ("second", 0.05), ("third", 0.05)):
            cancellation.client.set(name)
            for _ in range(3):
                assert_times_out(template, seconds)
        cancellation.client.set("first")
        assert_times_out(template, 0.1)
    finally:
        cancellation.client.reset(token)


def test_slow_rendering_stops_for_a_client_that_left(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 60.0)
    template, left = ChatTemplate(WHEN_LONG, {}, None), threading.Event()
    token = cancellation.current.set(left)
    try:
        threading.Timer(0.2, left.set).start()
        with pytest.raises(InvalidRequestError, match="no longer needed"):
            template.render(turns(9))
    finally:
        cancellation.current.reset(token)
