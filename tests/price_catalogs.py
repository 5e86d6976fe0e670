"""Small catalogs of SkyPilot's with invented prices: the columns of each cloud are as SkyPilot has them."""

from __future__ import annotations

from pathlib import Path

_COLUMNS = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone"
)
_GPU_INFO = (
    "\"{'Gpus': [{'Name': 'H100', 'Manufacturer': 'NVIDIA', 'Count': 8.0}], 'TotalGpuMemoryInMiB': 652472}\""
)

_ROWS = {
    "aws": [
        f"{_COLUMNS},Arch",
        f"p5.48xlarge,H100,8.0,192.0,2048.0,{_GPU_INFO},55.04,31.10,us-east-1,use1-az1,x86_64",
        f"p5.48xlarge,H100,8.0,192.0,2048.0,{_GPU_INFO},55.04,27.50,us-east-1,use1-az2,x86_64",
        f"p5.48xlarge,H100,8.0,192.0,2048.0,{_GPU_INFO},60.00,24.80,us-west-2,usw2-az1,x86_64",
        f"p5.4xlarge,H100,1.0,16.0,256.0,{_GPU_INFO},6.88,,us-east-1,use1-az1,x86_64",
        f"p6-b200.48xlarge,B200,8.0,192.0,2048.0,{_GPU_INFO},113.93,56.20,us-west-2,usw2-az1,x86_64",
        f"g6.xlarge,L4,1.0,4.0,16.0,{_GPU_INFO},0.80,0.35,us-east-1,use1-az1,x86_64",
        f"g6.2xlarge,L4,1.0,8.0,32.0,{_GPU_INFO},0.98,0.40,us-east-1,use1-az1,x86_64",
        "m6g.2xlarge,,,8.0,32.0,,0.308,0.10,us-east-1,use1-az1,arm64",
        "m6i.xlarge,,,4.0,16.0,,0.192,0.08,us-east-1,use1-az1,x86_64",
        "c6i.2xlarge,,,8.0,16.0,,0.34,0.14,us-east-1,use1-az1,x86_64",
        "m6i.2xlarge,,,8.0,32.0,,0.384,0.16,us-east-1,use1-az1,x86_64",
    ],
    "nebius": [
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
        f"gpu-h100-sxm_8gpu,H100,8,128,1600,23.60,eu-north1,{_GPU_INFO},10.0",
        f"gpu-b200-sxm_8gpu,B200,8,160,1792,44.0,us-central1,{_GPU_INFO},",
    ],
    "gcp": [
        _COLUMNS,
        "a3-highgpu-8g,,,208.0,1872.0,,10.0,4.0,us-central1,us-central1-a",
        "a3-highgpu-8g,,,208.0,1872.0,,9.0,3.0,europe-west4,europe-west4-b",
        f",H100,8.0,,,{_GPU_INFO},78.0,20.0,us-central1,us-central1-a",
        f",H100,8.0,,,{_GPU_INFO},80.0,18.0,asia-east1,asia-east1-a",
        f",H100,8.0,,,{_GPU_INFO},90.0,,europe-west4,europe-west4-b",
        "g2-standard-4,,,4.0,16.0,,0.3,0.1,us-central1,us-central1-a",
        ",L4,1.0,,,L4,0.4,0.2,us-central1,us-central1-a",
    ],
}


def write_catalogs(home: Path) -> Path:
    """Below ``home``, which stands for a home folder. Returns the folder of the catalogs."""
    folder = home / ".sky" / "catalogs" / "v8"
    for cloud, rows in _ROWS.items():
        (folder / cloud).mkdir(parents=True)
        (folder / cloud / "vms.csv").write_text("\n".join(rows) + "\n")
    return folder
