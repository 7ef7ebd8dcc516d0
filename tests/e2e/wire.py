"""HTTP spoken by hand, for what a well-behaved client would never do, and server-sent events as they are on the wire."""

import json
import socket
import struct

LIMIT_S = 30


def connect(port, receive_buffer=None, limit_s=LIMIT_S):
    link = socket.socket()
    if receive_buffer:
        # Before connecting, so that the window is small from the first segment.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    link.settimeout(limit_s)
    link.connect(("127.0.0.1", port))
    return link


def post_bytes(path, body, key=None, close=False, headers=()):
    """One POST as bytes. `body` is an object or bytes."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += ["Connection: close"] if close else []
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def reset(link):
    """Closes with a reset instead of an orderly end."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def read_to_end(link):
    """Everything until the server closes; a reset after the answer counts as a close."""
    data = b""
    while True:
        try:
            more = link.recv(65536)
        except ConnectionError:
            return data
        if not more:
            return data
        data += more


def parse_head(data):
    """(status, headers with lower-case names, rest)."""
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split(" ")[1]), headers, rest


def exchange(port, request, limit_s=LIMIT_S):
    """Sends bytes on a connection of its own and reads until the server closes."""
    with connect(port, limit_s=limit_s) as link:
        try:
            link.sendall(request)
        except ConnectionError:
            pass  # It answered and closed before it had read everything.
        return read_to_end(link)


class Events:
    """The events of one stream, with the ids and the order they came in."""

    def __init__(self, response):
        self.ids = []
        self.data = []
        fields = {}
        for line in response.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                assert name not in fields, "one line a field"
                fields[name] = value
                continue
            if fields:
                assert set(fields) <= {"id", "data"}, fields
                self.data.append(fields["data"])
                if "id" in fields:
                    self.ids.append(int(fields["id"]))
            fields = {}
        assert not fields, "the last event ends with an empty line"

    def chunks(self):
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    def errors(self):
        return [chunk["error"] for chunk in self.chunks() if "error" in chunk]

    def text(self, index=0):
        parts = []
        for chunk in self.chunks():
            for choice in chunk.get("choices", []):
                if choice["index"] == index:
                    parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
        return "".join(parts)

    def check_frame(self):
        """What holds of every stream: ids count from 1, [DONE] is last and stands once."""
        assert self.ids == list(range(1, len(self.ids) + 1))
        assert self.data[-1] == "[DONE]"
        assert self.data.count("[DONE]") == 1
        assert len(self.errors()) <= 1
