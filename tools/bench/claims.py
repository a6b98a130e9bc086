"""What docs/benchmarks.md says in short and docs/embedding.md of live caches, and the figure of `make bench` behind each.

`tests/tools/test_bench.py` holds the pages to this: each row of the table "In short" is here, by how its first cell begins,
each sentence is still there, and each figure exists. Whoever changes a row changes it here too.
"""

from __future__ import annotations

import re

# How the first cell of a row begins -> the figures, by the names that `--only` takes.
ROWS: dict[str, tuple[str, ...]] = {
    "20 conversations x 10 turns on a shared 4k prompt: bytes held": ("conversations",),
    "the same with RAM at a quarter: bytes written to SSD": ("spilled",),
    "`prefixcache serve`, 8 users at once x 6 turns": ("server-computed",),
    "its time to first token, five chats": ("server-beside-stock",),
    "100 diverging prompts among 100 entries of 8,192 tokens": ("server-divergent",),
    "how long a store holds up the batch on two slow cores": ("server-stall",),
    "`match` of 32k tokens among 10,000 and 100,000 blocks": ("match",),
    "writing 1.6 MB images, fsync included": ("spill",),
    "promoting them, checksum included": ("promote",),
    "opening a directory of 100,000 blocks": ("opening",),
    "`reconcile --deep`, every checksum, over a plain cold read": ("verify",),
    "TurboQuant on the CPU, 2 threads, AVX-512": ("decode-cpu", "encode-cpu"),
    "`transform:4` on one thread of the CPU": ("transform-cpu",),
    "reading under this rate, `transform:4`": ("transform-fetch",),
    "on an NVIDIA H200: decoding and encoding, GB/s": ("kernels",),
    "growth of the process over what `stats()` accounts": ("resident",),
    "live caches at 4 bits, 32 layers x 8 heads x 32k tokens": ("live-memory",),
    "the next token on codes as on fp16, tiny-llama": ("live-agreement",),
    "attention of one token to 128k and 32k, 4 bits, on an NVIDIA H200": ("attention-gpu",),
    "the same to 32k on the CPU, 2 threads, AVX-512": ("attention-cpu",),
    "decoding with a random model of Llama 3 8B's shape": ("live-decoding",),
    "a prefill with its stores behind it": ("prefill",),
    "a hit of 20,000 tokens from RAM on an H200": ("fetch",),
    "the first token of the next turn on an H200": ("gpu-turns",),
    "`fetch` of 32k tokens x 8 layers x 8 heads of 128 on the CPU": ("live-fetch",),
    "a remote tier, sealed and checked, over plain bytes": ("remote-rates",),
    "which of 128 blocks an engine has": ("remote-lookup",),
    "time to first token of 4,000 tokens that another machine stored": ("remote-first-token",),
    "128 images of 1.6 MB from one Valkey": ("remote-peers",),
    "a lookup when Valkey has stopped": ("remote-peers",),
    "four machines, requests to any, on the agents' trace": ("remote-fleet",),
    "two ranks of one model, what agreement adds": ("rank-agreement",),
    "two ranks, tensor-parallel, time to first token": ("rank-first-token",),
}

# Words of a sentence of docs/embedding.md -> the figures.
SENTENCES: dict[str, tuple[str, ...]] = {
    "at 32k tokens they take .26 of fp16's bytes": ("live-memory",),
    "99.2 % of 1200 places on tiny-llama": ("live-agreement",),
}


def first_cells(page: str) -> list[str]:
    """The first cells of the rows of the table "In short". Raises ValueError where there is none."""
    _, found, section = page.partition("\n## In short\n")
    rows = re.findall(r"^\|(.*?)(?<!\\)\|", section.partition("\n## ")[0], re.MULTILINE)
    cells = [cell for row in rows if (cell := row.strip()) and not set(cell) <= set("-: ")]
    if not found or not cells:
        raise ValueError("docs/benchmarks.md has no table under ## In short")
    return cells


def figures_of(cell: str) -> tuple[str, ...]:
    """The figures of a row. Raises ValueError for a row that is not here."""
    for begins, figures in ROWS.items():
        if cell.startswith(begins):
            return figures
    raise ValueError(
        f"{cell[:60]!r} is not in ROWS of tools/bench/claims.py: add the row of docs/benchmarks.md with its figure"
    )
