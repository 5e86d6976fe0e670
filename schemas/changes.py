"""Sections of which another section gives some keys only: what a stage or an environment changes."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer

from stackrl.schemas.base import Model


class Change(Model):
    """What is changed of a section: every key may be left out."""

    nullable: ClassVar[frozenset[str]] = frozenset()
    """Keys that the section may lack: null, where it is written, takes them away."""

    def says(self, key: str) -> bool:
        """Whether ``key`` is changed."""
        return key in self.model_fields_set and (getattr(self, key) is not None or key in self.nullable)

    @model_serializer(mode="wrap")
    def _as_written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is left out stays left out: as null it would be taken away when this is read again."""
        return {key: value for key, value in whole(self).items() if key in self.model_fields_set}


def partial(name: str, *models: type[Model], **sections: type[Change]) -> type[Change]:
    """The keys of all ``models`` (one of which, by its `type`, a section is), every one optional.

    ``sections``: for a key that is a section of its own, what can be changed of it.
    """
    fields: dict[str, Any] = {}
    for key, field in (item for model in models for item in model.model_fields.items()):
        kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        if key == "type" and len(models) > 1:
            kind = Literal[*(model.model_fields[key].annotation.__args__[0] for model in models)]
        kind = sections.get(key, kind)
        fields.setdefault(key, (kind | None, Field(default=None, description=field.description)))
    changed = " or ".join(model.__name__ for model in models)
    made = create_model(name, __base__=Change, __doc__=f"Changes to {changed}.", **fields)
    made.nullable = frozenset(
        key
        for model in models
        for key, field in model.model_fields.items()
        if NoneType in get_args(field.annotation)
    )
    return made


def changed(model: Model, change: Change | None) -> Model | dict[str, Any]:
    """``model`` with ``change`` applied, not yet checked."""
    return model if change is None else _merged(model.model_dump(), change)


def _merged(values: dict[str, Any], change: Change) -> dict[str, Any]:
    """``values`` of a section with ``change`` applied. Those of another `type` say nothing about the new."""
    dumped = change.model_dump(exclude_unset=True)
    given = {key: value for key, value in dumped.items() if change.says(key)}
    if given.get("type", values.get("type")) != values.get("type"):
        values = {}
    sections = {key: part for key in given if isinstance(part := getattr(change, key), Change)}
    return values | given | {key: _merged(values.get(key, {}), part) for key, part in sections.items()}
