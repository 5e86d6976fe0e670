"""The run's token, as it travels: ``Authorization: Bearer <token>`` on every request between roles."""

from __future__ import annotations

import hmac


def bearer(token: str) -> dict[str, str]:
    """Headers that show ``token``."""
    return {"Authorization": f"Bearer {token}"}


def authorized(header: str | None, token: str) -> bool:
    """Whether the Authorization ``header`` of a request shows ``token``; takes equal time for any header."""
    shown = (header or "").encode(errors="surrogateescape")  # any bytes may come from outside
    return hmac.compare_digest(shown, f"Bearer {token}".encode())


def blotted(text: str, token: str) -> str:
    """``text`` with ``***`` in the place of ``token``, which a URL spells as it is (see `new_token`)."""
    return text.replace(token, "***") if token else text
