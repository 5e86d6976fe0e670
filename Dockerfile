# A node of a run, for every backend: SkyPilot and Kubernetes (image_id: docker:…), Slurm with pyxis, or by hand:
#
#     docker build -t stackrl .                              # NVIDIA GPUs
#     docker build -t stackrl-cpu --build-arg DEVICE=cpu .
#     docker run --rm --gpus all --shm-size 16g stackrl stackrl doctor
#
# There is no entry point: SkyPilot and pyxis start their own commands in it.
FROM python:3.12-slim-bookworm

# what SkyPilot needs in a container, sandboxes, and a compiler for the kernels that Triton and torch.compile make
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap build-essential ca-certificates curl git libnuma1 netcat-openbsd openssh-client openssh-server \
        procps rsync sudo util-linux \
    && rm -rf /var/lib/apt/lists/*

ARG DEVICE=gpu
WORKDIR /opt/stackrl
COPY . .
RUN if [ "$DEVICE" = cpu ]; then \
        python install.py /opt/venv cpu wandb parquet; \
    else \
        python -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir -e ".[$DEVICE,wandb,parquet]"; \
    fi
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN stackrl validate stacks/*.yaml

WORKDIR /workspace
CMD ["stackrl", "--help"]
