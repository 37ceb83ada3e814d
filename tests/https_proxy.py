"""A proxy that answers for every HTTPS server, with certificates of an authority of its own."""

import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def certificate(directory: Path, host: str) -> Path:
    """A certificate for a host that is its own authority, and its key, in one file."""
    key, cert, both = directory / "key.pem", directory / "cert.pem", directory / "both.pem"
    subprocess.run(
        [
            *"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj".split(),
            *(f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both


@contextmanager
def proxy(both: Path, answers: Mapping[str, bytes], asked: list[str]) -> Iterator[str]:
    """The proxy's address. answers: by path of the URL; asked: what was asked for, as it comes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode().strip())
            while self.rfile.readline().strip():
                pass
            self.request.sendall(b"HTTP/1.1 200 connected\r\n\r\n")
            with context.wrap_socket(self.request, server_side=True) as inside:
                file = inside.makefile("rb")
                path = file.readline().decode().split()[1]
                while file.readline().strip():
                    pass
                body = answers.get(path)
                head = "200 OK" if body is not None else "404 Not Found"
                length = f"HTTP/1.1 {head}\r\nContent-Length: {len(body or b'')}\r\n"
                inside.sendall(f"{length}Connection: close\r\n\r\n".encode() + (body or b""))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Tunnel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
