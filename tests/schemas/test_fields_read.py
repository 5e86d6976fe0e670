"""A key that no code reads is a fault: it would be accepted and do nothing."""

import ast
from typing import Literal, get_args, get_origin

import stacks
from stackrl.schemas import stages, support
from stackrl.schemas.base import Model
from stackrl.schemas.stack import StageSettings


def models():
    """Every section that a stack can hold. What a stage changes is read through the section it changes."""
    found, queue = set(), [Model]
    while queue:
        for model in queue.pop().__subclasses__():
            if model not in (StageSettings, stages.Change):
                queue.append(model)
                found.add(model)
    return sorted(found, key=lambda model: model.__name__)


def names_read():
    """Attribute names (and names given to getattr) in all code outside schemas/ and tests/."""
    names = set()
    for file in [stacks.ROOT / "cli.py", *(stacks.ROOT / "runtime").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "getattr"
                and len(node.args) > 1
            ):
                names |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
    return names


def one_word(field):
    """A key like `type: adamw`, which can say one thing only."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def test_every_field_is_read():
    names = names_read()
    unread = {
        f"{model.__name__}.{name}"
        for model in models()
        for name, field in model.model_fields.items()
        if name not in names and not one_word(field)
    }
    assert unread <= support.NOT_READ, sorted(unread - support.NOT_READ)


def test_sections_left_out_are_as_if_they_had_been_checked():
    """Defaults of sections are made without a validator."""
    defaults = [field.default for model in models() for field in model.model_fields.values()]
    sections = [default for default in defaults if isinstance(default, Model)]
    assert len(sections) > 20
    for section in sections:
        assert type(section)(**section.model_dump(exclude_defaults=True)) == section
        assert type(section).model_validate(section.model_dump()) == section
