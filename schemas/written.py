"""A checked stack as a file would say it."""

from __future__ import annotations

from typing import Any

from stackrl.schemas.base import Model


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
            if plain[name] is not None or field.get_default() is not None
        }
    if isinstance(value, list | tuple):
        return [_kept(one, inner) for one, inner in zip(value, plain, strict=True)]
    return plain
