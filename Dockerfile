# An image for NVIDIA GPUs: CUDA 13.0, Python 3.12, the pinned versions of constraints/, Transformer Engine among them.
# It has been linted (hadolint), and its steps of apt-get were run on Ubuntu 24.04; the image itself has not been built.
#
#   docker build --tag megatron-fanformer .
#   docker run --gpus all --shm-size 16g --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --volume "$PWD/runs:/work/runs" --volume "$PWD/tokens:/work/tokens" \
#       megatron-fanformer train --config examples/fanformer-1b.yaml
#
# NVTE_CUDA_ARCHS names the GPUs that the Engine's PyTorch extension is compiled for: 80 (A100), 90 (H100, H200), 100
# (B200). The extension comes as source, and takes most of the time of a build.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS build
ARG NVTE_CUDA_ARCHS="80;90;100"
ARG MAX_JOBS=8
ENV NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS} NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS} PIP_NO_CACHE_DIR=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev python3-venv git ninja-build \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/fanformer
ENV PATH=/opt/fanformer/bin:${PATH}
WORKDIR /src
COPY constraints constraints
# torch before the Engine, whose extension is compiled against it.
RUN pip install --constraint constraints/py312.txt torch setuptools packaging \
    && pip install --constraint constraints/py312.txt --constraint constraints/engine.txt pybind11 wheel ninja \
    && pip install --no-build-isolation --constraint constraints/py312.txt --constraint constraints/engine.txt \
        'transformer-engine[core_cu13,pytorch]'
COPY . .
RUN pip install --constraint constraints/py312.txt --constraint constraints/engine.txt '.[fast]'

# torch's wheels bring CUDA's libraries; what a run needs besides is Python, the C compiler that launches Triton's
# kernels, and the user space of RDMA adapters: without it NCCL sends by TCP, and says nothing.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev gcc libc6-dev \
        libibverbs1 ibverbs-providers librdmacm1t64 ibverbs-utils \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/fanformer /opt/fanformer
COPY examples /work/examples
ENV PATH=/opt/fanformer/bin:${PATH}
WORKDIR /work
ENTRYPOINT ["megatron-fanformer"]
CMD ["--help"]
