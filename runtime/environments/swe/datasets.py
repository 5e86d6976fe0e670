"""Where tasks come from: files, or data sets of the Hugging Face Hub, in SWE-bench's format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from stackrl.runtime.environments.questions import rows_of
from stackrl.runtime.environments.swe.instances import Instance, InstanceError, UnknownTests


@dataclass(frozen=True)
class Known:
    """A data set that is known by a short name, and what its images are like."""

    id: str
    split: str
    image: str
    """Empty where each task names its own."""
    python: str = "/opt/miniconda3/envs/testbed/bin/python"
    folder: str = "/testbed"


_IMAGES = "swebench/sweb.eval.x86_64.{docker_id}:latest"
KNOWN: Mapping[str, Known] = {
    "swe-bench": Known("princeton-nlp/SWE-bench", "test", _IMAGES),
    "swe-bench-lite": Known("princeton-nlp/SWE-bench_Lite", "test", _IMAGES),
    "swe-bench-verified": Known("princeton-nlp/SWE-bench_Verified", "test", _IMAGES),
    "swe-rebench": Known("nebius/SWE-rebench", "filtered", ""),
}


log = logging.getLogger(__name__)


def instances(dataset: str, subset: str, split: str, limit: int | None) -> list[Instance]:
    """The tasks of files or of a data set; those with tests that nothing here runs are left out, and told.

    Raises DataError and InstanceError with what to do.
    """
    known = KNOWN.get(dataset)
    name, part = (known.id, split or known.split) if known else (dataset, split or "test")
    found: list[Instance] = []
    left_out: list[UnknownTests] = []
    for row in rows_of(name, subset, part, limit):
        try:
            found.append(Instance.of(row.values))
        except UnknownTests as error:
            left_out.append(error)
        except InstanceError as error:
            raise InstanceError(f"{row.place}: {error}") from None
    if not found:
        raise left_out[0]
    if left_out:
        together = len(found) + len(left_out)
        log.warning("%s: %d of %d tasks are left out; %s", dataset, len(left_out), together, left_out[0])
    return found
