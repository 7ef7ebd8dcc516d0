"""A TCP proxy on loopback that cuts, stalls, slows down or spoils what goes through it."""

import socket
import threading
import time


class Proxy:
    """Leads to `target`. What it does to connections may be changed while they are open."""

    CHUNK_BYTES = 16 << 10

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.flows = threading.Event()
        self.flows.set()
        self.refuses = False
        self.bytes_per_s = None
        self.spoil = 0
        self.spoiled = 0
        self.bytes = 0
        self.open = set()
        self.lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.refuses:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target, 5)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source, sink):
        try:
            while chunk := source.recv(self.CHUNK_BYTES):
                self.flows.wait()
                if self.bytes_per_s:
                    time.sleep(len(chunk) / self.bytes_per_s)
                with self.lock:
                    self.bytes += len(chunk)
                    # A header is shorter: what is spoiled is in the middle of a large piece.
                    if self.spoil and len(chunk) > 4_096:
                        self.spoil -= 1
                        self.spoiled += 1
                        spoiled = bytearray(chunk)
                        spoiled[len(chunk) // 2] ^= 0xFF
                        chunk = bytes(spoiled)
                sink.sendall(chunk)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            with self.lock:
                self.open.discard(end)
            end.close()

    def stall(self):
        """Nothing moves, and nobody is told: what a network does that swallows packets."""
        self.flows.clear()

    def go_on(self):
        self.flows.set()

    def cut(self):
        """Ends every connection."""
        with self.lock:
            ends = list(self.open)
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.listener.close()
        self.flows.set()
        self.cut()
