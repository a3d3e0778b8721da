"""A Ray cluster of two machines on this one: `ray_nodes.py` tells its address, and loses the second at a line of input.

It ends with its input. On loopback; its environment is the caller's.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80_000_000


def main() -> None:
    node = {
        "num_cpus": 1,
        "object_store_memory": OBJECT_STORE_BYTES,
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        sys.stdout.write("lost\n")
        sys.stdout.flush()
        sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
