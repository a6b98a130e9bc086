"""The program of the process that renders a request's chat template; see `client_template`, which passes its text to Python.

It reads one JSON object from standard input and writes the text to standard output. Templates see what they see in
transformers: loop controls, `generation`, `tojson`, `raise_exception`, `strftime_now`.
"""

import contextlib
import datetime
import json
import resource
import sys

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Environment(ImmutableSandboxedEnvironment):
    """Numbers and repetitions that would take all memory in one step are refused before."""

    intercepted_binops = frozenset({"*", "**"})
    most = 1 << 24  # characters or items of a repetition; digits of a power are fewer

    def call_binop(self, context, operator, left, right):  # type: ignore[no-untyped-def]
        if operator == "**":
            raise TemplateError("** is not offered")
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(many, "__len__") and len(many) * times > self.most:
                raise TemplateError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


class Generation(Extension):
    """Renders what a template marks as the model's, for its training, like all else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(value: object, ensure_ascii: bool = False, indent: "int | None" = None, **options: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # type: ignore[arg-type]


def render(template: str, variables: dict[str, object], limit: int) -> None:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    written = 0
    for piece in environment.from_string(template).generate(**variables):
        encoded = piece.encode()
        written += len(encoded)
        if written > limit:
            raise TemplateError(f"it renders more than {limit} bytes, which no prompt can have here")
        sys.stdout.buffer.write(encoded)


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    with contextlib.suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (task["memory"], task["memory"]))
    try:
        render(task["template"], task["variables"], task["limit"])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}"[:400].replace("\n", " "))


if __name__ == "__main__":
    main()
