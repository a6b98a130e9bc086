"""`python -m tools.bench`: every figure that the project answers for, beside its bar and a reference of the same run."""

import sys

from tools.bench import report

GROUPS = {  # the modules whose FIGURES they are
    "peers": ("peers", "peer_codecs"),
    "sharing": ("sharing",),
    "lookup": ("lookup",),
    "disk": ("disk", "idle_writes"),
    "opening": ("opening",),
    "memory": ("memory",),
    "gpu": ("gpu", "gpu_transform"),
    "codecs": ("codecs",),
    "transforms": ("transforms", "transform_models"),
    "quality": ("quality",),
    "attending": ("cpu_attention", "gpu_attention"),
    "live": ("live", "gpu_live", "prefill", "gpu_requests"),
    "remote": ("remote", "remote_serving", "remote_peers", "fleet"),
    "ranks": ("ranks",),
    "pictures": ("pictures", "picture_server"),
    "agents": ("agents.replay",),
    "server": ("server", "first_tokens", "next_turns", "server_load", "slow_hits"),
}

if __name__ == "__main__":
    sys.exit(report.main(GROUPS))
