"""``python -m stackrl.runtime.preemption RUN_DIR``: notice that the cloud takes this machine away.

Asks the metadata service of AWS, Google Cloud and Azure, whichever answers, and makes the file ``preempt``
in the run's folder. Anybody else may make it too, such as a hook of SkyPilot for the event `preemption`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from stackrl.runtime.run import RunFolder

METADATA_VARIABLE = "STACKRL_METADATA"
METADATA = "http://169.254.169.254"
"""The address that all three clouds give their metadata service."""
EVERY = 5.0
"""Seconds between two questions. The shortest notice of a cloud is 30 s."""
_ANSWER_LIMIT = 2.0
_TRIES = 3
"""Rounds without any answer, from the start, after which there is no such service here."""
_TOKEN_SECONDS = 21_600

_direct = build_opener(ProxyHandler({}))  # the service is this machine's own; a proxy does not know it


class NoAnswer(Exception):
    """No such metadata service is here."""


def aws(base: str) -> str:
    """The notice of a spot instance's end, two minutes ahead; empty where there is none."""
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
    token = _ask(f"{base}/latest/api/token", seconds, method="PUT")
    if not token:
        raise NoAnswer
    said = _ask(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return said if '"action"' in said else ""


def google(base: str) -> str:
    answer = _ask(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if answer not in ("TRUE", "FALSE"):
        raise NoAnswer
    return "the instance is being preempted" if answer == "TRUE" else ""


def azure(base: str) -> str:
    answer = _ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    try:
        events = json.loads(answer)["Events"]
    except (ValueError, KeyError, TypeError):
        raise NoAnswer from None
    ends = [event for event in events if event.get("EventType") in ("Preempt", "Terminate")]
    return json.dumps(ends[0]) if ends else ""


CLOUDS: Mapping[str, Callable[[str], str]] = {"AWS": aws, "Google Cloud": google, "Azure": azure}


def notice(base: str) -> tuple[str, bool]:
    """What a cloud says about the end of this machine, and whether any cloud's service answered."""
    answered = False
    for cloud, ask in CLOUDS.items():
        try:
            said = ask(base)
        except NoAnswer:
            continue
        answered = True
        if said:
            return f"{cloud}: {said}", True
    return "", answered


def watched(environment: Mapping[str, str]) -> bool:
    """Whether this is a machine that somebody may take away: one that SkyPilot brought."""
    return any(name.startswith("SKYPILOT_") for name in environment)


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    """The answer's text; empty where there is none at this address. Raises NoAnswer where nobody is there."""
    question = Request(url, headers=dict(headers), method=method)
    try:
        with _direct.open(question, timeout=_ANSWER_LIMIT) as answer:
            return answer.read(1 << 16).decode(errors="replace").strip()
    except HTTPError as error:
        error.close()
        return ""
    except (URLError, OSError):
        raise NoAnswer from None


def main() -> int:
    run, base = RunFolder(sys.argv[1]), os.environ.get(METADATA_VARIABLE) or METADATA
    left = _TRIES
    while left:
        said, answered = notice(base)
        if said:
            print(said, flush=True)
            run.preempt.touch(mode=0o600)
            return 0
        left = math.inf if answered else left - 1
        time.sleep(EVERY)
    print(f"no metadata service at {base}: a preemption is noticed by {run.preempt.name} alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
