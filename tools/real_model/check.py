"""Whether the codec is as good on the pretrained model as it was: a small `prefixcache evaluate` against a bound.

Small enough for every change: a minute on two cores with OpenBLAS. Documents quote `prefixcache evaluate` itself.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from prefixcache.cli.evaluate.measuring import Job, load, measure
from prefixcache.cli.evaluate.texts import default_text

CONTROL = "raw"
JOB = Job(prefix=1024, tokens=256, windows=3, needles=0)

CODEC = "turboquant:4"
# Nats, the mean over the texts. Measured .0021; single texts go from .0016 to .0028, so that 3 of them have a standard
# error of .0003, and other versions of Python bring other texts. Without levelling it is .0040, without sinks .0116.
KL_BOUND = 0.003

Facts = dict[str, Any]


def measured(folder: Path, codec: str = CODEC) -> Facts:
    """The facts of `prefixcache evaluate --float32`: on a CPU half precision is slow, and KL differs little by it."""
    facts = measure(load(str(folder), float32=True), [CONTROL, codec], default_text(), JOB)
    source = {"files": [], "python": platform.python_version()}
    return {"model": str(folder), "adapter": None, "float32": True, "text": source, **facts}


def failures(facts: Facts, bound: float = KL_BOUND) -> list[str]:
    """What is worse than it may be, a sentence each."""
    found = []
    for codec in facts["codecs"]:
        name, kl = codec["codec"], codec["kl_mean"]
        if name == CONTROL and not codec["identical"]:
            found.append(
                f"{name}: logits differ from the live cache's (KL {kl} nats): rows don't come back as they were"
            )
        if name != CONTROL and (kl is None or kl > bound):
            found.append(f"{name}: KL {kl} nats, and {bound} is the bound (KL_BOUND in tools/real_model/check.py)")
    return found
