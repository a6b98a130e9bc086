"""What codec transform takes on the CPU: the rate at which rows are coded and come back, how long a prompt's state takes to
fetch, from which rate of an SSD or a network on the smaller image is not the faster one, and how large a basis is.

Rows and bases are those of `transform_rows`: no model is needed. The product of float32 matrices beside a rate is the one
that coding can't do without, of as many rows, alone.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prefixcache import PrefixCache, Transform, TurboQuant
from prefixcache.codecs.threads import threads as most_threads
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.turboquant.format import form_of
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from prefixcache.keys import BLOCK
from tools.bench import codecs, report, transform_rows
from tools.bench.prompts import draw
from tools.bench.report import Beside, Figure
from tools.bench.transform_rows import CHANNELS, WIDTH

QUALITY, BITS = 4.0, 4
OURS, OTHER = f"transform:{QUALITY:g}", f"turboquant:{BITS}"
MODEL = "bench@transform"
MODEL_LAYERS = 32  # Llama 3 8B's
JOINED = {"full": (1, 2, 4), "quick": (1, 2, 4), "tiny": (1,)}  # layers of a group
CODED = {"full": 8, "quick": 8, "tiny": 1}  # blocks of one layer: 1 MB of float16 each
ROUNDS = {"full": 5, "quick": 3, "tiny": 1}
# Where BLAS, which NumPy has of its own, reads how many threads it may have: before it is loaded.
BLAS = ("OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


# -- rates -------------------------------------------------------------------------------------------------------------


def rates(scale: str) -> Iterator[Figure]:
    """Rows of one group, in float16, to codes and back; on one thread and on all."""
    for joined in JOINED[scale]:
        for threads in sorted({1, most_threads()}):
            with _blas_threads(threads):
                found = report.in_child("transforms", "times", joined, threads, CODED[scale], ROUNDS[scale])
            for way in ("encode", "decode"):
                yield _rate(way, joined, threads, found)


def _rate(way: str, joined: int, threads: int, found: dict[str, Any]) -> Figure:
    ours, product, other = (found["seconds"][name] for name in (way, f"{way} product", f"{way} {OTHER}"))
    nbytes = found["bytes"]
    return Figure(
        f"{OURS}, CPU, {way}: {joined * CHANNELS:,} channels ({joined} of Llama 3 8B's layers), "
        f"{threads} thread{'s' * (threads > 1)}",
        _told(nbytes, ours),
        "",
        "",
        None,
        {**found, "joined": joined, "threads": threads},
        tuple(
            Beside(who, _told(nbytes, theirs), f"{report.median_ratio(theirs, ours):.2g} x")
            for who, theirs in ((f"the product, {found['components']:,} components", product), (OTHER, other))
        ),
    )


def _told(nbytes: int, times: list[float]) -> str:
    return f"{nbytes / statistics.median(times) / 1e9:.3g} GB/s"


def times(joined: int, threads: int, blocks: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, by what is done: with rows of `blocks` blocks of one layer, or as many bytes of more layers."""
    of = transform_rows.group(0, joined)
    coder = GroupCoder(of, transform_rows.tables(joined), QUALITY, transform_rows.DTYPE)
    streams = transform_rows.rows(of, max(1, blocks // joined) * BLOCK, 1)
    pieces = [[stream[at : at + BLOCK] for stream in streams] for at in range(0, len(streams[0]), BLOCK)]
    codes = [coder.encode(piece, i * BLOCK) for i, piece in enumerate(pieces)]
    vectors = of.vectors[:, : len(coder.classes)].astype(np.float32)
    there, back = (np.ones((BLOCK, count), np.float32) for count in vectors.shape)
    turboquant = codecs.Rows(
        [np.ascontiguousarray(stream.swapaxes(0, 1)) for stream in streams],
        measure_levels(streams[0].astype(np.float32), True),
    )
    form = form_of(WIDTH, BITS, 0)
    with codecs.threads(threads):
        works = {
            "encode": lambda: [coder.encode(piece, i * BLOCK) for i, piece in enumerate(pieces)],
            "decode": lambda: [coder.decode(own, i * BLOCK) for i, own in enumerate(codes)],
            "encode product": lambda: [there @ vectors for _ in pieces],
            "decode product": lambda: [back @ vectors.T for _ in pieces],
            f"encode {OTHER}": codecs.encoders(turboquant, form, turboquant.levels)[0],
            f"decode {OTHER}": codecs.decoders(turboquant, form, turboquant.levels)[0],
        }
        for work in works.values():
            work()
        clock = report.seconds if threads > 1 else _own_seconds
        found = report.in_turns(rounds, *(lambda _, work=work: clock(work) for work in works.values()))
    coded = sum(own.heads.nbytes + own.words.nbytes + own.offsets.nbytes + own.offset_steps.nbytes for own in codes)
    return {
        "bytes": turboquant.nbytes,
        "coded": coded,
        "channels": of.channels,
        "components": len(coder.classes),
        "seconds": dict(zip(works, found, strict=True)),
    }


def _own_seconds(work: Callable[[], Any]) -> float:
    """What this process alone took of a CPU: what else runs there makes one thread's time no longer."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


@contextlib.contextmanager
def _blas_threads(number: int) -> Iterator[None]:
    """Processes that are started meanwhile have so many threads for products."""
    before = {name: os.environ.get(name) for name in BLAS}
    os.environ |= dict.fromkeys(BLAS, str(number))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


# -- a prompt ----------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """`layers` of Llama 3 8B's, each a group, and `tokens` that are stored."""

    layers: int
    tokens: int


PROMPTS = {"full": Prompt(4, 4096), "quick": Prompt(4, 4096), "tiny": Prompt(1, 512)}
FETCHES = {"full": 3, "quick": 3, "tiny": 1}


def fetch(scale: str) -> Iterator[Figure]:
    """A prompt's state, from RAM and from the SSD with the page cache emptied of its files, as both codecs bring it back; and
    the rate of reading under which the smaller image is the faster one to fetch.
    """
    prompt = PROMPTS[scale]
    for threads in sorted({1, most_threads()}):
        with report.scratch() as folder, _blas_threads(threads):
            found = report.in_child("transforms", "fetched", str(folder), *prompt, FETCHES[scale])
        yield from _fetch_figures(
            prompt, f"{threads} thread{'s' * (threads > 1)} for products", found[OURS], found[OTHER]
        )


def _fetch_figures(prompt: Prompt, threads: str, ours: dict[str, Any], other: dict[str, Any]) -> Iterator[Figure]:
    raw = {OURS: ours, OTHER: other}
    shape = f"{prompt.tokens:,} tokens x {prompt.layers} of Llama 3 8B's layers"
    for where, name in (("RAM", "ram"), ("the SSD", "ssd")):
        one, two = ours[name], other[name]
        yield Figure(
            f"a prompt's state of {shape}, from {where}, {threads}: {OURS}",
            f"{statistics.median(one):.2f} s",
            "",
            "",
            None,
            raw,
            (Beside(OTHER, f"{statistics.median(two):.2f} s", f"{report.median_ratio(two, one):.2g} x"),),
        )
    saved = (other["nbytes"] - ours["nbytes"]) / prompt.tokens
    added = statistics.median(a - b for a, b in zip(ours["ram"], other["ram"], strict=True)) / prompt.tokens
    cold = statistics.median(other["ssd"]) - statistics.median(other["ram"])
    yield Figure(
        f"the rate of an SSD or a network under which {OURS} is fetched sooner than {OTHER}, {threads}",
        f"{saved / added / 1e6:.3g} MB/s" if added > 0 else "any",
        "",
        f"bytes saved / time added, a token of {shape}: {saved / 1e3:.1f} kB / {added * 1e6:.0f} us"
        + (f"; this SSD, cold, gave {OTHER} {other['nbytes'] / cold / 1e6:.0f} MB/s" if cold > 0 else ""),
        None,
        raw,
    )


def fetched(place: str, layers: int, count: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By codec: seconds from RAM ("ram") and from the SSD ("ssd") of each round, those of the store, bytes of the files."""
    folder = Path(place)
    data = transform_rows.basis_bytes(MODEL, layers, 1)
    Bases(folder / "bases").save(data)
    live = transform_rows.prompt_cache(Basis(data).groups, count)
    tokens = draw(21)(count)

    def opened(codec: Transform | TurboQuant) -> PrefixCache:
        ssd_dir = folder / type(codec).__name__
        return PrefixCache(ram="8GB", ssd_dir=ssd_dir, ssd="40GB", codec=codec, basis_dir=folder / "bases")

    stored, files = [], []
    for codec in (Transform(QUALITY), TurboQuant(BITS, BITS)):
        with opened(codec) as cache:
            stored.append(report.seconds(lambda cache=cache: cache.store(tokens, live, model=MODEL)))
        files.append(sorted((folder / type(codec).__name__).rglob("*.safetensors")))
    with opened(Transform(QUALITY)) as ours, opened(TurboQuant(BITS, BITS)) as other:

        def from_ram(cache: PrefixCache) -> float:
            assert cache.match(tokens, model=MODEL).ram == len(tokens)
            return report.seconds(lambda: cache.fetch(tokens, model=MODEL))

        def from_ssd(cache: PrefixCache, own: list[Path]) -> float:
            cache.trim_to(0)
            report.forget_pages(own)
            assert cache.match(tokens, model=MODEL).ram == 0
            return report.seconds(lambda: cache.fetch(tokens, model=MODEL, promote=True))

        cases = list(zip((ours, other), files, strict=True))
        for case in cases:
            from_ssd(*case)
        ssd = report.in_turns(rounds, *(lambda _, case=case: from_ssd(*case) for case in cases))
        ram = report.in_turns(rounds, *(lambda _, case=case: from_ram(case[0]) for case in cases))
    nbytes = [sum(file.stat().st_size for file in own) for own in files]
    facts = zip(ram, ssd, stored, nbytes, strict=True)
    return {
        name: dict(zip(("ram", "ssd", "stored", "nbytes"), of, strict=True))
        for name, of in zip((OURS, OTHER), facts, strict=True)
    }


LENGTHS = {"full": (255, 300, 511, 1024, 4096), "quick": (255, 300, 511, 1024, 4096), "tiny": (300,)}


def lengths(scale: str) -> Iterator[Figure]:
    """What is stored of prompts of so many tokens, tails as they are, of one of Llama 3 8B's layers."""
    with report.scratch() as folder:
        data = transform_rows.basis_bytes(MODEL, 1, 1)
        Bases(folder).save(data)
        for tokens in LENGTHS[scale]:
            prompt = draw(tokens)(tokens)
            live = transform_rows.prompt_cache(Basis(data).groups, tokens)
            stored = []
            for codec in (Transform(QUALITY), TurboQuant(BITS, BITS)):
                with PrefixCache(ram="1GB", ssd_dir=None, codec=codec, basis_dir=folder) as cache:
                    stored.append(cache.store(prompt, live, model=MODEL).new_bytes / tokens)
            fp16 = 2 * CHANNELS
            yield Figure(
                f"a prompt of {tokens:,} tokens, of one of Llama 3 8B's layers: bytes a token with {OURS}",
                f"{stored[0]:,.0f} ({fp16 / stored[0]:.1f} x smaller than fp16)",
                "",
                "",
                None,
                {"ours": stored[0], "other": stored[1]},
                (Beside(OTHER, f"{stored[1]:,.0f} ({fp16 / stored[1]:.1f} x)", f"{stored[1] / stored[0]:.2g} x"),),
            )


# -- the basis ---------------------------------------------------------------------------------------------------------


def basis_size(scale: str) -> Iterator[Figure]:
    """Of a model of Llama 3 8B's shape, by how many of its layers are joined: from bases of one group and of two."""
    for joined in JOINED[scale]:
        (held, in_file), (held_of_two, in_file_of_two) = (_size(groups, joined) for groups in (1, 2))
        more = MODEL_LAYERS // joined - 1
        held, in_file = held + more * (held_of_two - held), in_file + more * (in_file_of_two - in_file)
        widened = 4 * joined * CHANNELS * transform_rows.group(0, joined).components(QUALITY)
        yield Figure(
            f"the basis of a model of Llama 3 8B's shape, groups of {joined * CHANNELS:,} channels",
            f"{held / 1e6:.0f} MB of RAM, {in_file / 1e6:.0f} MB in the file",
            "",
            f"while rows are coded by {OURS}, {widened / 1e6:.0f} MB more: one group's vectors in float32",
            None,
            {"ram": held, "file": in_file, "widened": widened},
        )


def _size(groups: int, joined: int) -> tuple[int, int]:
    """Bytes in RAM and of the file."""
    data = transform_rows.basis_bytes(MODEL, groups * joined, joined)
    return Basis(data).nbytes, len(data)


FIGURES = {
    "transform-cpu": rates,
    "transform-fetch": fetch,
    "transform-lengths": lengths,
    "transform-basis": basis_size,
}
