"""An emulated Google Cloud Storage for tests and benchmarks: `python tests/emulated_store.py LATENCY_MS`.

Needs `gcp-storage-emulator`. It prints its port, keeps all objects in memory, and answers each request after
the latency. `emulator` runs it in a process of its own, and sets the variables by which gcsfs and TensorStore
find it.
"""

import contextlib
import os
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BUCKET = "gs://bucket"


@contextlib.contextmanager
def emulator(latency_ms: float = 0) -> Iterator[str]:
  """Runs the emulated store; yields the address of an empty bucket. Once a process: gcsfs keeps the port."""
  command = [sys.executable, str(Path(__file__).resolve()), str(latency_ms)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
    try:
      port = server.stdout.readline().strip()
      os.environ |= {
        "STORAGE_EMULATOR_HOST": f"http://localhost:{port}",  # gcsfs
        "TENSORSTORE_GCS_HTTP_URL": f"http://localhost:{port}",
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks Google for the type of the bucket
      }
      yield BUCKET
    finally:
      server.kill()


def serve(latency_ms: float) -> None:
  """Serves until the process is killed."""
  import http.server

  class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def process_request_thread(self, *args):
      time.sleep(latency_ms / 1000)
      super().process_request_thread(*args)

  http.server.HTTPServer = Server  # before the emulator is imported: its own answers one request at a time
  from gcp_storage_emulator.server import create_server

  server = create_server("localhost", 0, in_memory=True, default_bucket=BUCKET.removeprefix("gs://"))
  server.start()
  print(server._api._httpd.server_address[1], flush=True)
  while True:
    time.sleep(60)


if __name__ == "__main__":
  serve(float(sys.argv[1]))
