# An edge in a container: no torch, no keys, not root.
#   docker build --file infra/edge.Dockerfile --tag kvcdn-edge .
#   docker run --rm --publish 127.0.0.1:8400:8400 --volume kvcdn-cache:/var/cache/kvcdn --env-file edge.env \
#       --env KVCDN_EDGE_ORIGIN=s3://kvcdn/production kvcdn-edge
# An edge that listens on more than loopback, as it must in a container, asks for a token: KVCDN_EDGE_TOKEN in edge.env (see
# infra/edge.env.example), or KVCDN_EDGE_TOKEN_FILE. Put a proxy with TLS before the published port.
#
# This image has not been built by the project's own checks, which have no container engine; tests/test_infra.py checks that
# what is copied exists, that it is all an installation needs, and that settings and commands are ones that there are.

FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY kvcdn kvcdn
COPY client client
COPY edge edge
COPY origin origin
RUN python -m venv /opt/kvcdn \
    && /opt/kvcdn/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim
RUN useradd --system --uid 10001 --user-group --home-dir /var/cache/kvcdn --shell /usr/sbin/nologin kvcdn \
    && install --directory --owner kvcdn --group kvcdn --mode 0700 /var/cache/kvcdn
COPY --from=build /opt/kvcdn /opt/kvcdn
USER 10001
ENV PYTHONUNBUFFERED=1 \
    KVCDN_EDGE_CACHE_DIR=/var/cache/kvcdn \
    KVCDN_EDGE_LISTEN=0.0.0.0:8400 \
    KVCDN_EDGE_INSECURE_HTTP=true
VOLUME ["/var/cache/kvcdn"]
EXPOSE 8400
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["/opt/kvcdn/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8400/healthz', timeout=3)"]
ENTRYPOINT ["/opt/kvcdn/bin/kvcdn"]
CMD ["edge"]
