"""YAML files that people write: read so that nothing in them means other than it seems to."""

import re
import textwrap
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.input_file import read_file

DEEPEST = 4  # brackets within one another; no option takes more than one list
LARGEST_CONFIG = 1 << 20  # bytes
_PLAIN_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]{0,30})(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?\.(inf|nan)", re.I)


def yaml_mapping(path: Path, what: str, flag: str, example: str) -> dict[str, Any]:
    """The values of a YAML mapping by name, yet to be validated.

    what, flag, example: how errors name the file, the option it was given to, and a line it may hold. Raises
    ConfigError where it is no such file.
    """
    content = read_file(path, LARGEST_CONFIG, what, flag, ConfigError)
    try:
        values = yaml.load(content.decode("utf-8-sig"), PlainYaml)
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not UTF-8 text; give a YAML file.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # PyYAML lets through that a date has no 31st
        problem = textwrap.shorten(str(error), 400, placeholder=" ...")
        raise ConfigError(f"The {what} {path} is not valid YAML: {problem}. Correct it there.") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"The {what} {path} is not a mapping; write lines such as {example}.")
    return {str(name): value for name, value in (values or {}).items()}


class PlainYaml(yaml.SafeLoader):
    """YAML that says what it seems to say: PyYAML would take the last of two equal keys, 010 for 8 and 1:30 for 90.

    Options have no use for aliases, of which a few nested lines stand for millions of values, nor for tags.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise _unclear("aliases (*) and tags (!) are not taken here", event)
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Refused here, since what PyYAML does with open brackets grows with the square of their number."""
        if self.flow_level == DEEPEST:
            raise yaml.scanner.ScannerError(problem="brackets are nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in counts.items() if count > 1]:
            raise _unclear(f"{twice[0]:.100} is given twice", node)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """One that no other notation than the decimal one would read otherwise."""
        if not _PLAIN_NUMBER.fullmatch(node.value):
            raise _unclear(f"{quoted(node.value)} is not a plain number: write it in decimal digits", node)
        integer = node.tag == "tag:yaml.org,2002:int"
        return int(self.construct_yaml_int(node)) if integer else float(self.construct_yaml_float(node))


for _tag in ("int", "float"):
    PlainYaml.add_constructor(f"tag:yaml.org,2002:{_tag}", PlainYaml.construct_number)


def _unclear(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
