"""`data:` and `validation:` of a supervised stage: rows of files instead of environments' demonstrations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stackrl.schemas.base import Model

Role = Literal["system", "user", "assistant", "tool"]
Paths = str | Annotated[list[str], Field(min_length=1)]


class Data(Model):
    """Rows with `messages`, or with `prompt` and `completion`, in JSON Lines or Parquet."""

    path: Paths = Field(min_length=1, examples=["data/chats.jsonl", "data/*.parquet"])
    """A file (.jsonl or .parquet), a folder of such files, a pattern like `data/*.parquet`, or a list of
    these."""
    learn: list[Role] = Field(default=["assistant"], min_length=1)
    """Roles whose messages are learnt, with the token that ends each; of a row with `prompt` and `completion`
    in the completion alone."""
    limit: int | None = Field(default=None, ge=1)
    """Rows that are used, from the beginning; by default all."""
    shuffle: bool = True
    """Take the rows in another order in every epoch; else always as they stand in the files."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Rows of more tokens than `trainer.sequence_length`: the run ends before its first step, the row is left
    out, or its end is."""
    rewritten: Literal["error", "split"] = "error"
    """Rows whose earlier turns the chat template changes when others follow, as those of reasoning models do:
    the run ends before its first step, or each such turn becomes a sequence of its own."""


class Validation(Model):
    """Rows that are held out. Exactly one of `path` and `share`."""

    path: Paths | None = Field(default=None, min_length=1)
    """Files of their own, as in `data.path`."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the stage's rows, chosen by the seed, that is not trained on."""
    every: int = Field(default=50, ge=1)
    """Optimizer steps between two measurements of the loss; it is always measured after the stage's last."""
    limit: int | None = Field(default=None, ge=1)
    """Rows that are used at most."""
