"""Limits CPU time and memory of chat templates, which are untrusted code. Jinja's sandbox does not."""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from vlmserve.cancellation import check_cancelled, client
from vlmserve.errors import ModelLoadError

logger = logging.getLogger(__name__)

MAX_SECONDS = 5.0
"""CPU seconds of a rendering."""
REDUCED_SECONDS = 0.5
"""CPU seconds for a client with `_FULL_TRIES` recent timeouts. Long conversations take 0.05 s."""
QUICK_SECONDS = 0.05
"""CPU seconds of a rendering that may delay other requests."""
_FULL_TRIES = 3
"""Timeouts within `MEMORY_SECONDS` after which a client gets `REDUCED_SECONDS`."""
MEMORY_SECONDS = 60.0
MAX_CLIENTS = 1024
"""Clients with remembered timeouts."""
MAX_VALUE_BYTES = 64 * 2**20
"""Memory of one text or list, and of the rendered text."""
MAX_TOTAL_BYTES = 2**30
"""Memory of all values of a rendering, including discarded ones."""
MAX_SOURCE = 2**20
"""Maximum characters of a template."""
_MAX_NUMBER = 10_000
"""Maximum width or indent."""
_MAX_FORMAT = 10_000
"""Maximum characters of a format string."""
CHECK_INTERVAL = 16
"""Operations between two checks of the time."""
_MAX_BITS = 100_000
"""Maximum bits of an integer."""

_CHARGE, _MEASURE, _CONCAT = "vlmserve_charge", "vlmserve_measure", "vlmserve_concat"
_UNBOUNDED = ("pprint", "urlize", "wordwrap", "xmlattr", "striptags", "slice", "batch")
"""Removed filters: chat templates do not need them, and their work does not depend on the size of the input."""
_SIZED = ("center", "ljust", "rjust", "zfill", "indent", "expandtabs", "truncate", "round", "tojson")
"""Filters and methods that take a width."""
_BRACES = re.compile(r"\{[^{}]*[{}]")
_LONG_NUMBER = re.compile(r"\d{5,}")
_WIDE = re.compile(r"%[-+ #0]*(?:\([^)%]*\))?[-+ #0]*(?:\d{5,}|\*|\d*\.(?:\d{5,}|\*))")


_SCALARS = (str, bytes, int)
_CONTAINERS = (list, tuple, dict, set, frozenset)


class TemplateLimitError(ModelLoadError):
    """A template that exceeds a limit."""


class TemplateTimeError(TemplateLimitError):
    """A template that exceeds its time."""


class SlowRenderingError(TemplateLimitError):
    """A rendering that is not quick (`only_quick`)."""


class _Budget:
    def __init__(self, seconds: float) -> None:
        self._is_quick = _only_quick.get() and seconds > QUICK_SECONDS
        self._seconds = QUICK_SECONDS if self._is_quick else seconds
        self._end = time.thread_time() + self._seconds
        self._bytes = MAX_TOTAL_BYTES
        self._operations = 0

    def charge(self, num_bytes: int) -> None:
        """Raises TemplateLimitError when time or memory is used up."""
        self._bytes -= num_bytes
        if self._bytes < 0:
            raise TemplateLimitError(f"the chat template makes more than {MAX_TOTAL_BYTES // 2**20:,} MiB of text")
        self._operations += 1
        if self._operations % CHECK_INTERVAL:
            return
        check_cancelled()
        if time.thread_time() > self._end:
            if self._is_quick:
                raise SlowRenderingError("the chat template takes long")
            raise TemplateTimeError(f"the chat template takes longer than {self._seconds:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget of a template")
_only_quick: ContextVar[bool] = ContextVar("only quick renderings", default=False)


@contextmanager
def only_quick() -> Iterator[None]:
    """Raise SlowRenderingError after `QUICK_SECONDS`. The caller may repeat the rendering without this."""
    token = _only_quick.set(True)
    try:
        yield
    finally:
        _only_quick.reset(token)


class TemplateLimits:
    """A client with several recent timeouts gets less time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timeouts: OrderedDict[str, deque[float]] = OrderedDict()
        """Times of a client's latest timeouts, from `time.monotonic`."""

    @contextmanager
    def apply(self) -> Iterator[None]:
        token = _budget.set(_Budget(MAX_SECONDS if self._is_trusted() else min(REDUCED_SECONDS, MAX_SECONDS)))
        try:
            yield
        except TemplateTimeError:
            self._count_timeout()
            raise
        finally:
            _budget.reset(token)

    def _is_trusted(self) -> bool:
        with self._lock:
            times = self._timeouts.get(client.get())
            return times is None or len(times) < _FULL_TRIES or times[0] < time.monotonic() - MEMORY_SECONDS

    def _count_timeout(self) -> None:
        was_trusted, name = self._is_trusted(), client.get()
        with self._lock:
            self._timeouts.setdefault(name, deque(maxlen=_FULL_TRIES)).append(time.monotonic())
            self._timeouts.move_to_end(name)
            if len(self._timeouts) > MAX_CLIENTS:
                self._timeouts.popitem(last=False)
        if was_trusted and not self._is_trusted():
            logger.warning(
                "The chat template took longer than %g s %d times for one client, which gets %g s for the next %g s",
                MAX_SECONDS,
                _FULL_TRIES,
                REDUCED_SECONDS,
                MEMORY_SECONDS,
            )


def _check(num_bytes: int) -> None:
    if num_bytes > MAX_VALUE_BYTES:
        raise TemplateLimitError(f"the chat template makes a value of more than {MAX_VALUE_BYTES // 2**20} MiB")


def _size(value: Any, known: dict[int, int] | None = None) -> int:
    """Repeated parts count each time. known: sizes of containers, by id."""
    if isinstance(value, _SCALARS):
        return sys.getsizeof(value)
    if not isinstance(value, _CONTAINERS):
        return 64
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = 64  # it may contain itself
        size = 64
        for one in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            size += sys.getsizeof(one) if isinstance(one, str) else _size(one, known)
        known[id(value)] = size
    return known[id(value)]


def _made(value: Any) -> Any:
    size = _size(value)
    _check(size)
    _budget.get().charge(size)
    return value


def _check_arguments(name: str, value: Any, others: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Runs before the filter or method does."""
    arguments = (*others, *keywords.values())
    numbers = [abs(one) for one in arguments if isinstance(one, int)]
    widest = max(numbers, default=0)
    if name in _SIZED and widest > _MAX_NUMBER:
        raise TemplateLimitError(f"the chat template calls {name} with a number above {_MAX_NUMBER:,}")
    size, others_size = _size(value), _size(arguments)
    _check(size + others_size)
    if name in ("format", "format_map"):
        _check_format(str(value), others_size)
    elif name in ("indent", "expandtabs"):
        lines = str(value).count("\t" if name == "expandtabs" else "\n")
        _check(size + lines * max(widest, others_size))
    elif name == "tojson":
        _check(size * (1 + widest))
    elif name == "replace":
        _check(size + str(value).count(str(arguments[0]) if arguments else "") * others_size)
    elif name == "join":
        joined, separator = (arguments, size) if isinstance(value, str) else ([value], others_size)
        _check(size + others_size + sum(map(_length, joined)) * separator)
    elif name == "translate":
        _check(_length(value) * others_size)


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else _MAX_NUMBER


def _check_format(text: str, num_bytes: int) -> None:
    """Check a format string that shows values of `num_bytes` bytes."""
    if len(text) > _MAX_FORMAT:
        raise TemplateLimitError(f"the chat template has a format string of more than {_MAX_FORMAT:,} characters")
    braces = (field for field in _BRACES.findall(text) if ":" in field)
    if any(field.endswith("{") or _LONG_NUMBER.search(field) for field in braces) or _WIDE.search(text):
        raise TemplateLimitError("the chat template has a format string with a width above 9,999 or a computed one")
    _check((text.count("%") + text.count("{")) * (num_bytes + _MAX_NUMBER))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        value, *others = arguments[1:] if takes_context else arguments
        _budget.get().charge(0)
        _check_arguments(name, value, tuple(others), keywords)
        return _made(function(*arguments, **keywords))

    return call


@pass_context  # not at compile time
def _charge(_: Context, num_bytes: int) -> None:
    _budget.get().charge(num_bytes)


@pass_context
def _measure(_: Context, value: Any) -> Any:
    return _made(value)


@pass_context
def _concat(_: Context, values: list[Any]) -> str:
    _check(_size(values))
    return str(_made("".join(map(str, values))))


class _Charges(NodeTransformer):
    """Makes a template's code charge for loop bodies, joined texts and new lists."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            one if isinstance(one, nodes.TemplateData | nodes.Const) else _filter(one, _MEASURE) for one in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._measured(node) if node.ctx == "load" else node

    def _body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        number = nodes.Const(64 + 4 * text, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter(number, _CHARGE), lineno=node.lineno))
        return node

    def _measured(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _MEASURE)

    visit_For = visit_Macro = visit_CallBlock = _body
    visit_List = visit_Dict = _measured


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. Compile and render within `TemplateLimits`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False)
        self.intercepted_binops = frozenset(("+", "*", "**", "%"))
        for name in _UNBOUNDED:
            del self.filters[name]
        del self.globals["lipsum"]

    def guard(self) -> None:
        self.filters.update({name: _guarded(name, function) for name, function in self.filters.items()})
        self.filters.update({_CHARGE: _charge, _MEASURE: _measure, _CONCAT: _concat})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} fit")
        tree = super()._parse(source, name, filename)
        _Charges().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            size = sys.getsizeof(left) + sys.getsizeof(right)
            _check(size)
            _budget.get().charge(size)
            return left + right
        _budget.get().charge(0)
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            _check_format(left, _size(right))
        elif operator == "*" and integers:
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and not isinstance(value, int | float):
                    _check(_size(value) * max(0, count))
        elif operator == "**" and integers:
            _check_bits(left.bit_length() * max(0, right))
        elif operator == "+":
            _check(_size(left) + _size(right))
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """These parameter names cannot collide with a template's keywords."""
        _budget.get().charge(0)
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_arguments(method.__name__, owner, args, kwargs)
        else:
            _check(_size((args, kwargs)))
        return _made(super().call(__context, __obj, *args, **kwargs))


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"the chat template computes an integer of more than {_MAX_BITS:,} bits")
