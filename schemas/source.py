"""YAML text → plain values, and where each of them is written.

PyYAML's safe loader with what a configuration language needs besides: duplicate keys, keys that are not
text, values that JSON does not know and anchors that expand without end are refused, each with its place.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

import yaml

from stackrl.schemas.problems import Path, Place, Problem, StackError

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
"""Values in a file, counted after its anchors are expanded."""
MAX_DEPTH = 64
"""Lists and mappings inside one another. A stack needs ten."""

_STRING, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes ``1e-5`` for a number as editors do (YAML 1.2); YAML 1.1 takes it for text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As SafeLoader, and a number or date that cannot be one is told with its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise yaml.constructor.ConstructorError(
                problem=f"this is no number and no date: {str(error).partition(':')[0]}",
                problem_mark=node.start_mark,
            ) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass
class Source:
    """A file's values and the places of its keys and values."""

    name: str
    text: str
    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)

    def place(self, path: Path, at_key: bool = False) -> Place:
        """Where ``path`` is written, or the nearest thing above it that is."""
        while path and path not in self.values:
            path, at_key = path[:-1], True
        at = self.keys if at_key and path in self.keys else self.values
        return at.get(path, Place(self.name, 1, 1))

    def locate(self, problem: Problem) -> Problem:
        return Problem(
            problem.path,
            problem.what,
            problem.mend,
            problem.at_key,
            problem.place or self.place(problem.path, problem.at_key),
        )


def read_file(path: File) -> tuple[str, str]:
    """A file's name as people know it and its text. Raises StackError."""
    name = str(path)
    if not os.path.exists(path):  # unlike Path.exists, False also for a name that no file can have
        near = sorted(str(file) for file in File("stacks").glob("*.yaml"))
        mend = "here are " + ", ".join(near) if near else "`stackrl init` writes one"
        raise StackError([Problem((), "there is no such file", mend, place=Place(name))])
    if path.is_dir():
        mend = f"name the file: {path / 'NAME.yaml'}"
        raise StackError([Problem((), "is a folder, not a stack file", mend, place=Place(name))])
    if path.is_fifo() and not name.startswith(("/dev/stdin", "/dev/fd/")):  # those have a writer
        what = "is a named pipe, which nobody may ever write to"
        raise StackError([Problem((), what, "name a file", place=Place(name))])
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise _refused(name, f"a stack holds at most {MAX_BYTES} bytes", "keep data out of the stack")
        return name, content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(name, f"byte {error.start} is not UTF-8", "save the file as UTF-8 text") from None
    except OSError as error:
        raise _refused(name, f"cannot be read: {error.strerror}") from None


def parse(name: str, text: str) -> Source:
    """Read ``text``. Raises StackError with everything that is wrong with it as YAML."""
    source = Source(name, text)
    root = _compose(source)
    if root is None:
        raise _refused(name, "the file is empty", "`stackrl init` writes a stack to start from")
    if not isinstance(root, yaml.MappingNode):
        what = "this is not a stack: the file must be a mapping of keys"
        mend = "`stackrl init` writes a stack to start from"
        raise StackError([Problem((), what, mend, place=_at(name, root))])
    _refuse_expansion(name, root)
    problems = list(_key_problems(name, root, ()))
    if problems:
        raise StackError(problems)
    source.data = _construct(name, text, root)
    _note_places(source, root, ())
    problems = [source.locate(problem) for problem in not_json(source.data, ())]
    if problems:
        raise StackError(problems)
    return source


def parse_value(text: str) -> Any:
    """One value of the command line, typed as in a file. Raises ValueError with the reason."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_expansion("", root)
        for problem in _key_problems("", root, ()):
            raise ValueError(problem.what)
        return loader.construct_document(root)
    except StackError as error:
        raise ValueError(error.problems[0].what) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(getattr(error, "problem", None) or "not a YAML value") from None
    finally:
        loader.dispose()


def not_json(value: Any, path: Path) -> list[Problem]:
    """Values that JSON does not know: SkyPilot passes the stack on as JSON."""
    if isinstance(value, dict):
        return [problem for key, item in value.items() for problem in not_json(item, (*path, key))]
    if isinstance(value, list):
        return [problem for index, item in enumerate(value) for problem in not_json(item, (*path, index))]
    if isinstance(value, float) and not math.isfinite(value):
        return [Problem(path, f"{value} is not a number that JSON knows", "write a finite number")]
    if value is None or isinstance(value, str | bool | int | float):
        return []
    kind = {"date": "a date", "datetime": "a date and time", "bytes": "binary data", "set": "a set"}
    name = kind.get(type(value).__name__, type(value).__name__)
    mend = f"put it in quotes: '{value}'" if "date" in name else "write text, a number, a list or a mapping"
    return [Problem(path, f"YAML reads this as {name}, which JSON does not know", mend)]


def _compose(source: Source) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(source.text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        before = source.text[: error.position]
        place = Place(source.name, before.count("\n") + 1, error.position - before.rfind("\n"))
        character = f"U+{error.character:04X}" if isinstance(error.character, int) else repr(error.character)
        raise StackError(
            [Problem((), f"the character {character} may not stand in YAML", "remove it", place=place)]
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what, mend = _yaml_words(error, source.text)
        raise StackError([Problem((), what, mend, place=_mark_place(source.name, mark))]) from None
    except RecursionError:
        raise _refused(
            source.name, "values are nested too deeply", "a stack needs fewer than ten levels"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def _yaml_words(error: yaml.MarkedYAMLError, text: str) -> tuple[str, str]:
    """PyYAML's message in plain words, and a mend."""
    problem = error.problem or "not YAML"
    mark = error.problem_mark
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "'\\t'" in problem or line[: len(line) - len(line.lstrip())].count("\t"):
        return "a tab: YAML indents with spaces only", "replace the tab by spaces"
    if "expected a single document" in problem or "another document" in problem:
        return "a second YAML document begins here", "a stack is one document: remove the line `---`"
    if "mapping values are not allowed" in problem:
        return (
            "not YAML: a second `:` in one line, or a wrong indentation",
            "put text that holds `: ` in quotes",
        )
    if "undefined alias" in problem:
        return f"not YAML: {problem}", "name an anchor (`&name`) that stands above"
    context = f" {error.context}" if error.context else ""
    return f"not YAML:{context} {problem}".replace("  ", " "), "check quotes, brackets and indentation here"


def _refuse_expansion(name: str, root: yaml.Node) -> None:
    """Anchors are shared nodes: count what they expand to, once per node. Refuse deep nesting, too."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int = 0) -> int:
        if depth > MAX_DEPTH:
            what, mend = "values are nested too deeply", "a stack needs fewer than ten levels"
            raise StackError([Problem((), what, mend, place=_at(name, node))])
        if id(node) in open_nodes:
            raise StackError(
                [Problem((), "this anchor contains itself", "remove the alias", place=_at(name, node))]
            )
        if id(node) not in sizes:
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in _children(node))
            open_nodes.discard(id(node))
        return sizes[id(node)]

    if (total := size(root)) > MAX_VALUES:
        raise _refused(
            name,
            f"the file holds {total} values once its anchors are expanded",
            f"a stack holds at most {MAX_VALUES}",
        )


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _key_problems(name: str, node: yaml.Node, path: Path):
    """Keys that stand twice in a mapping or are not text."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _key_problems(name, item, (*path, index))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            yield from _key_problems(name, value, path)
            continue
        if not isinstance(key, yaml.ScalarNode):
            what, mend = "a list or mapping stands as a key", "put text that begins with { or [ in quotes"
            yield Problem(path, what, mend, place=_at(name, key))
            continue
        if key.tag != _STRING:
            mend = f'put it in quotes: "{key.value}"'
            yield Problem(path, f"the key {key.value} is not text", mend, place=_at(name, key))
            continue
        if key.value in seen:
            first = seen[key.value].start_mark.line + 1
            what = f"the key stands twice, first in line {first}"
            yield Problem((*path, key.value), what, "remove one of them", place=_at(name, key))
        seen[key.value] = key
        yield from _key_problems(name, value, (*path, key.value))


def _construct(name: str, text: str, root: yaml.Node) -> Any:
    loader = _Loader(text)
    try:
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        what = error.problem or "not YAML"
        if "could not determine a constructor" in what:
            tag = re.search(r"'([^']+)'", what)
            what = f"the tag {tag[1] if tag else ''} means nothing here"
        mend = "put it in quotes if it is text" if "no number" in what else "write plain values"
        raise StackError([Problem((), what, mend, place=_mark_place(name, error.problem_mark))]) from None
    finally:
        loader.dispose()


def _note_places(source: Source, node: yaml.Node, path: Path) -> None:
    source.values[path] = _at(source.name, node)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, key.value)
            _note_places(source, value, inner)
            source.keys[inner] = _at(source.name, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_places(source, value, (*path, index))


def _at(name: str, node: yaml.Node) -> Place:
    return _mark_place(name, node.start_mark)


def _mark_place(name: str, mark: yaml.Mark | None) -> Place:
    return Place(name, mark.line + 1, mark.column + 1) if mark else Place(name, 1, 1)


def _refused(name: str, what: str, mend: str = "") -> StackError:
    return StackError([Problem((), what, mend, place=Place(name, 1, 1))])
