# Hotrow on NVIDIA GPUs. In the root of the repository: docker build -f docker/gpu.Dockerfile -t hotrow:gpu .
# The base image needs no CUDA: CuPy brings its libraries, and the NVIDIA Container Toolkit adds the driver.
# For a driver of CUDA 12: docker build --build-arg CUDA=cuda12 ...
FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG CUDA=cuda13
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/hotrow-*.whl)[onnx,rocksdb,redis,kafka,grpc,${CUDA}]" \
    && useradd --uid 1000 --create-home hotrow \
    && install -d -o hotrow -g hotrow /models /var/lib/hotrow
# A number, because Kubernetes cannot check that a name is not root.
USER 1000
# Every option of `hotrow serve` is such a variable.
ENV HOTROW_HOST=0.0.0.0 \
    HOTROW_HTTP_PORT=8000 \
    HOTROW_GRPC_PORT=8001 \
    HOTROW_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000 8001
# Loading large tables may take minutes; only after the start period does a failed check count.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m CMD ["hotrow", "ready"]
ENTRYPOINT ["hotrow", "serve"]
CMD ["/models"]
