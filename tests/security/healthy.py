"""A dockerd with the part that gpunode queries for its version: run as the user of a rootless Docker."""

from __future__ import annotations

import socketserver
import sys
from http.server import BaseHTTPRequestHandler

VERSION = "27.3.1"


class _Answers(BaseHTTPRequestHandler):
    server_version, sys_version = f"Docker/{VERSION} (linux)", ""

    def address_string(self) -> str:
        return ""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with socketserver.ThreadingUnixStreamServer(sys.argv[1], _Answers) as server:
        server.serve_forever()
