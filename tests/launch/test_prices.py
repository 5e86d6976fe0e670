"""What machines cost by SkyPilot's catalogs, which SkyPilot itself reads the same way."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from price_catalogs import write_catalogs

import stacks
from stackrl.runtime.launch.planning.candidates import Kind, candidates_of
from stackrl.runtime.launch.planning.prices import Price, catalogs, dollars, hourly, is_billed, price_of
from stackrl.schemas.loader import load

SKY_PYTHON = stacks.ROOT / ".venv-sky" / "bin" / "python"
H100 = {"accelerator": "H100", "gpus": 8}

PRICED = [
    # kind, on demand, spot, instance type where on demand
    (Kind("aws", **H100), 55.04, 24.80, "p5.48xlarge"),
    (Kind("aws/us-east-1", **H100), 55.04, 27.50, "p5.48xlarge"),
    (Kind("aws/us-east-1/use1-az1", **H100), 55.04, 31.10, "p5.48xlarge"),
    (Kind("aws", "L4", 1), 0.80, 0.35, "g6.xlarge"),
    (Kind("aws", "L4", 1, cpus="8+"), 0.98, 0.40, "g6.2xlarge"),
    (Kind("aws", "L4", 1, memory="16"), 0.80, 0.35, "g6.xlarge"),
    (Kind("aws", "H100", 1), 6.88, None, "p5.4xlarge"),
    (Kind("aws"), 0.384, 0.16, "m6i.2xlarge"),
    (Kind("aws", instance_type="p5.48xlarge"), 55.04, 24.80, "p5.48xlarge"),
    (Kind("gcp", **H100), 88.0, 24.0, "a3-highgpu-8g"),
    (Kind("gcp", "L4", 1), 0.7, 0.3, "g2-standard-4"),
    (Kind("nebius", "B200", 8), 44.0, None, "gpu-b200-sxm_8gpu"),
]


@pytest.fixture
def folder(tmp_path):
    return write_catalogs(tmp_path)


@pytest.mark.parametrize(("kind", "on_demand", "spot", "instance_type"), PRICED, ids=lambda value: str(value))
def test_the_cheapest_machine_that_has_what_is_asked(folder, kind, on_demand, spot, instance_type):
    price = price_of(kind, folder)
    assert price.on_demand is not None
    assert price.on_demand.dollars == pytest.approx(on_demand)
    assert price.on_demand.instance_type == instance_type
    assert (price.spot and price.spot.dollars) == (None if spot is None else pytest.approx(spot))


def test_anywhere_is_the_cheapest_cloud(folder):
    price = price_of(Kind(**H100), folder)
    assert str(price.on_demand) == "nebius gpu-h100-sxm_8gpu in eu-north1"
    assert price_of(Kind("*/us-west-2", **H100), folder).spot.dollars == 24.80


@pytest.mark.parametrize(
    "kind",
    [
        Kind("aws", "H100", 4),
        Kind("aws", "H10", 8),
        Kind("aws/eu-central-1", **H100),
        Kind("lambda", **H100),
        Kind("k8s", **H100),
        Kind("gcp", "L4", 3),
        Kind("gcp", "V100", 8),
        Kind("aws", cpus="512+"),
    ],
    ids=str,
)
def test_what_no_catalog_has_is_unknown(folder, kind):
    assert price_of(kind, folder) == Price(None, None)


@pytest.mark.parametrize("text", ["", "\n", "nothing,that\nis,known\n", "H100\nH100\n", "\xff\x00"])
def test_a_file_that_is_no_catalog_has_no_prices(folder, text):
    (folder / "aws" / "vms.csv").write_bytes(text.encode("latin-1"))
    for kind in (Kind("aws", **H100), Kind("aws"), Kind("aws", instance_type="p5.48xlarge")):
        assert price_of(kind, folder) == Price(None, None)


def test_gpus_go_by_any_case(folder):
    assert price_of(Kind("aws", "h100", 8), folder) == price_of(Kind("aws", **H100), folder)


def test_the_newest_catalogs_of_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalogs().name == "v8"
    assert price_of(Kind("aws", **H100)) == Price(None, None)
    written = write_catalogs(tmp_path)
    for name in ("v7", "v10", "tmp"):
        (written.parent / name).mkdir()
    assert catalogs() == written.parent / "v10"


GLM5 = {"slurm H200:8": 0.0, "k8s H200:8 spot": None, "aws B200:8 spot": 24 * 56.20}


def test_all_machines_of_a_run(folder, monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    loaded = load("stacks/glm5.yaml")
    found = candidates_of(loaded.stack, loaded.task)
    assert {str(candidate): hourly(candidate, folder) for candidate in found} == GLM5
    billed = [is_billed(candidate.groups[0].kind) for candidate in found]
    assert billed == [False, True, True]


def test_dollars():
    assert (dollars(1348.8), dollars(0.1)) == ("$1,348.80", "$0.10")


ORACLE = """\
import json, sys
import sky

def cheapest(infra, accelerators, cpus, memory, instance_type, spot):
    wanted = sky.Resources(infra=infra, accelerators=accelerators, cpus=cpus, memory=memory,
                           instance_type=instance_type, use_spot=spot)
    found = wanted.cloud.get_feasible_launchable_resources(wanted, num_nodes=1).resources_list
    costs = []
    for one in found:
        try:
            costs.append((one.get_cost(3600), one.instance_type))
        except ValueError:  # no price of this sort
            pass
    return min(costs, default=None)

print(json.dumps([cheapest(*wanted) for wanted in json.load(sys.stdin)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not SKY_PYTHON.exists(), reason="SkyPilot is not installed")
def test_skypilot_says_the_same(tmp_path):
    write_catalogs(tmp_path)
    asked = [
        (
            kind.infra,
            f"{kind.accelerator}:{kind.gpus}" if kind.gpus else None,
            kind.cpus or None,
            kind.memory or None,
            kind.instance_type or None,
            spot,
        )
        for kind, *_ in PRICED
        for spot in (False, True)
    ]
    done = subprocess.run(
        [SKY_PYTHON, "-c", ORACLE],
        input=json.dumps(asked),
        env=os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    theirs = [told and told[0] for told in json.loads(done.stdout.splitlines()[-1])]
    ours = [price for _, on_demand, spot, _ in PRICED for price in (on_demand, spot)]
    assert theirs == pytest.approx(ours)
