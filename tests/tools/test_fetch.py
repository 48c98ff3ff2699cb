"""Fetching from a real server: what comes back, and what is never reached."""

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from cray_agents import Agent
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput, ToolError
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.fetch import Reachable, fetch_tool

LOOPBACK = ("127.0.0.0/8", "::1/128")
PAGE = """<!doctype html><html><head><title>A page</title><style>p {color: red}</style>
<script>alert("no")</script></head><body><h1>Rain  &amp; sun</h1><p>It <b>rains</b>
today.</p><ul><li>one<li>two <a href="/more?x=1">more</a></ul><table><tr><td>a<td>b</table>
<!-- hidden --><a href="javascript:x()">go</a> <a href="http://[your-host]/x">on</a></body></html>"""


class Site(http.server.ThreadingHTTPServer):
    """What was asked of it, and whether who read a drip hung up."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str]] = []
        self.ended = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"]))
        match self.path.partition("?")[0]:
            case "/page":
                self.say("text/html", PAGE)
            case "/latin":
                self.say("text/html; charset=latin-1", b"<p>\xe9t\xe9</p>")
            case "/meta":
                self.say("text/html", b'<meta charset="cp1252"><p>\x80 5</p>')
            case "/plain":
                self.say("text/plain; charset=utf-8", "0123456789" * 30)
            case "/image":
                self.say("image/png", b"\x89PNG\0")
            case "/zip":
                self.say("text/plain", b"\x1f\x8b", encoding="gzip")
            case "/gone":
                self.say("text/plain", "not here any more", status=410)
            case "/there":
                self.say("text/plain", "", status=302, location="/page")
            case "/round":
                self.say("text/plain", "", status=307, location="/round")
            case "/away":
                self.say("text/plain", "", status=301, location="http://internal.test/")
            case "/file":
                self.say("text/plain", "", status=301, location="file:///etc/passwd")
            case "/port":
                self.say("text/plain", "", status=301, location="http://127.0.0.1:9/page")
            case "/broken":
                self.say("text/plain", "", status=302, location="http://[your-host]/x")
            case "/drip":
                self.server.ended.set() if self.drip() else None
            case _:
                self.say("text/plain", self.path)

    def say(self, kind: str, body: str | bytes, status: int = 200, location: str = "",
            encoding: str = "") -> None:  # fmt: skip
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if location:
            self.send_header("Location", location)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(data)

    def drip(self) -> bool:
        """Bytes now and then, for ever; whether the client hung up."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            try:
                self.wfile.write(b"X-More: 1\r\n" if self.path == "/drip" else b"x")
                self.wfile.flush()
            except OSError:
                return True
            self.server.ended.wait(0.02)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def base(site: Site) -> str:
    return f"127.0.0.1:{site.server_address[1]}"


def test_pages_come_as_text(base: str) -> None:
    fetch = fetch_tool(allow=[base], private=LOOPBACK)
    engine = ScriptedEngine([tool_call("fetch", url=f"http://{base}/there#part"), "done"])
    run = Agent(name="a", tools=[fetch], engine=engine).run_sync("go")
    (call,) = run.trajectory.turns[0].tool_calls
    assert call.error is None
    assert call.result == (
        f"http://{base}/page\n\nA page\n\n# Rain & sun\n\nIt rains today.\n\n- one\n\n"
        f"- two more <http://{base}/more?x=1>\n\na | b |\n\ngo on"
    )


def test_character_sets_and_long_texts(base: str) -> None:
    fetch = fetch_tool(allow=[base], private=LOOPBACK, max_bytes=200)
    assert fetch(f"http://{base}/latin").endswith("\n\nété")
    assert fetch(f"http://{base}/meta").endswith("\n\n€ 5")
    text = fetch(f"http://{base}/plain", start=195)
    assert text == f"http://{base}/plain\n\n56789\n[cut after 200 bytes]"
    assert fetch(f"http://{base}/ü b?q=\r\nx").endswith("/%C3%BC%20b?q=x")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/image", "is image/png, not text"),
        ("/zip", "compressed"),
        ("/gone", "answered 410: not here any more"),
        ("/round", "more than 5 redirects"),
        ("/away", "internal.test may not be reached; these hosts may: 127.0.0.1"),
        ("/file", "only http and https can be fetched, not 'file'"),
        ("/port", "may not be reached"),
        ("/broken", "redirects to 'http://[your-host]/x'"),
    ],
)
def test_what_is_told(base: str, path: str, message: str) -> None:
    fetch = fetch_tool(allow=[base], private=LOOPBACK)
    with pytest.raises(ToolError) as caught:
        fetch(f"http://{base}{path}")
    assert message in str(caught.value)


def test_loopback_is_not_reached_unless_it_is_allowed(site: Site, base: str) -> None:
    port = site.server_address[1]
    fetch = fetch_tool(allow=["*.localhost:*", "localhost:*", "127.0.0.1:*", "[::1]:*", "0:*",
                              "2130706433:*", "[::ffff:127.0.0.1]:*"])  # fmt: skip
    for host in ("127.0.0.1", "localhost", "0", "2130706433", "[::ffff:127.0.0.1]", "LOCALHOST."):
        with pytest.raises(ToolError, match="which is not public"):
            fetch(f"http://{host}:{port}/page")
    assert site.seen == []
    allowed = fetch_tool(allow=["localhost:*"], private=LOOPBACK)
    assert "Rain" in allowed(f"http://localhost:{port}/page")
    assert site.seen == [("/page", f"localhost:{port}")]


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
     "224.0.0.1", "255.255.255.255", "[::1]", "[fe80::1]", "[fc00::1]", "[ff02::1]",
     "[::ffff:10.0.0.1]", "[2002:a00:1::]", "[64:ff9b::a00:1]", "[::]"],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    reachable = Reachable([f"{address}:*"])
    with pytest.raises(ToolError, match="which is not public"):
        list(reachable.addresses(reachable.target(f"http://{address}/")))


def test_public_addresses() -> None:
    for address in ("8.8.8.8", "[2606:4700::1111]"):
        reachable = Reachable([address])
        assert len(list(reachable.addresses(reachable.target(f"https://{address}/")))) == 1


@pytest.mark.parametrize(
    ("url", "fits"),
    [
        ("https://docs.python.org/3/", True),
        ("http://DOCS.python.org:80/3/", True),
        ("https://docs.python.org./", True),
        ("https://a.b.example.org/", True),
        ("https://example.org/", False),
        ("https://badexample.org/", False),
        ("https://docs.python.org.evil.test/", False),
        ("https://evil.test/docs.python.org", False),
        ("https://docs.python.org:8443/", False),
        ("https://docs.python.org@evil.test/", False),
        ("https://evil.test\\@docs.python.org/", False),
        ("https://user:pass@docs.python.org/", False),
        ("ftp://docs.python.org/", False),
        ("docs.python.org", False),
        ("https://", False),
        ("https://docs.python.org:99999/", False),
        ("http://[::1", False),
        ("https://bücher.example.org/", True),
    ],
)
def test_the_allow_list(url: str, fits: bool) -> None:
    reachable = Reachable(["docs.python.org", "*.example.org"])
    if fits:
        assert reachable.target(url).host.endswith(("docs.python.org", ".example.org"))
    else:
        with pytest.raises(ToolError):
            reachable.target(url)


@pytest.mark.parametrize("path", ["/drip", "/drip?body"])
def test_a_server_that_drips_is_cut_off(site: Site, base: str, path: str) -> None:
    fetch = fetch_tool(allow=[base], private=LOOPBACK, timeout=0.3)
    while not site.seen:  # on a busy machine the time may be over before it is asked
        with pytest.raises(ToolError, match="did not answer in time"):
            fetch(f"http://{base}{path}")
    assert site.ended.wait(120)  # the server noticed: nothing is left open


def test_tls_is_checked_against_the_name(tmp_path, base: str) -> None:
    """A server with a certificate that nobody vouches for."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name)
        .public_key(key.public_key()).serial_number(1).not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = tmp_path / "site.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                          serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = Site()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    port = server.server_address[1]
    try:
        fetch = fetch_tool(allow=["localhost:*", "127.0.0.1:*"], private=LOOPBACK)
        with pytest.raises(ToolError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(f"https://localhost:{port}/page")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(pem))
            assert "Rain" in fetch(f"https://localhost:{port}/page")
            with pytest.raises(ToolError, match="IP address mismatch"):
                fetch(f"https://127.0.0.1:{port}/page")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nobody_there() -> None:
    fetch = fetch_tool(allow=["127.0.0.1:*", "nothing.invalid"], private=LOOPBACK)
    with socket.socket() as held, pytest.raises(ToolError, match="ConnectionRefusedError"):
        held.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        fetch(f"http://127.0.0.1:{held.getsockname()[1]}/")
    with pytest.raises(ToolError, match="cannot be found"):
        fetch("http://nothing.invalid/")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": "docs.python.org"}, "give a list of hosts"),
        ({"allow": []}, "give a list of hosts"),
        ({"allow": ["https://docs.python.org/"]}, "write a host such as"),
        ({"allow": ["*"]}, "write a host such as"),
        ({"allow": ["a.b"], "private": ["10.0.0.1/8"]}, "has host bits set"),
        ({"allow": ["a.b"], "max_bytes": 0}, "must be above 0"),
    ],
)
def test_what_cannot_be_meant(options: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fetch_tool(**options)
