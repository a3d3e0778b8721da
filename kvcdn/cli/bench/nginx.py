"""nginx as a peer to measure against and to stand behind: found on the machine, started on loopback, stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kvcdn.errors import UnavailableError

START_SECONDS = 10.0

_POLL_SECONDS = 0.01

_FRAME = """
daemon off;
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
{user}
events {{ worker_connections 4096; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_timeout 65;
    keepalive_requests 1000000;
    open_file_cache max=10000 inactive=60s;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {http}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        {server}
    }}
}}
"""
"""As its documentation advises for static files: sendfile, tcp_nopush, a worker per core, cached descriptors."""


def nginx_path() -> str | None:
    """Where nginx is, or None."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def running_nginx(folder: Path, server: str, http: str = "") -> Iterator[str]:
    """The URL of an nginx whose server block holds `server`, while it lasts; its files are in `folder`.

    Raises UnavailableError where there is none, or it does not start.
    """
    program = nginx_path()
    if program is None:
        raise UnavailableError("there is no nginx on this machine", hint="apt-get install nginx-light")
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    user = "user root;" if os.geteuid() == 0 else ""  # else its workers could not read what only root may
    config = folder / "nginx.conf"
    config.write_text(_FRAME.format(folder=folder, port=port, user=user, server=server, http=http), encoding="utf-8")
    command = [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=null) as process:  # noqa: S603 - the machine's own program
        try:
            _await(process, port, folder / "error.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _await(process: subprocess.Popen[bytes], port: int, errors: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(_POLL_SECONDS)
    words = errors.read_text(encoding="utf-8", errors="replace").strip() if errors.exists() else ""
    raise UnavailableError(f"nginx does not start: {words[-500:]}")
