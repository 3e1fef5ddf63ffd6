"""The names that a chat template reads: template variables, and keys of messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a template reads.

    Attributes:
        variables: names that the template does not set.
        keys: attributes and constant strings; each may be the key of a message.
    """

    variables: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()


class _Generation(Extension):
    """The block ``{% generation %}`` of transformers, which marks an assistant's tokens."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def names_read(source: str) -> Names:
    """Return the names that the template ``source`` reads; empty if ``source`` is no template."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        tree = environment.parse(source)
        variables = find_undeclared_variables(tree)
    except TemplateError:  # rendering refuses the template with the reason
        return Names()
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    keys |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return Names(frozenset(variables), frozenset(keys))
