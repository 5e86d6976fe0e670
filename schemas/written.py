"""A checked stack as a file would say it."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from stackrl.schemas.base import Model
from stackrl.schemas.changes import Change


def written(model: Model) -> dict[str, Any]:
    """``model`` as plain values with its defaults filled in, without the keys that say nothing.

    A key that is null and would be something else by default stays: there, null says something.
    """
    return _kept(model, model.model_dump(mode="json"))


def _kept(value: Any, plain: Any) -> Any:
    """``plain`` is ``value`` dumped."""
    if isinstance(value, Model):
        fields = type(value).model_fields
        return {
            name: _kept(getattr(value, name), plain[name])
            for name, field in fields.items()
            if name in plain and (plain[name] is not None or _says_null(value, field))
        }
    if isinstance(value, list | tuple):
        return [_kept(one, inner) for one, inner in zip(value, plain, strict=True)]
    return plain


def _says_null(section: Model, field: FieldInfo) -> bool:
    """Whether null is more than the absence of the key; of a change, only what is written is dumped."""
    return isinstance(section, Change) or field.get_default() is not None
