"""`python -m tools.bench`: every figure that the project answers for, beside its bar and a reference of the same run."""

from __future__ import annotations

import sys

from tools.bench import (
    codecs,
    cpu_attention,
    disk,
    first_tokens,
    fleet,
    gpu,
    gpu_attention,
    gpu_live,
    gpu_transform,
    idle_writes,
    live,
    lookup,
    memory,
    opening,
    peer_codecs,
    peers,
    prefill,
    quality,
    ranks,
    remote,
    remote_peers,
    remote_serving,
    report,
    server,
    server_load,
    sharing,
    transform_models,
    transforms,
)

BENCHES = {
    "peers": peers.FIGURES | peer_codecs.FIGURES,
    "sharing": sharing.FIGURES,
    "lookup": lookup.FIGURES,
    "disk": disk.FIGURES | idle_writes.FIGURES,
    "opening": opening.FIGURES,
    "memory": memory.FIGURES,
    "gpu": gpu.FIGURES | gpu_transform.FIGURES,
    "codecs": codecs.FIGURES,
    "transforms": transforms.FIGURES | transform_models.FIGURES,
    "quality": quality.FIGURES,
    "attending": cpu_attention.FIGURES | gpu_attention.FIGURES,
    "live": live.FIGURES | gpu_live.FIGURES | prefill.FIGURES,
    "remote": remote.FIGURES | remote_serving.FIGURES | remote_peers.FIGURES | fleet.FIGURES,
    "ranks": ranks.FIGURES,
    "server": server.FIGURES | first_tokens.FIGURES | server_load.FIGURES,
}

if __name__ == "__main__":
    sys.exit(report.main(BENCHES))
