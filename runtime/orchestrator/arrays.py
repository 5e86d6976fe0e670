"""The arrays of finished rollouts, a file each: the journal's states say which are needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.transport.messages import MessageError, decode, encode

log = logging.getLogger(__name__)


class Arrays:
    """Those in ``folder``, which is made where it is missing. Every method raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def write(self, rollout: Rollout) -> None:
        """The file appears as a whole."""
        path = self._file(rollout.id)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(encode(rollout))
        os.replace(temporary, path)

    def read(self, rollout: str) -> Rollout:
        """Raises MessageError where the file is damaged."""
        return decode(self._file(rollout).read_bytes(), Rollout)

    def holds(self, rollout: str) -> bool:
        """Whether the rollout can be read; a warning says why not."""
        try:
            return self.read(rollout).id == rollout
        except (OSError, MessageError) as error:
            log.warning("rollout %s is done again, its arrays are gone: %s", rollout, error)
            return False

    def delete(self, rollouts: Iterable[str]) -> None:
        for rollout in rollouts:
            self._file(rollout).unlink(missing_ok=True)

    def delete_all_but(self, rollouts: Iterable[str]) -> None:
        keep = {self._file(rollout) for rollout in rollouts}
        for file in self._folder.iterdir():
            if file not in keep:
                file.unlink()

    def _file(self, rollout: str) -> Path:
        return self._folder / f"{rollout}.msgpack"
