"""TurboQuant of prefixcache beside mlx-vlm's, both at 4 bits on the CPU: rates, bytes, attention on codes, and what is lost.

mlx-vlm's kernels are Metal's, and on a CPU MLX's operations do the same arithmetic: no word about Macs follows from its rates
here. What codes cost in quality doesn't depend on the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant.format import form_of
from prefixcache.keys import BLOCK
from tools.bench import codecs, cpu_attention, quality, report
from tools.bench.peer.contestants import MLX_VLM_CODEC, Answer, Task, ask
from tools.bench.peers import compared, duration
from tools.bench.report import Figure

BITS, HEADS, WIDTH = 4, 8, 128
TOKENS = {"full": 8_192, "quick": 4_096, "tiny": 512}  # of the peer, which takes seconds for them
ATTENDED = {"full": 32_768, "quick": 8_192, "tiny": 512}
ROUNDS = {"full": 3, "quick": 2, "tiny": 1}  # in attention, the peer has one, with a median of three
TROUBLES = {
    "RoPE low": "constants on slow channels, under RoPE",
    "offset 20": "constant offsets",
    "log-normal": "unequal channels",
}
SHOWN = {"full": (4, 3), "quick": (4, 3), "tiny": (4,)}


def _asked(task: str, **plan: Any) -> Answer:
    (answer,) = ask(MLX_VLM_CODEC, Task(task, plan), module="mlx_vlm_turboquant")
    return answer


def rates(scale: str) -> Iterator[Figure]:
    """GB/s of fp16 rows, keys and values, and the bytes of a token."""
    if not turboquant_c.available():
        yield Figure("TurboQuant beside mlx-vlm's", f"C kernel: {turboquant_c.describe()}", "", "", None)
        return
    rows, form = codecs.drawn(scale), form_of(WIDTH, BITS, 0)
    ours: dict[str, Any] = {"bytes": rows.nbytes}
    with codecs.threads(codecs.CPU_THREADS):
        for what, works in (("encode", codecs.encoders), ("decode", codecs.decoders)):
            work, _ = works(rows, form, rows.levels)
            work()
            ours[f"{what}_s"] = [report.seconds(work) for _ in range(ROUNDS[scale])]
    levels = HEADS * WIDTH * (2 + 1 + 1) / BLOCK  # of keys mean and root, of values root
    ours["a_token"] = 2 * HEADS * (4 * words_of(WIDTH, BITS) + 2) + levels
    theirs = [(MLX_VLM_CODEC, _asked("rates", bits=BITS, tokens=TOKENS[scale], rounds=ROUNDS[scale]))]
    for what in ("decode", "encode"):

        def rate(found: dict[str, Any], what: str = what) -> float:
            return found["bytes"] / statistics.median(found[f"{what}_s"]) / 1e9

        yield compared(
            f"TurboQuant, {BITS} bits, CPU: {what}, of fp16 rows",
            ours,
            theirs,
            rate,
            lambda found, rate=rate: f"{rate(found):.3g} GB/s",
            more_is_better=True,
            unit="GB/s",
        )
    yield compared(
        f"TurboQuant, {BITS} bits: bytes a token, {HEADS} heads of {WIDTH}, keys and values",
        ours,
        theirs,
        lambda found: found["a_token"],
        lambda found: f"{found['a_token']:.0f}",
        unit="bytes",
    )


def attention(scale: str) -> Iterator[Figure]:
    """One token's attention to codes, as in decoding."""
    tokens, rounds = ATTENDED[scale], ROUNDS[scale]
    name = f"TurboQuant, {BITS} bits, CPU: attention of one token to {tokens:,}, {HEADS} heads x {cpu_attention.GROUP}"
    taken = cpu_attention.decoding(tokens, HEADS, rounds)
    if taken is None:
        yield Figure(name, f"C kernel: {turboquant_c.describe()}", "", "", None)
        return
    yield compared(
        name,
        {"seconds": taken},
        [(MLX_VLM_CODEC, _asked("attention", bits=BITS, tokens=tokens, rounds=1))],
        lambda found: statistics.median(found["seconds"]),
        lambda found: duration(statistics.median(found["seconds"])),
        unit="s",
    )


def losses(scale: str) -> Iterator[Figure]:
    """KL of attention on keys that were coded and decoded, by the trouble that they have (`tools/bench/attention.py`)."""
    for bits in SHOWN[scale]:
        ours = quality.means(quality.levelled, bits)
        theirs = [(MLX_VLM_CODEC, _asked("quality", bits=bits))]
        for trouble, told in TROUBLES.items():
            yield compared(
                f"TurboQuant, {bits} bits: KL of attention, keys with {told}",
                ours,
                theirs,
                lambda found, trouble=trouble: found[trouble],
                lambda found, trouble=trouble: f"{found[trouble]:.3g} nats",
                unit="nats",
            )


FIGURES = {"peers-codec": rates, "peers-attention": attention, "peers-quality": losses}
