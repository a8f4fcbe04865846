# Triton with Hotrow in its Python backend. In the root of the repository:
#     docker build -f docker/triton.Dockerfile -t hotrow:triton .
# The wheel is built for Triton's own Python, 3.12.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Triton's image keeps NumPy below 2. The extra `onnx` would need NumPy 2; ONNX Runtime alone does not.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && grep -v '^numpy==' constraints.txt > /wheels/constraints.txt \
    && echo 'numpy==1.26.4' >> /wheels/constraints.txt

FROM nvcr.io/nvidia/tritonserver:25.10-py3
# Ubuntu 24.04 refuses packages in its own Python, which is the Python that the backend runs.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip3 install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/hotrow-*.whl)[rocksdb,redis]" onnxruntime \
    && install -d -o 1000 -g 1000 /models /var/lib/hotrow
# The user `triton-server` of the image.
USER 1000
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["curl", "--silent", "--fail", "--max-time", "4", "http://127.0.0.1:8000/v2/health/ready"]
CMD ["tritonserver", "--model-repository=/models"]
