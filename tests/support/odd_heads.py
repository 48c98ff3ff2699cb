"""Heads of requests whose target or host two servers may read differently."""

ODD_HEADS = [
    "GET *@{host}/x HTTP/1.1",
    "POST *@{host}/x HTTP/1.1",
    "GET *0/x HTTP/1.1",
    "OPTIONS * HTTP/1.1",
    "GET //{host}/x HTTP/1.1",
    "GET http://{host}/v1/models HTTP/1.1",
    "GET %2Fv1%2Fjobs%2Fa@{host} HTTP/1.1",
    "GET @{host}/x HTTP/1.1",
    "CONNECT {host} HTTP/1.1",
    "GET /v1/models HTTP/1.1\r\nhost: evil.test",
]


def odd_request(head: str, host: str) -> bytes:
    """The bytes of a request with such a head, whose other host is `host`."""
    return f"{head}\r\nhost: localhost\r\nconnection: close\r\n\r\n".format(host=host).encode()
