# A publisher in a container: torch and transformers, not root.
#   docker build --file infra/publisher.Dockerfile --tag kvcdn-publisher .
#   docker run --rm --volume "$PWD:/documents:ro" --volume kvcdn-publisher:/var/lib/kvcdn --env-file publisher.env \
#       kvcdn-publisher publish /documents/handbook.txt --model qwen3-4b
# The volume keeps the signing key (made at the first run), namespace secrets, the trust list and downloaded models.
#
# CUDA: the torch that pip installs on Linux x86-64 brings CUDA's libraries with it; the host needs NVIDIA's driver and container
# toolkit. Then: docker run --gpus all ... kvcdn-publisher publish ... --device cuda. For a much smaller image on the CPU build with
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu ...
#
# This image has not been built by the project's own checks, which have no container engine; tests/test_infra.py checks that
# what is copied exists, that it is all an installation needs, and that extras and commands are ones that there are.

FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY kvcdn kvcdn
COPY client client
COPY edge edge
COPY origin origin
RUN python -m venv /opt/kvcdn \
    && /opt/kvcdn/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch \
    && /opt/kvcdn/bin/pip install --no-cache-dir --constraint constraints.txt '.[origin]'

FROM python:3.11-slim
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/kvcdn --shell /usr/sbin/nologin kvcdn \
    && install --directory --owner kvcdn --group kvcdn --mode 0700 /var/lib/kvcdn
COPY --from=build /opt/kvcdn /opt/kvcdn
USER 10001
ENV PYTHONUNBUFFERED=1 \
    HOME=/var/lib/kvcdn \
    HF_HOME=/var/lib/kvcdn/huggingface
VOLUME ["/var/lib/kvcdn"]
ENTRYPOINT ["/opt/kvcdn/bin/kvcdn"]
CMD ["publish", "--help"]
