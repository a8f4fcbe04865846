# `hotrow train` on the CPU. In the root of the repository: docker build -f docker/train.Dockerfile -t hotrow:train .
# PyTorch's default build includes CUDA. For its CPU build: docker build --build-arg TORCH_INDEX=URL ...
FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    pip install --no-cache-dir -c /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    "$(echo /wheels/hotrow-*.whl)[train,parquet,redis,kafka]" \
    && useradd --uid 1000 --create-home hotrow \
    && install -d -o hotrow -g hotrow /models /var/lib/hotrow
# A number, because Kubernetes cannot check that a name is not root.
USER 1000
ENTRYPOINT ["hotrow", "train"]
CMD ["--help"]
