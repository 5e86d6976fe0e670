"""What single tokens are as bytes, so that a page can put a rollout's text together without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """The tokens of a Hugging Face folder. Without a tokenizer.json a token is shown as its number."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = _load(model / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder() if self._tokenizer else {}
        self._added = {number: token.content for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}
        self._byte_level = bool(self._tokenizer) and "ByteLevel(" in repr(self._tokenizer.decoder)

    def special(self, token: int) -> bool:
        """Whether the token stands for no text, such as the end of a turn."""
        return token in self._special

    def of(self, tokens: Iterable[int]) -> list[bytes]:
        return [self._bytes(token) for token in tokens]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        word = self._tokenizer.id_to_token(token) if self._tokenizer and token >= 0 else None
        if word is None:
            return f"⟨{token}⟩".encode()
        if self._byte_level and all(letter in _BYTE_OF for letter in word):
            return bytes(_BYTE_OF[letter] for letter in word)
        if byte := _BYTE.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return word.replace("▁", " ").encode(errors="replace")


def text(pieces: Iterable[bytes]) -> str:
    """The text of a row of tokens."""
    return b"".join(pieces).decode(errors="replace")


def as_json(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are only a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _load(file: Path) -> Tokenizer | None:
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises a bare Exception for a file that it cannot read
        return None


def _byte_alphabet() -> dict[str, int]:
    """Letter → byte, as byte-level tokenizers of GPT-2's kind write them: printable bytes stand for
    themselves, the others for the letters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
