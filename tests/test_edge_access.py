"""Who may in: tenants with tokens and links at a real edge, HTTPS, an address for administration, settings read again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from kvcdn.access.grant import Grant, Scope
from kvcdn.access.links import sign_link
from kvcdn.access.tokens import issue_token
from kvcdn.edge.settings import RELOADABLE, EdgeSettings, load_settings
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore
from support.blocks import make_document
from support.edge_process import ask, ask_match, object_files, running_edge
from support.waiting import WAIT_SECONDS, until

KEY = SigningKey.generate()

READ = frozenset((Scope.READ,))


def bearer(grant: Grant, seconds: float = 60) -> dict[str, str]:
    return {"Authorization": f"Bearer {issue_token(KEY, grant, seconds=seconds, now=time.time())}"}


@pytest.fixture(scope="module")
def document():
    return make_document(tokens=1500)


@pytest.fixture
def origin(tmp_path: Path, document) -> str:
    folder = tmp_path / "origin"
    document.publish(FolderStore(folder))
    return str(folder)


@pytest.fixture
def issuers(tmp_path: Path) -> Path:
    path = tmp_path / "issuers"
    path.write_text(f"{KEY.public.text} ours\n", encoding="utf-8")
    return path


def test_a_tenant_reads_what_its_token_is_for(origin, issuers, tmp_path, document) -> None:
    """Its model's objects; another model's are not there for it, known or not, and cost the origin nothing."""
    path, tag = "/" + next(iter(document.blocks)), next(iter(document.blocks)).split("/")[1]
    ours, others = bearer(Grant("acme", READ, models=(tag[:8] + "*",))), bearer(Grant("acme", READ, models=("qwen3-*",)))
    with running_edge(origin, tmp_path / "cache", issuers_file=issuers) as edge:
        assert 404 == ask(edge.url, path, headers=others).status
        assert [] == object_files(tmp_path / "cache")
        assert 200 == ask(edge.url, path, headers=ours).status
        assert 404 == ask(edge.url, path, headers=others).status
        body = json.dumps({"addresses": [path[-64:]], "model": tag}).encode()
        assert 1 == ask(edge.url, "/v1/match", "POST", ours, body).json()["matched"]
        assert {"matched": 0, "sizes": []} == ask(edge.url, "/v1/match", "POST", others, body).json()
        assert 401 == ask_match(edge.url, tag, [path[-64:]]).status
        token = ours["Authorization"].split()[1]
        log = edge.log()
    assert token not in log
    assert '"tenant":"acme"' in log


def test_a_model_may_be_named(origin, issuers, tmp_path, document) -> None:
    """A token's patterns are compared with the names that the edge's settings give a tag."""
    from kvcdn.edge.tenants.guard import Guard

    tag = next(iter(document.blocks)).split("/")[1]
    settings = load_settings(None, {"origin": origin, "issuers_file": issuers, "model_names": {"qwen3-4b": tag}})
    from kvcdn.digest import ModelTag
    from kvcdn.edge.tenants.admission import Admission

    assert not Guard.of(settings).is_open
    admission = Admission(settings.model_copy(update={"cache_dir": tmp_path}))
    grant = Grant("acme", READ, models=("qwen3-*",))
    assert admission.covers(grant, ModelTag.parse(tag, "tag"))
    assert not admission.covers(grant, ModelTag(bytes(16)))


def test_scopes_are_kept_apart(origin, issuers, tmp_path, document) -> None:
    """To read is not to see statistics, nor the other way round; the answer says which scope is missing."""
    path = "/" + next(iter(document.blocks))
    with running_edge(origin, tmp_path / "cache", issuers_file=issuers) as edge:
        for scope, allowed, refused, missing in (
            (Scope.READ, path, "/metrics", "stats"),
            (Scope.STATS, "/metrics", path, "read"),
        ):
            headers = bearer(Grant("acme", frozenset((scope,))))
            assert 200 == ask(edge.url, allowed, headers=headers).status
            reply = ask(edge.url, refused, headers=headers)
            assert (403, True) == (reply.status, f'scope="{missing}"' in reply.headers["WWW-Authenticate"])


def test_a_link_opens_one_object(origin, issuers, tmp_path, document) -> None:
    """Without a token, with ranges and conditions as ever; not its neighbour, not a match, not once changed."""
    first, second = ("/" + key for key in list(document.blocks)[:2])
    query = sign_link(KEY, first, tenant="guest", seconds=60, now=time.time())
    with running_edge(origin, tmp_path / "cache", issuers_file=issuers) as edge:
        whole = ask(edge.url, f"{first}?{query}")
        assert (200, document.blocks[first[1:]]) == (whole.status, whole.body)
        assert 206 == ask(edge.url, f"{first}?{query}", headers={"Range": "bytes=0-9"}).status
        assert 304 == ask(edge.url, f"{first}?{query}", headers={"If-None-Match": whole.headers["ETag"]}).status
        for target, method in (
            (f"{second}?{query}", "GET"),
            (f"{first}?{query}x", "GET"),
            (f"{first}?{query.replace('guest', 'admin')}", "GET"),
            (f"{first}?", "GET"),
            (first, "GET"),
            (f"/v1/match?{query}", "POST"),
            (f"/metrics?{query}", "GET"),
        ):
            assert 401 == ask(edge.url, target, method).status, target


def test_a_tenant_that_asks_too_fast_waits(origin, issuers, tmp_path, document) -> None:
    """429 says for how long; others go on, and the metrics tell whom it met."""
    path = "/" + next(iter(document.blocks))
    with running_edge(
        origin, tmp_path / "cache", issuers_file=issuers, tenant_limits={"requests_per_second": 2}, tenants={"big": {}}
    ) as edge:
        replies = [ask(edge.url, path, headers=bearer(Grant("acme", READ))) for _ in range(12)]
        assert 200 == replies[0].status
        limited = [reply for reply in replies if reply.status == 429]
        assert limited
        assert int(limited[0].headers["Retry-After"]) >= 1
        assert [200] * 12 == [ask(edge.url, path, headers=bearer(Grant("big", READ))).status for _ in range(12)]
        stats = ask(edge.url, "/metrics", headers=bearer(Grant("op", frozenset((Scope.STATS,))))).body.decode()
    assert f'kvcdn_edge_tenant_requests_total{{status="429",tenant="acme"}} {len(limited)}.0' in stats


def test_a_quota_outlives_a_restart(origin, issuers, tmp_path, document) -> None:
    """What a tenant was sent today is remembered on disk; ranges count what they are."""
    path, size = "/" + next(iter(document.blocks)), len(next(iter(document.blocks.values())))
    headers = bearer(Grant("acme", READ, bytes_per_day=size + 10))
    for expected in ([206, 200, 429], [429]):
        with running_edge(origin, tmp_path / "cache", issuers_file=issuers) as edge:
            ranges = [{"Range": "bytes=0-9"}, {}, {}][-len(expected) :]
            assert expected == [ask(edge.url, path, headers={**headers, **extra}).status for extra in ranges]
            assert 200 == ask(edge.url, path, headers=bearer(Grant("other", READ))).status


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_certificate(authority: trustme.CA, folder: Path, name: str = "127.0.0.1") -> dict[str, Path]:
    made = authority.issue_cert(name)
    folder.mkdir(exist_ok=True)
    made.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    return {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}


def secure(url: str, authority: trustme.CA) -> http.client.HTTPSConnection:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    host, port = url.removeprefix("https://").split(":")
    return http.client.HTTPSConnection(host, int(port), timeout=WAIT_SECONDS, context=context)


def test_https_serves_the_same_bytes(origin, tmp_path, authority) -> None:
    """Large and small objects, ranges, cold and warm; plain HTTP gets nothing."""
    large = make_document(tokens=1024, layers=16, heads=4, dim=64)
    large.publish(FolderStore(origin))
    with running_edge(origin, tmp_path / "cache", **write_certificate(authority, tmp_path / "tls")) as edge:
        assert edge.url.startswith("https://")
        connection = secure(edge.url, authority)
        try:
            for key, data in [*large.objects.items()] * 2:
                connection.request("GET", f"/{key}")
                assert data == connection.getresponse().read()
            key, data = next(iter(large.blocks.items()))
            connection.request("GET", f"/{key}", headers={"Range": "bytes=100-300000"})
            assert data[100:300001] == connection.getresponse().read()
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                ask(edge.url.replace("https", "http"), "/healthz")
        finally:
            connection.close()


def test_https_and_tokens_open_the_network(issuers, tmp_path, authority) -> None:
    """With both an edge may listen on any address; with one of them it may not."""
    from kvcdn.edge.tenants.guard import Guard

    tls = write_certificate(authority, tmp_path / "tls")
    given = {"origin": "x", "listen": "0.0.0.0:8400"}
    Guard.of(load_settings(None, {**given, **tls, "issuers_file": issuers}))
    for half in (tls, {"issuers_file": issuers}):
        with pytest.raises(UsageError, match="more than loopback"):
            Guard.of(load_settings(None, {**given, **half}))


BAD_TLS = {
    "no file": lambda folder: {"tls_cert": folder / "none", "tls_key": folder / "key.pem"},
    "not a certificate": lambda folder: {"tls_cert": folder / "key.pem", "tls_key": folder / "key.pem"},
    "another's key": lambda folder: {"tls_cert": folder / "cert.pem", "tls_key": folder / "other" / "key.pem"},
}


@pytest.mark.parametrize("fault", BAD_TLS)
def test_a_bad_certificate_ends_the_start(fault, origin, tmp_path, authority) -> None:
    """With both files named, before anything is touched."""
    write_certificate(authority, tmp_path)
    write_certificate(authority, tmp_path / "other")
    with (
        pytest.raises(UnavailableError, match="ended with 2: error: cannot use the certificate"),
        running_edge(origin, tmp_path / "cache", **BAD_TLS[fault](tmp_path)),
    ):
        pass
    assert not (tmp_path / "cache").exists()


def test_half_a_certificate_is_no_setting(tmp_path) -> None:
    """Certificate and key go together."""
    with pytest.raises(UsageError, match="go together"):
        load_settings(None, {"origin": "x", "tls_cert": tmp_path / "cert.pem"})


def test_administration_has_its_own_address(origin, tmp_path, document) -> None:
    """Where there is one, metrics are there alone, and objects are not."""
    path = "/" + next(iter(document.blocks))
    with running_edge(origin, tmp_path / "cache", admin_listen="127.0.0.1:0") as edge:
        assert edge.admin_url != edge.url
        assert [200, 404, 200, 200] == [ask(edge.url, target).status for target in (path, "/metrics", "/healthz", "/readyz")]
        replies = [ask(edge.admin_url, target).status for target in (path, "/metrics", "/healthz", "/readyz", "/v1/match")]
        assert [404, 200, 200, 200, 404] == replies


def test_an_edge_that_ends_says_so_first(origin, tmp_path, document) -> None:
    """While it drains it is alive, not ready, and serves; then it ends with 0."""
    path = "/" + next(iter(document.blocks))
    with running_edge(origin, tmp_path / "cache", drain_seconds=5) as edge:
        assert 200 == ask(edge.url, "/readyz").status
        edge.process.send_signal(signal.SIGTERM)
        until(lambda: ask(edge.url, "/readyz").status == 503)
        assert [503, 200, 200] == [ask(edge.url, target).status for target in ("/readyz", "/healthz", path)]
        assert 0 == edge.process.wait(WAIT_SECONDS)


class ConfiguredEdge:
    """An edge process whose settings are a file that the test changes."""

    def __init__(self, folder: Path, origin: str) -> None:
        self.path, self._origin, self._ready = folder / "edge.toml", origin, folder / "ready"
        self.cache = folder / "cache"
        self.log = folder / "log"

    def configure(self, text: str) -> None:
        fixed = f'origin = "{self._origin}"\ncache_dir = "{self.cache}"\nlisten = "127.0.0.1:0"\nready_file = "{self._ready}"\n'
        self.path.write_text(fixed + text, encoding="utf-8")

    def running(self) -> Iterator[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCDN_EDGE_")}
        with self.log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "kvcdn.edge", "--config", str(self.path)]
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            until(lambda: self._ready.exists() or self.process.poll() is not None, self.log.read_text)
            assert self.process.poll() is None, self.log.read_text()
            yield json.loads(self._ready.read_text())["url"]
        finally:
            self.process.kill()
            self.process.wait()

    def reload(self, answer: str) -> str:
        """Has the settings read again; the log line that says what came of it."""
        before = self.log.read_text().count(answer)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.log.read_text().count(answer) != before, self.log.read_text)
        return next(line for line in reversed(self.log.read_text().splitlines()) if answer in line)


@pytest.fixture
def configured(tmp_path: Path, origin: str) -> ConfiguredEdge:
    return ConfiguredEdge(tmp_path, origin)


def test_settings_are_read_again(configured, tmp_path, issuers, document) -> None:
    """On SIGHUP: issuers come and go, limits change; what needs a restart is named; a faulty file changes nothing."""
    path = "/" + next(iter(document.blocks))
    acme = Grant("acme", READ)
    configured.configure(f'issuers_file = "{issuers}"\n')
    running = configured.running()
    url = next(running)
    try:
        assert 200 == ask(url, path, headers=bearer(acme)).status
        issuers.write_text(SigningKey.generate().public.text + "\n", encoding="utf-8")
        configured.reload("settings are reloaded")
        assert 401 == ask(url, path, headers=bearer(acme)).status
        issuers.write_text(KEY.public.text + "\n", encoding="utf-8")
        configured.configure(f'issuers_file = "{issuers}"\ncapacity = "1GB"\ntenant_limits = {{ bytes_per_day = 1 }}\n')
        assert '"need_a_restart":["capacity"]' in configured.reload("settings are reloaded")
        assert 429 == ask(url, path, headers=bearer(acme)).status
        for fault in (f'issuers_file = "{tmp_path}/none"\n', "nonsense = 1\n", "= =\n"):
            configured.configure(fault)
            configured.reload("settings are not reloaded")
            assert [429, 401] == [ask(url, path, headers=headers).status for headers in (bearer(acme), {})]
    finally:
        running.close()


def test_a_certificate_is_renewed(configured, tmp_path, authority) -> None:
    """On SIGHUP new connections get the new one; one that does not fit its key leaves the old one in use."""
    tls = write_certificate(authority, tmp_path / "tls")
    configured.configure("".join(f'{name} = "{path}"\n' for name, path in tls.items()))
    running = configured.running()
    url = next(running)

    def serial() -> int:
        connection = secure(url, authority)
        try:
            connection.connect()
            return int(connection.sock.getpeercert()["serialNumber"], 16)
        finally:
            connection.close()

    try:
        first = serial()
        write_certificate(authority, tmp_path / "tls")
        configured.reload("settings are reloaded")
        second = serial()
        assert first != second
        authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(str(tls["tls_key"]))
        configured.reload("settings are not reloaded")
        assert second == serial()
    finally:
        running.close()


def test_what_may_change_is_a_setting() -> None:
    """The list names settings that there are."""
    assert set() == RELOADABLE - set(EdgeSettings.model_fields)
