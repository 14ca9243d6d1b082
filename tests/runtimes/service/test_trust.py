"""Strangers: no token, a wrong one, another's task, tricks with paths, heads and time. Each is refused."""

from __future__ import annotations

import datetime
import gc
import json
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h2.connection
import httpx
import pytest
import torch
from served import Live, body_of, live, put, until
from tiny import tiny

from afield.core.errors import InputError
from afield.runtimes.service import bodies, downloads, http2, protocol
from afield.runtimes.service.client import Client, ServerError
from afield.runtimes.service.serve import Listen
from afield.runtimes.service.trust import Book, Rates
from afield.runtimes.service.wire import raw as bytes_of

ROUTES = [
    ("GET", "/v1/run"), ("POST", "/v1/tasks?client=0"), ("GET", "/v1/tasks"), ("DELETE", "/v1/tasks/0"),
    ("POST", "/v1/tasks/0/heartbeat"), ("PUT", "/v1/tasks/0/update"), ("GET", "/v1/tasks/0/receipt"),
    ("GET", "/v1/tasks/0/correction"), ("GET", "/v1/models/latest"), ("GET", "/v1/status"), ("GET", "/v1/history"),
    ("GET", "/v1/events"), ("POST", "/v1/promote"), ("POST", "/v1/rollback"), ("GET", "/metrics"),
    ("GET", "/v1/shares"),
]  # fmt: skip


LONG = """
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(99_999, 3)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with live(tiny(), tmp_path_factory.mktemp("trust") / "run") as found:
        yield found


def book_of(server: Live) -> Book:
    return server.parts.book


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_a_token(method: str, path: str, server: Live) -> None:
    forget(server)
    reply = server.http(None).request(method, path)
    assert reply.status_code == 401 and reply.json()["error"] == "no-token"
    assert reply.headers["www-authenticate"].startswith("Bearer")
    reply = server.http("afield_00000000_wrong").request(method, path)
    assert reply.status_code == 401 and reply.json()["error"] == "bad-token"


def forget(server: Live) -> None:
    """Strangers of earlier tests came from the same address."""

    for rates in [one for one in gc.get_objects() if isinstance(one, Rates)]:
        rates._buckets.clear()


def test_the_table_of_routes_is_complete(server: Live) -> None:
    told = server.http().get("/openapi.json").json()["paths"]
    free = {"/healthz", "/readyz", "/openapi.json"}
    described = {(m.upper(), p) for p, methods in told.items() for m in methods if p not in free}
    named = {
        (m, p.partition("?")[0].replace("/0", "/{number}").replace("latest", "{version}")) for m, p in ROUTES
    }
    assert described == named


def test_what_is_open_tells_nothing(server: Live) -> None:
    http = server.http(None)
    assert http.get("/healthz").json() == {"healthy": True}
    assert http.get("/readyz").json() == {"ready": True}


def test_a_client_acts_for_itself_only(server: Live) -> None:
    forget(server)
    _, mine = book_of(server).add([1])
    _, theirs = book_of(server).add([2])
    task = server.client(token=mine).next_task()
    assert task is not None and task.client == 1  # the token says who
    other = server.http(theirs)
    for reply in (
        put(other, task, body_of(task)),
        other.delete(f"/v1/tasks/{task.number}", params={"lease": task.told["lease"]}),
        other.post(f"/v1/tasks/{task.number}/heartbeat", params={"lease": task.told["lease"]}),
        other.post("/v1/tasks", params={"client": 1}),
    ):
        assert reply.status_code == 403 and reply.json()["error"] == "not-yours"
    assert put(server.http(mine), task, body_of(task)).status_code == 200
    assert other.get(f"/v1/tasks/{task.number}/receipt").status_code == 403
    assert put(other, task, body_of(task)).status_code == 403
    assert server.http(theirs).get("/v1/tasks").json() == {"tasks": [], "all": 0}
    for token, sees in ((mine, True), (theirs, False), ("", True)):
        rows = server.http(token).get("/v1/history").json()["rows"]
        assert any(row["values"].get("number") == task.number for row in rows) is sees
        told = server.http(token).stream("GET", "/v1/events", params={"after": 0})
        with told as reply:
            text = next(chunk for chunk in reply.iter_text() if "event: measurement" in chunk)
        assert ("event: task" in text) is sees
    for path in ("/v1/promote", "/v1/rollback"):
        reply = server.http(mine).post(path)
        assert reply.status_code == 403 and reply.json()["error"] == "not-operator"


def test_tokens_end_are_replaced_and_are_nowhere_to_be_read(server: Live) -> None:
    forget(server)
    holder, token = book_of(server).add([3])
    assert server.http(token).get("/v1/run").status_code == 200
    # from another process, as `afield token` does
    out = ["--out", "unused", "--keys", str(server.keys)]
    command = [sys.executable, "-m", "afield", "token"]
    fresh = subprocess.run(
        [*command, "rotate", holder.id, *out], capture_output=True, text=True, check=True
    ).stdout.strip()
    until(lambda: server.http(token).get("/v1/run").status_code == 401, 5)
    forget(server)
    assert server.http(fresh).get("/v1/run").json()["yours"] == [3]
    shown = subprocess.run([*command, "list", *out], capture_output=True, text=True, check=True).stdout
    assert holder.id in shown and "revoked" in shown and token not in shown and fresh not in shown
    file = server.keys / "tokens.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert (
        token.rpartition("_")[2] not in file.read_text() and fresh.rpartition("_")[2] not in file.read_text()
    )
    assert (server.keys / "operator.token").stat().st_mode & 0o777 == 0o600
    assert server.keys.stat().st_mode & 0o777 == 0o700


def test_a_book_survives_a_full_disk_and_two_who_write_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys" / "tokens.json"
    with ThreadPoolExecutor(4) as pool:  # each with a book of its own, as two processes have
        made = list(pool.map(lambda client: Book(path).add([client]), range(40)))
    assert set(Book(path).holders) == {holder.id for holder, _ in made}
    before = path.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # less than the book
    try:
        with pytest.raises(InputError, match="make room"):
            Book(path).revoke(made[0][0].id)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before and not list(path.parent.glob("*.draft"))


def test_an_address_that_guesses_has_to_wait(server: Live) -> None:
    forget(server)
    http = server.http("afield_11111111_guess")
    replies = [http.get("/v1/run") for _ in range(30)]
    assert replies[0].status_code == 401 and replies[-1].status_code == 429
    assert int(replies[-1].headers["retry-after"]) >= 1
    assert server.http().get("/v1/run").status_code == 200  # behind the same proxy, say
    forget(server)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2f..%2ftokens.json", "/v1/models/../../config.toml", "/v1/models/%2e%2e%2f%2e%2e",
        "/v1/models/0%00", "/v1/models/-1", "/v1/models/1e3", "/v1/models/99999999999999999999", "/v1/models/\u0661",
        "/v1/tasks/0%2fupdate", "/v1/tasks/-1/receipt", "//v1/status", "/v1/./status/..", "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/0;x", "/v1/models/ 0",
    ],
)  # fmt: skip
def test_tricks_with_paths(path: str, server: Live) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        head = (
            f"GET {path.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
        )
        raw.sendall((head + "Connection: close\r\n\r\n").encode())
        reply = b"".join(iter(lambda: raw.recv(65536), b""))
    assert reply.split(b" ")[1] in (b"400", b"404", b"405"), reply[:200]
    assert b"holders" not in reply and b"root:" not in reply


def sent(server: Live, *pieces: bytes) -> bytes:
    """Raw bytes to the server; what it says until it closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as raw:
        raw.settimeout(20)
        try:
            for piece in pieces:
                raw.sendall(piece)
            return b"".join(iter(lambda: raw.recv(65536), b""))
        except ConnectionError:
            return b"cut"


def test_header_bombs(server: Live) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    many = b"".join(b"x-%d: y\r\n" % k for k in range(5000))
    for bomb in (many, b"x: " + b"y" * 10**6 + b"\r\n", b"y" * 10**6):
        reply = sent(server, start + bomb + b"\r\n")
        assert reply == b"cut" or reply.split(b" ")[1] in (b"431", b"400"), reply[:100]
    reply = sent(server, b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n")
    assert reply == b"cut" or reply.split(b" ")[1] in (b"431", b"400", b"404")
    assert server.http(None).get("/healthz").status_code == 200


def test_slow_loris(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that does not end is cut off; so is a connection that says nothing."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    assert sent(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-slow: ").split(b" ")[1] == b"408"
    assert sent(server, b"").split(b" ")[1] == b"408"
    assert sent(server, b"P").split(b" ")[1] == b"408"
    # answered, but its body goes on
    assert (
        sent(server, b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"x").split(b" ")[1]
        == b"405"
    )
    monkeypatch.setattr(http2, "FIRST", 0.3)
    sent(server, http2.PREFACE)


def test_a_request_may_begin_with_one_letter(server: Live) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.sendall(b"P")
        assert server.http(None).get("/healthz").status_code == 200  # meanwhile
        raw.sendall(b"OST /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"".join(iter(lambda: raw.recv(65536), b"")).split(b" ")[1] == b"405"


def test_who_asks_and_does_not_read_is_cut_off(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ping of HTTP/2 wants an answer; they must not heap up."""
    monkeypatch.setattr(http2, "UNREAD", 2**16)
    host, port = server.url.removeprefix("http://").split(":")
    pings = (b"\0\0\x08\6\0\0\0\0\0" + bytes(8)) * 4096
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect((host, int(port)))
        raw.sendall(http2.PREFACE + b"\0\0\0\4\0\0\0\0\0")
        with pytest.raises(ConnectionError):
            raw.sendall(pings * 1000)


@pytest.mark.parametrize("version", [1, 2])
def test_a_download_that_is_not_read_holds_its_model_for_a_while_only(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRACE", 0.5)
    monkeypatch.setattr(bodies, "SLOWEST", 10**9)
    (tmp_path / "long.py").write_text(LONG.replace("99_999", "1_999_999"))  # more than sockets take
    with live(tiny(), tmp_path / "run", own=f"{tmp_path / 'long.py'}:Net") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            bearer = ("authorization", f"Bearer {server.token}")
            if version == 1:
                raw.sendall(
                    f"GET /v1/models/0 HTTP/1.1\r\nHost: x\r\n{bearer[0]}: {bearer[1]}\r\n\r\n".encode()
                )
            else:
                connection = h2.connection.H2Connection()
                connection.initiate_connection()
                head = [
                    (":method", "GET"),
                    (":path", "/v1/models/0"),
                    (":scheme", "http"),
                    (":authority", "x"),
                ]
                connection.send_headers(1, [*head, bearer], end_stream=True)
                raw.sendall(connection.data_to_send())
            until(lambda: held(downloads.Pieces))
            until(lambda: not held(downloads.Pieces))
            assert server.http().get("/v1/status").status_code == 200


def held(kind: type) -> bool:
    gc.collect()
    return any(type(one) is kind for one in gc.get_objects())


def test_streams_that_are_only_reset_end_the_connection(server: Live) -> None:
    connection = h2.connection.H2Connection()
    connection.initiate_connection()
    host, port = server.url.removeprefix("http://").split(":")
    head = [(":method", "GET"), (":path", "/v1/run"), (":scheme", "http"), (":authority", "x")]
    connection.send_headers(1, head, end_stream=True)  # one that is answered does not make up for the rest
    with socket.create_connection((host, int(port)), 20) as raw:

        def reset(number: int) -> None:
            connection.send_headers(number, head)
            connection.reset_stream(number)
            raw.sendall(connection.data_to_send())
            assert server.http(None).get("/healthz").status_code == 200  # the stream has run by now

        with pytest.raises(ConnectionError):
            deque(map(reset, range(3, 4 * http2.RESETS, 2)))


def test_a_body_that_does_not_come(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(server)
    monkeypatch.setattr(bodies, "GRACE", 0.2)
    monkeypatch.setattr(bodies, "SLOWEST", 10**9)
    task = server.client(4).next_task()
    assert task is not None
    head = (
        f"PUT /v1/tasks/{task.number}/update?lease={task.told['lease']}&examples=1 HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {server.token}\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000\r\n"
        "Connection: close\r\n\r\n"
    )
    reply = sent(server, head.encode() + b"abc")
    assert reply.split(b" ")[1] == b"408" and json.loads(reply.rpartition(b"\r\n")[2])["error"] == "too-slow"


def test_the_door_is_closed_unless_told_otherwise() -> None:
    with pytest.raises(InputError, match="without TLS"):
        Listen(host="0.0.0.0")
    with pytest.raises(InputError, match="without TLS"):
        Listen(host="example.org")
    assert Listen(host="0.0.0.0", insecure=True).context() is None
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        assert Listen(host=host).context() is None
    with pytest.raises(InputError, match="PEM"):
        Listen(cert=Path("/nowhere.pem")).context()


# -- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for 127.0.0.1, two clients' certificates."""
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("papers")
    make_papers(folder)
    return folder


def make_papers(folder: Path) -> None:
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    authority = ec.generate_private_key(ec.SECP256R1())
    for name in ("ca", "server", "one", "two"):
        key = authority if name == "ca" else ec.generate_private_key(ec.SECP256R1())
        made = (
            x509.CertificateBuilder()
            .subject_name(named(name)).issuer_name(named("ca")).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(name == "ca", None), True)
        )  # fmt: skip
        if name == "server":
            names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
            made = made.add_extension(x509.SubjectAlternativeName(names), False)
        done = made.sign(authority, hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(done.public_bytes(serialization.Encoding.PEM))
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(text)


def test_tls_and_http_2(papers: Path, tmp_path: Path) -> None:
    listen = Listen(port=0, cert=papers / "server.pem", key=papers / "server.key")
    with live(tiny(), tmp_path / "run", listen=listen) as server:
        assert server.url.startswith("https://")
        with pytest.raises(InputError, match="check the address"):
            server.client(0).status()  # not an authority that is known
        client = server.client(0, ca=papers / "ca.pem")
        for task in client.tasks(3):
            assert not task.submit(task.base + 1, examples=1).refused
        trusting = ssl.create_default_context(cafile=str(papers / "ca.pem"))
        for two, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
            reply = server.http(verify=trusting, http2=two).get("/v1/models/latest")
            assert reply.http_version == version and reply.status_code == 200
            assert reply.headers["afield-version"] == "3"
        old = ssl.create_default_context(cafile=str(papers / "ca.pem"))
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.raises(httpx.ConnectError):
            server.http(verify=old).get("/healthz")


@pytest.mark.parametrize("http2", [False, True])
def test_a_long_body_over_tls(papers: Path, tmp_path: Path, http2: bool) -> None:
    (tmp_path / "net.py").write_text(LONG)
    listen = Listen(port=0, cert=papers / "server.pem", key=papers / "server.key")
    chosen, own = tiny("fedbuff", strategy={"size": 1}), f"{tmp_path / 'net.py'}:Net"
    with live(chosen, tmp_path / "run", listen=listen, own=own) as server:
        trusting = ssl.create_default_context(cafile=str(papers / "ca.pem"))
        http, client = server.http(verify=trusting, http2=http2), server.client(0, ca=papers / "ca.pem")
        for _ in range(3):
            task = client.next_task()
            assert task is not None
            sent = torch.arange(len(task.base), dtype=torch.float32) / 2**20 + task.number
            body = task.owner.wire.heads["full"] + bytes(bytes_of(sent))
            assert put(http, task, body).status_code == 200
            newest = http.get("/v1/models/latest").content[-sent.nbytes :]
            torch.testing.assert_close(torch.frombuffer(bytearray(newest), dtype=torch.float32), sent)


@pytest.mark.parametrize("http2", [False, True])
def test_who_idles_over_tls_does_not_hold_up_the_end(papers: Path, tmp_path: Path, http2: bool) -> None:
    listen = Listen(port=0, cert=papers / "server.pem", key=papers / "server.key")
    context = ssl.create_default_context(cafile=str(papers / "ca.pem"))
    with httpx.Client(verify=context, http2=http2) as idle:
        with live(tiny(), tmp_path / "run", listen=listen) as server:
            assert idle.get(f"{server.url}/healthz").status_code == 200
            began = time.monotonic()
        assert time.monotonic() - began < 8  # uvicorn would wait for its goodbye for 20 s


def test_certificates_in_place_of_tokens(papers: Path, tmp_path: Path) -> None:
    listen = Listen(
        port=0, cert=papers / "server.pem", key=papers / "server.key", client_ca=papers / "ca.pem"
    )
    with live(tiny(), tmp_path / "run", listen=listen) as server:
        der = ssl.PEM_cert_to_DER_cert((papers / "one.pem").read_text())
        holder, token = server.parts.book.add([1], certificate=der)
        assert token == "" and holder.kind == "certificate"
        one, two = ((papers / f"{name}.pem", papers / f"{name}.key") for name in ("one", "two"))
        made = Client(server.url, ca=papers / "ca.pem", certificate=one, patience=10.0)
        server.clients.append(made)
        for task in made.tasks(2):
            assert task.client == 1 and not task.submit(task.base, examples=1).refused
        stranger = Client(server.url, ca=papers / "ca.pem", certificate=two, patience=5.0)
        server.clients.append(stranger)
        with pytest.raises(ServerError, match="bad-token"):
            stranger.status()  # signed, but nobody has said for whom it speaks
        nobody = httpx.Client(verify=ssl.create_default_context(cafile=str(papers / "ca.pem")))
        with pytest.raises(httpx.TransportError):
            nobody.get(server.url + "/healthz")
        server.parts.book.revoke(holder.id)
        with pytest.raises(ServerError, match="bad-token"):
            made.status()


def test_http_2_without_tls_by_prior_knowledge(server: Live) -> None:
    forget(server)
    http = server.http(http1=False, http2=True)
    reply = http.get("/v1/run")
    assert reply.http_version == "HTTP/2" and reply.status_code == 200
    task = server.client(0).next_task()
    assert task is not None
    assert put(http, task, body_of(task)).json()["client"] == 0
    assert put(http, task, body_of(task)).json()["repeated"] is True  # answered before the body was read
    assert http.get("/healthz").status_code == 200  # the connection lives on
    with pytest.raises(httpx.TransportError):
        server.http(http1=False, http2=True).get(
            "/healthz", headers={f"x-{k}": "y" * 9000 for k in range(30)}
        )
