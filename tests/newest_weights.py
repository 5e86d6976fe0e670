"""What a weight server has, as anybody with the token can ask it."""

from __future__ import annotations

import httpx

from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.messages import Version, WeightManifest, decode


def newest_version(url: str, token: str) -> Version | None:
    """The newest version that the weight server at ``url`` has; None before the first."""
    answer = httpx.get(f"{url}/weights/manifest", headers=bearer(token), timeout=10)
    if answer.status_code == 404:
        return None
    return decode(answer.raise_for_status().content, WeightManifest).version
