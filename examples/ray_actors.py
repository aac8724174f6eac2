"""Ray: one actor on each node, with all of its GPUs.

  python ray_actors.py --nodes 2 --gpus 8 -- text_lm --mesh data=16 --checkpoint /shared/run --save-every 100

The arguments after `--` are the arguments of `nnx-parallel train`. The checkpoints must be on a disk that all
nodes can reach. Each actor starts the launcher, which supervises one process and starts it again when it
fails.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LAUNCH = ["nnx-parallel", "launch", "--cluster", "--restarts", "3", "--hang-after", "600", "--"]


@ray.remote
class Worker:
  """One process of the job."""

  def address(self) -> tuple[str, str]:
    """Returns the address of this node and a free port on it, where the first process listens."""
    with socket.socket() as probe:
      probe.bind(("", 0))
      return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

  def train(self, rank: int, count: int, address: tuple[str, str], words: list[str]) -> int:
    """Trains to the end, and returns the exit code."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": address[0], "MASTER_PORT": address[1]}
    return subprocess.run([*LAUNCH, *words], env={**os.environ, **own}).returncode


def main() -> None:
  """Starts the actors, and waits until all of them have ended."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--nodes", type=int, required=True)
  parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node")
  parser.add_argument("--cpus", type=int, default=1, help="cores of each node")
  parser.add_argument("words", nargs=argparse.REMAINDER)
  args = parser.parse_args()
  words = args.words[1:] if args.words[:1] == ["--"] else args.words

  ray.init()
  spread = placement_group([{"CPU": args.cpus, "GPU": args.gpus}] * args.nodes, strategy="STRICT_SPREAD")
  ray.get(spread.ready())
  workers = [
    Worker.options(
      num_cpus=args.cpus,
      num_gpus=args.gpus,
      scheduling_strategy=PlacementGroupSchedulingStrategy(spread, placement_group_bundle_index=rank),
    ).remote()
    for rank in range(args.nodes)
  ]
  address = ray.get(workers[0].address.remote())
  codes = ray.get([w.train.remote(rank, args.nodes, address, words) for rank, w in enumerate(workers)])
  sys.exit(max(codes))


if __name__ == "__main__":
  main()
