"""A Jinja sandbox for templates of strangers: allow-lists for what they touch, meters for what they use.

Jinja's own sandbox hides Python's internals but bounds neither time nor memory. Here the syntax tree is rewritten so
that every loop body, operation and output passes a guard, and a node that is on no list is refused before it is
compiled. Nothing is folded to a constant while compiling, because folding would run unguarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import Template, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from inference.engine.template_operations import (
    FILTERS,
    METER,
    METHODS,
    TESTS,
    Limits,
    Meter,
    Method,
    Operation,
    TemplateLimit,
    text_of,
)

MAX_SOURCE = 256 * 2**10

_ALLOWED_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.With),
    *(nodes.Assign, nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock),
    *(nodes.Break, nodes.Continue, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List),
    *(nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
)
_LOOP_ATTRIBUTES = frozenset({
    "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0",
})  # fmt: skip
_ITERABLES = (list, tuple, dict, str, range, Undefined)

# Our own filters; a colon keeps their names apart from a template's. To reach one would only be to be checked.
_TICK, _ITERATE, _WRITE, _CONCAT, _OPERAND, _SLICE = (
    f"guard:{name}" for name in ("tick", "iterate", "write", "concat", "operand", "slice")
)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one kind of template: Hugging Face's block trimming, loop controls, and ``functions``.

    The tag ``generation``, with which Hugging Face marks assistant text, is accepted and prints its body.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

    def __init__(self, functions: Mapping[str, Operation]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.filters = {**FILTERS, **_GUARDS}
        self.tests = dict(TESTS)
        self.globals = {"range": safe_range, "namespace": Namespace, **functions}
        self._functions = frozenset(self.globals.values())

    def compile_template(self, source: str) -> tuple[Template, frozenset[str]]:
        """The guarded template, and the literal texts in it.

        Raises:
            TemplateSyntaxError: it is too long, is no template, or uses what is on no list.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateSyntaxError(f"it is longer than {MAX_SOURCE} characters", 1)
        tree = self.parse(source)
        literals = frozenset(_literals(tree))
        for node in tree.find_all(nodes.Node):
            _check_node(node)
        tree = _Guards().visit(tree)
        tree.set_environment(self)
        code = self.compile(tree, filename="<chat template>")
        return self.template_class.from_code(self, code, self.make_globals(None)), literals

    def render(self, template: Template, variables: Mapping[str, Any], limits: Limits) -> str:
        """The template's output.

        Raises:
            TemplateLimit: a limit was passed.
            Exception: whatever else the template provokes; see ``FAILURES`` in ``chat_template``.
        """
        token = METER.set(Meter(limits))
        try:
            pieces = []
            size = 0
            for piece in template.root_render_func(template.new_context(dict(variables))):
                size += len(piece)
                if size > limits.output:
                    raise TemplateLimit(f"its output is longer than {limits.output} characters.")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            METER.reset(token)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What ``obj.attribute`` is for a template: a key, a listed method, or undefined.

        Raises:
            SecurityError: Python knows such an attribute, and it is on no list.
        """
        METER.get().tick()
        if attribute in METHODS.get(type(obj), ()):
            return Method(obj, attribute)
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if attribute.startswith("_"):
            raise SecurityError(f"the attribute {attribute!r} is not available.")
        readable = isinstance(obj, Namespace | Undefined) or (
            isinstance(obj, LoopContext) and attribute in _LOOP_ATTRIBUTES
        )
        try:
            value = getattr(obj, attribute)
        except AttributeError:
            return self.undefined(obj=obj, name=attribute)
        if not readable:
            raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not available.")
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """What ``obj[argument]`` is for a template: an element, or what ``getattr`` says, or undefined."""
        METER.get().weigh(argument)
        if isinstance(obj, dict | list | tuple | str | range):
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a listed method or function; anything else is refused.

        The two unusual names leave every keyword free for the template.
        """
        METER.get().tick()
        if not isinstance(__obj, Method | Macro | LoopContext | Undefined) and not (
            __self._is_function(__obj)
        ):
            raise SecurityError(f"a {type(__obj).__name__} cannot be called.")
        if isinstance(__obj, LoopContext):
            METER.get().weigh(*args)
        return __context.call(__obj, *args, **kwargs)

    def _is_function(self, value: Any) -> bool:
        return any(value is function for function in self._functions)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator, unless its result would be too large."""
        meter = METER.get()
        meter.weigh(left, right)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    size = len(value) if isinstance(value, str) else meter.weigh(value)
                    meter.reserve(size * times)
        if operator == "%" and isinstance(left, str):
            raise SecurityError("% does not format texts here; use ~.")
        return meter.made(super().call_binop(context, operator, left, right))


class _GenerationTag(Extension):
    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.With([], [], body, lineno=line)


def _literals(tree: nodes.Template) -> Iterator[str]:
    for data in tree.find_all(nodes.TemplateData):
        yield data.data
    for const in tree.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value


def _check_node(node: nodes.Node) -> None:
    kind = type(node).__name__
    if isinstance(node, nodes.Filter) and node.name not in FILTERS:
        raise TemplateSyntaxError(f"the filter {node.name!r} is not available", node.lineno)
    if isinstance(node, nodes.Test) and node.name not in TESTS:
        raise TemplateSyntaxError(f"the test {node.name!r} is not available", node.lineno)
    if not isinstance(node, _ALLOWED_NODES):
        raise TemplateSyntaxError(f"{kind} is not available", node.lineno)
    if getattr(node, "dyn_args", None) or getattr(node, "dyn_kwargs", None):
        raise TemplateSyntaxError("calls with * or ** are not available", node.lineno)
    name = _name_of(node)
    if name.startswith("_") or (isinstance(node, nodes.Name) and name in ("self", "super")):
        raise TemplateSyntaxError(f"the name {name!r} is not available", node.lineno)


def _name_of(node: nodes.Node) -> str:
    match node:
        case nodes.Name() | nodes.Macro():
            return node.name
        case nodes.NSRef() | nodes.Getattr():
            return node.attr
        case nodes.Keyword():
            return node.key
    return ""


class _Guards(NodeTransformer):
    """Puts a guard before everything that could take time or room."""

    def visit(self, node: nodes.Node, *_args: Any, **_kwargs: Any) -> Any:
        """The guarded form of ``node``; its children come first."""
        self.generic_visit(node)
        rewrite = _REWRITES.get(type(node))
        return node if rewrite is None else rewrite(node)


def _guard_output(node: nodes.Output) -> nodes.Output:
    node.nodes = [_guard(_WRITE, child) for child in node.nodes]
    return node


def _guard_loop(node: nodes.For) -> nodes.For:
    line = node.lineno
    node.iter = _guard(_ITERATE, node.iter)
    node.body.insert(0, nodes.ExprStmt(_tick(line), lineno=line))
    if node.test is not None:
        node.test = nodes.And(_tick(line), node.test, lineno=line)
    return node


def _guard_concat(node: nodes.Concat) -> nodes.Expr:
    return _guard(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))


def _guard_comparison(node: nodes.Compare) -> nodes.Compare:
    node.expr = _guard(_OPERAND, node.expr)
    for operand in node.ops:
        operand.expr = _guard(_OPERAND, operand.expr)
    return node


def _guard_pair(node: nodes.Pair) -> nodes.Pair:
    # A key is hashed, which walks through it.
    node.key = _guard(_OPERAND, node.key)
    return node


def _guard_item(node: nodes.Getitem) -> nodes.Expr:
    if not isinstance(node.arg, nodes.Slice):
        return node
    # Jinja compiles a slice to Python's own, past `Sandbox.getitem`.
    bounds = (node.arg.start, node.arg.stop, node.arg.step)
    none = nodes.Const(None, lineno=node.lineno)
    return _guard(_SLICE, node.node, *(none if bound is None else bound for bound in bounds))


_REWRITES: Mapping[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    nodes.Output: _guard_output,
    nodes.For: _guard_loop,
    nodes.Concat: _guard_concat,
    nodes.Compare: _guard_comparison,
    nodes.Pair: _guard_pair,
    nodes.Getitem: _guard_item,
}


def _guard(name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _tick(line: int) -> nodes.Expr:
    return _guard(_TICK, nodes.Const(True, lineno=line))


@pass_context
def _look_at_clock(_context: Context, value: bool) -> bool:
    METER.get().tick()
    return value


@pass_context
def _iterate(_context: Context, value: Any) -> Any:
    METER.get().tick()
    if not isinstance(value, _ITERABLES):
        raise TypeError(f"a {type(value).__name__} cannot be iterated over.")
    return value


@pass_context
def _write(_context: Context, value: Any) -> str:
    METER.get().weigh(value)
    return str(METER.get().made(text_of(value)))


@pass_context
def _concat(_context: Context, values: list[Any]) -> str:
    METER.get().weigh(values)
    return str(METER.get().made("".join(map(text_of, values))))


@pass_context
def _weigh_operand(_context: Context, value: Any) -> Any:
    METER.get().weigh(value)
    return value


@pass_context
def _slice(_context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    return METER.get().made(value[start:stop:step])


_GUARDS: Mapping[str, Operation] = {
    _TICK: _look_at_clock,
    _ITERATE: _iterate,
    _WRITE: _write,
    _CONCAT: _concat,
    _OPERAND: _weigh_operand,
    _SLICE: _slice,
}
