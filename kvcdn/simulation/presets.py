"""Presets: topologies to begin with, examples and not measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvcdn.simulation.topology import Edge, Origin, Publish, Readers, Region, Topology

PRESETS: Mapping[str, Topology] = {
    topology.name: topology
    for topology in (
        # A serving cluster: GPUs behind one edge in their region, objects in a store there, published when seen twice.
        Topology(
            name="cluster",
            origin=Origin(store="s3-in-region", mbit=100_000, latency_ms=20),
            publish=Publish(after_requests=2),
            readers=Readers(model="llama-3.1-70b", device="h100", devices=8, round_trips=2),
            edges=(
                Edge(name="edge", capacity_gb=2000, mbit=100_000, reader_mbit=25_000, rtt_ms=0.5, uplink_mbit=100_000,
                     uplink_rtt_ms=1),
            ),
        ),
        # Readers with laptops on three continents, edges of a CDN near them, one region as a shield before the store.
        Topology(
            name="laptops",
            origin=Origin(store="r2", mbit=10_000, latency_ms=30),
            readers=Readers(model="qwen3-4b", device="m1-pro"),
            regions=(Region(name="shield", capacity_gb=2000, mbit=10_000, rtt_ms=10),),
            edges=tuple(
                Edge(name=name, share=share, region="shield", capacity_gb=200, mbit=20_000, reader_mbit=250, rtt_ms=20,
                     uplink_mbit=10_000, uplink_rtt_ms=rtt, delivery="bunny-volume")
                for name, share, rtt in (("europe", 4.0, 15.0), ("america", 4.0, 80.0), ("asia", 2.0, 150.0))
            ),
        ),
        # What a first try looks like: one edge, one store, laptops in an office.
        Topology(
            name="office",
            origin=Origin(store="s3", mbit=1000, latency_ms=30),
            readers=Readers(model="qwen3-4b", device="m1-pro", memory_gb=0.0),
            edges=(Edge(name="office", capacity_gb=math.inf, mbit=10_000, reader_mbit=1000, rtt_ms=2, uplink_mbit=500),),
        ),
    )
}  # fmt: skip
