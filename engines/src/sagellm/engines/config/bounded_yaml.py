"""Parses YAML, which may be untrusted, within limits.

Aliases stand for whole trees, so a few hundred bytes can describe billions of values, and each digit, level
and value costs time in a parser written in Python.
"""

from __future__ import annotations

from typing import Any

import yaml

from sagellm.core import ConfigError

MAX_BYTES = 64 << 10
_MAX_DEPTH = 32
_MAX_VALUES = 5_000  # keys count too, and an alias counts as everything it stands for
_MAX_DIGITS = 40
_MAX_REASON = 300  # characters; some messages quote a whole tag


class YAMLSyntaxError(ConfigError):
    """The text is not YAML, or has an invalid value."""


def parse_yaml(text: str) -> Any:
    """Return the plain values, lists and mappings of a YAML text, within a second and 100 MB.

    Raises YAMLSyntaxError for invalid YAML, and ConfigError for a text that exceeds a limit.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"it is longer than {MAX_BYTES} bytes")
    try:
        return _BoundedLoader(text).get_single_data()
    except ConfigError:
        raise
    except Exception as error:  # YAMLError, and errors of int, datetime and PyYAML's constructors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise YAMLSyntaxError(reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…") from error


class _BoundedLoader(yaml.SafeLoader):
    """Raises ConfigError as soon as a limit is exceeded, without reading the rest."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_values = 0
        self._sizes: dict[str, int] = {}  # values below each anchor, aliases included

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Build one value and all below it."""
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        anchor, is_alias = event.anchor or "", isinstance(event, yaml.AliasEvent)
        if is_alias and anchor in self.anchors and anchor not in self._sizes:
            raise ConfigError(f"the alias *{anchor} refers to a value that contains it")
        before = self._num_values
        self._num_values += self._sizes.get(anchor, 0) if is_alias else 1
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ConfigError(f"it is nested more than {_MAX_DEPTH} deep")
        if self._num_values > _MAX_VALUES:
            raise ConfigError(f"it has more than {_MAX_VALUES} values, counting what aliases stand for")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if anchor and not is_alias:
            self._sizes[anchor] = self._num_values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Build a mapping; refuse duplicate keys, which would silently drop a value."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise ConfigError(f"it has the key {key.value[:80]!r} twice in one mapping; keep one")
                seen.add((key.tag, key.value))
        return node

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """Read an integer or a float of YAML, which may be in base 2, 8, 16 or 60."""
        if len(node.value) > _MAX_DIGITS:
            raise ConfigError(f"it has a number of {len(node.value)} digits; the limit is {_MAX_DIGITS}")
        is_int = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _BoundedLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _BoundedLoader.construct_number)
