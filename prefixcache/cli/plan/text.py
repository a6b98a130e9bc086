"""How `prefixcache plan` writes its facts: sentences, tables and notes.

Nothing is computed here but what text needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from prefixcache.cli.tables import NONE, Grid, table
from prefixcache.cli.text import duration, foreign, many, size

CHOSEN = "*"  # beside the size that is recommended
TURBOQUANT = "turboquant:4"  # what transform is compared with
DEFAULTS = {"policy": "lru", "ssd_admission": "always", "hot": "auto"}  # left out where a size is named
NOTABLE = 0.99  # of the mean time to first token: what another share for hot prompts must get below to be told
YEAR = 365.25 * 86_400  # seconds
REMEDIES = {  # of what a size can't be lived with for
    "wear": 'Less is written with ssd_admission="second" (compare it: --ssd-admission always,second), with less SSD or none, '
    'with more RAM, and never more than with spill="drop", which these numbers assume.',
    "prompt": "A prompt that doesn't fit into RAM is kept in part: give more RAM, or a codec that takes less.",
    "memory": "Give sizes that a Mac has room for (--ram), or a codec that takes less.",
}

Facts = dict[str, Any]


def screen(facts: Facts) -> list[Table | Text]:
    """Return what is printed, from top to bottom: the advice, what leads to it, the model."""
    parts: list[Table | Text] = []
    if facts["trace"]:
        first, *rest = advice_lines(facts)
        parts += [foreign(first, "bold"), *map(foreign, rest), foreign(""), foreign(trace_line(facts), "dim")]
    if facts["fleet"]:
        parts += _drawn(_fleet_grids(facts), _fleet_notes(facts))
    if facts["trace"]:
        advised = [_front_grid(facts), _waiting_grid(facts), _hot_grid(facts)] if chosen(facts) else []
        parts += [*_drawn([*_hit_grids(facts), *advised], _trace_notes(facts)), foreign("")]
    parts += map(foreign, [_model_line(facts), *_transform_lines(facts)])
    return parts + _drawn([_codec_grid(facts), _mac_grid(facts)], _model_notes(facts))


def _drawn(grids: list[Grid], notes: list[str]) -> list[Table | Text]:
    return [*map(table, grids), *(foreign(note, "dim") for note in notes)]


# -- numbers ----------------------------------------------------------------------------------------------------------


def short(nbytes: int) -> str:
    """Return a size without zeros that say nothing: "24 GB", "1.5 GB", "0"."""
    number, _, unit = size(nbytes).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}" if nbytes else "0"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def count(number: int) -> str:
    """Write three digits and k, M or G."""
    return f"{number:,}" if number < 1000 else size(number).replace("kB", "k").removesuffix("B")


def years(value: float | None, written: float | None) -> str:
    if value is None:
        return "never" if written == 0 else NONE
    return "> 100" if value > 100 else f"{value:.1f}" if value >= 0.1 else "< 0.1"


def sizes_of(cell: Facts) -> str:
    """Name a size: "24 GB RAM + 120 GB SSD"; policies where they are not the defaults."""
    sizes = " + ".join(f"{short(cell[tier])} {tier.upper()}" for tier in ("ram", "ssd") if cell[tier])
    policies = ", ".join(policies_of(cell))
    return f"{sizes} ({policies})" if policies else sizes


def policies_of(cell: Facts) -> list[str]:
    """Name the policies of a size where they are not the defaults."""
    return [f"hot {value}" if name == "hot" else value for name, value in _policies(cell).items()]


def settings_of(cell: Facts) -> str:
    """Return the same as settings are written: `ram="24GB", ssd="120GB"`."""
    sizes = {tier: short(cell[tier]).replace(" ", "") for tier in ("ram", "ssd") if cell[tier]}
    return ", ".join(f'{name}="{value}"' for name, value in {**sizes, **_policies(cell)}.items())


def _policies(cell: Facts) -> dict[str, str]:
    return {name: _setting(cell[name]) for name, default in DEFAULTS.items() if cell[name] != default}


def _setting(value: str | int) -> str:
    """Write a word as it is, a size as settings have it."""
    return value if isinstance(value, str) else short(value).replace(" ", "")


def chosen(facts: Facts) -> Facts | None:
    """Return the cell that is recommended."""
    best = facts["sizes"]["recommendation"]
    return facts["sizes"]["cells"][best["cell"]] if best else None


def front(facts: Facts) -> list[Facts]:
    """Return the cells that no cheaper one equals, and the one that is recommended, cheapest first."""
    cells, best = facts["sizes"]["cells"], facts["sizes"]["recommendation"]
    indices = {*facts["sizes"]["front"], *([best["cell"]] if best else [])}
    return [cells[i] for i in sorted(indices, key=lambda i: (cells[i]["cost"], i))]


def _marked(facts: Facts, cell: Facts) -> str:
    return sizes_of(cell) + (f" {CHOSEN}" if cell is chosen(facts) else "")


def _memory(nbytes: int) -> str:
    return f"{nbytes >> 30} GB"  # as memory is sold


# -- the model --------------------------------------------------------------------------------------------------------


def _model_line(facts: Facts) -> str:
    model = facts["model"]
    kinds = [
        f"{layer['caches']} {layer['kind']}" + (f" of {layer['window']:,}" if layer["window"] else "")
        for layer in model["layers"]
    ]
    return (
        f"{model['name']}: {model['parameters'] / 1e9:.3g} billion parameters, {size(model['weights_at_4_bits'])} at "
        f"4 bits; layer caches: {', '.join(kinds)}; {model['dtype']}, "
        f"{size(facts['codecs'][0]['live_bytes_per_token'])} a token in a live cache"
    )


def _codec_grid(facts: Facts) -> Grid:
    headings = ["codec", "bytes\na token", "smaller", "tokens\na GB"]
    headings += [f"{prompt['tokens'] // 1024}k\nprompt" for prompt in facts["codecs"][0]["prompts"]]
    rows = []
    for codec in facts["codecs"]:
        smaller = NONE if codec["ratio"] is None else f"{codec['ratio']:.2f} x"
        row = [codec["codec"], size(round(codec["bytes_per_token"])), smaller, count(codec["tokens_per_gb"])]
        rows.append(row + [size(prompt["bytes"]) for prompt in codec["prompts"]])
    if _has_boundaries(facts):
        headings.append("each\nboundary")
        for row, codec in zip(rows, facts["codecs"], strict=True):
            row.append(size(codec["windows_bytes"] + codec["snapshot_bytes"]))
    return Grid(headings, rows)


def _has_boundaries(facts: Facts) -> bool:
    return any(codec["windows_bytes"] or codec["snapshot_bytes"] for codec in facts["codecs"])


def _mac_grid(facts: Facts) -> Grid:
    headings = ["Mac with", 'ram=\n"auto"', "room\nbeside\nweights"]
    headings += [_narrow(codec["codec"]) for codec in facts["codecs"]]
    rows = []
    for mac in facts["macs"]:
        room = [size(mac[name]) if mac[name] else NONE for name in ("auto", "room")]
        tokens = [count(codec["tokens"]) if codec["tokens"] else NONE for codec in mac["tokens"]]
        rows.append([_memory(mac["memory"]), *room, *tokens])
    return Grid(headings, rows)


def _narrow(codec: str) -> str:
    """Return a codec's name in lines, so that all columns fit in 80."""
    name, _, numbers = codec.partition(":")
    name = name.replace("turboquant", "turbo-\nquant").replace("transform", "trans-\nform")
    return f"{name}\n{numbers}" if numbers else name


def _model_notes(facts: Facts) -> list[str]:
    notes = [
        "Bytes a token: of a long prompt's whole blocks, headers included. Tokens a GB (10^9 bytes): of RAM, with the tree's "
        "share. Prompts: all images of one, stored once.",
        "Room: of the memory that macOS lets the GPU have (2/3, from 36 GB on 3/4), what 4-bit weights leave; programs and "
        'running requests need some of it. The setting ram="auto" takes a quarter of that memory, and less where the weights '
        "leave less.",
    ]
    if _has_boundaries(facts):
        notes.append(
            "Each boundary: windows and snapshots, at most, that a prompt's end keeps beside its tokens' bytes."
        )
    for codec in facts["codecs"]:
        if codec["raw_layers"]:
            notes.append(f"{codec['codec']}: keys or values of {many(len(codec['raw_layers']), 'layer')} are kept raw.")
    return notes + [note for codec in facts["codecs"] if codec["transform"] for note in _transform_notes(codec)]


def _transform_notes(codec: Facts) -> list[str]:
    name, transform = codec["codec"], codec["transform"]
    taken = f"{size(transform['basis_bytes'])} of the RAM, and bases may take a quarter of it"
    if not transform["layers"]:
        return [f"{name}: no layer of this model can be transformed, so the sizes are {TURBOQUANT}'s."]
    if transform["estimate"]:
        return [
            f"{name}: an estimate, as there is no basis of this model: as many bits a value as SmolLM2-135M's rows have. "
            f"prefixcache calibrate MODEL makes one, with the model's own numbers; it takes about {taken}."
        ]
    return [f"{name}: by basis {transform['basis'][:8]}, which takes {taken}."]


def _transform_lines(facts: Facts) -> list[str]:
    """Return how many more tokens fit than with TurboQuant, where both are compared."""
    tokens = {codec["codec"]: codec["tokens_per_gb"] for codec in facts["codecs"]}
    return [
        f"{codec['codec']} keeps {codec['tokens_per_gb'] / tokens[TURBOQUANT]:.1f} times as many tokens in a GB as "
        f"{TURBOQUANT}{' (an estimate)' * codec['transform']['estimate']}"
        for codec in facts["codecs"]
        if TURBOQUANT in tokens and codec["transform"] and codec["transform"]["layers"]
    ]


# -- the trace --------------------------------------------------------------------------------------------------------


def trace_line(facts: Facts) -> str:
    trace, sizes = facts["trace"], facts["sizes"]
    return (
        f"{trace['file']}: {many(trace['requests'], 'request')} in {duration(trace['seconds'])}, "
        f"{count(trace['tokens'])} tokens of prompts ({count(round(trace['mean_tokens']))} each, the longest "
        f"{count(trace['longest'])}); all of its state with {facts['codec']} takes {size(sizes['working_set'])}"
    )


def advice_lines(facts: Facts) -> list[str]:
    """Return the recommendation first, then what it is made of, and what stands against it."""
    lines, trace, context = _recommendation(facts), facts["trace"], facts["model"]["context"]
    if trace["beyond_context"]:
        lines.append(
            f"{trace['beyond_context']:,} of {many(trace['requests'], 'prompt')} are longer than the model's context of "
            f"{context:,} tokens (the longest has {trace['longest']:,}). All numbers here count them, but the model's "
            "answers to them are not to be relied on: give the model that is to read them, or a trace without them."
        )
    return lines


def _recommendation(facts: Facts) -> list[str]:
    sizes, assumed, cell = facts["sizes"], facts["assumed"], chosen(facts)
    possible, without = sizes["possible"], sizes["without"]["ttft"]
    if not possible["hit_tokens"]:
        if any(layer["kind"] == "snapshot" for layer in facts["model"]["layers"]):
            return [
                "No prompt goes on from where one that was stored ended, and this model has state that can't be cut: nothing "
                "is hit. Store what prompts share by itself (prefixcache warm)."
            ]
        return ["No prompt comes back: a prefix cache of any size saves nothing of this trace."]
    if cell is None:
        return [
            "None of these sizes keeps a prompt until it comes back; an endless cache hits "
            f"{percent(possible['hit_rate'])} of the tokens. Try more RAM."
        ]
    best = sizes["recommendation"]
    ttft, machine = cell["ttft"][0], best["machine"]
    needs = "No Mac has room for all of it"
    if machine["memory"] is not None:
        needs = f"It needs a Mac with {_memory(machine['memory'])}, whose GPU may have {size(machine['gpu'])}"
    says = best["says"]
    if best["obstacles"]:
        says = f"None of these sizes can be lived with. {says}, but {_against(facts, best)}."
    lines = [
        says,
        f"{needs}: {size(machine['weights'])} of weights at 4 bits, {size(machine['live'])} for one live prompt of "
        f"{count(machine['live_tokens'])} tokens, {size(machine['ram'])} for this cache.",
        f"{percent(cell['hit_rate'])} of the prompts' tokens are hits ({percent(possible['hit_rate'])} with an endless "
        f"cache): {duration(cell['prefill_seconds_saved'])} of {duration(possible['prefill_seconds'])} prefill saved at "
        f"{assumed['prefill_rate']:,.0f} tokens/s; time to first token {duration(ttft['p50'])} at the median and "
        f"{duration(ttft['p99'])} at the 99th percentile (without a cache {duration(without['p50'])} and "
        f"{duration(without['p99'])}).",
    ]
    if written := cell["written_bytes_per_day"]:
        lasts = years(cell["tbw_years"], written)
        lines.append(f"{size(round(written))} written a day: {short(assumed['tbw'])} last {lasts} years.")
    lines.append(_hot_line(sizes["hot"], cell))
    if leases := sizes["leases"]:
        lines.append(_lease_line(leases))
    if beyond := best["beyond"]:
        lines.append(f"Not advised: {beyond['says']}, but {_against(facts, beyond)}.")
    reasons = {*best["obstacles"], *(beyond["obstacles"] if beyond else [])}
    return lines + [remedy for reason, remedy in REMEDIES.items() if reason in reasons]


def _hot_line(hot: Facts, cell: Facts) -> str:
    """Return what hot prompts give at the advised size, and which share of the RAM is worth more, if one is."""
    best = hot["cells"][hot["best"]]
    line = (
        f"{_hot_share(cell)}: {percent(cell['hot_hit_rate'])} of the tokens have nothing to decode, which saves "
        f"{duration(cell['decode_seconds_saved'])}."
    )
    before, after = cell["ttft"][0]["mean"], best["ttft"][0]["mean"]
    if after < NOTABLE * before:
        line += (
            f" {_hot_share(best)} waits less: the mean time to first token is {duration(after)} instead of "
            f"{duration(before)}, and {percent(best['hit_rate'])} of the tokens are hits."
        )
    return line


def _lease_line(leases: Facts) -> str:
    part = f"the first {leases['tokens']:,} tokens of each prompt" if leases["tokens"] else "each prompt"
    more = leases["prefilled_tokens"] - leases["prefilled_tokens_without"]
    return (
        f"With {part} leased for {duration(leases['seconds'])} {leases['prefilled_tokens']:,} tokens are prefilled, without "
        f"leases {leases['prefilled_tokens_without']:,}: leases {'cost' if more >= 0 else 'save'} {abs(more):,}."
    )


def _hot_share(cell: Facts) -> str:
    """Write the setting `hot` of a size, and what it is of the RAM where that isn't said."""
    taken = f" ({short(cell['hot_bytes'])} of the RAM)" if isinstance(cell["hot"], str) else ""
    return f'hot="{_setting(cell["hot"])}"{taken}'


def _against(facts: Facts, advised: Facts) -> str:
    """Return why a size can't be lived with."""
    sizes, tbw = facts["sizes"], facts["assumed"]["tbw"]
    cell = sizes["cells"][advised["cell"]]
    reasons: dict[str, Callable[[], str]] = {
        "wear": lambda: f"{short(tbw)} of writes last {duration(YEAR * cell['tbw_years'])}",
        "prompt": lambda: (
            f"the longest prompt takes {size(sizes['recommendation']['longest_bytes'])}, more than this RAM"
        ),
        "memory": lambda: "no Mac has room for it",
    }
    return ", and ".join(reasons[name]() for name in advised["obstacles"])


def _hit_grids(facts: Facts) -> list[Grid]:
    """Return hit rates, RAM downwards and SSD to the right: one grid for each policy and admission."""
    cells, best = facts["sizes"]["cells"], chosen(facts)
    rams, ssds = (sorted({cell[tier] for cell in cells}) for tier in ("ram", "ssd"))
    kinds = dict.fromkeys((c["policy"], c["ssd_admission"], c["hot"]) for c in cells if c["ssd"] or len(ssds) == 1)
    grids = []
    for policy, admission, hot in kinds:
        rates = {
            (c["ram"], c["ssd"]): f"{100 * c['hit_rate']:.1f}" + (CHOSEN if c is best else "")
            for c in cells
            if (c["policy"], c["hot"]) == (policy, hot) and (c["ssd_admission"] == admission or not c["ssd"])
        }
        rows = [[short(ram), *(rates.get((ram, ssd), NONE) for ssd in ssds)] for ram in rams]
        columns = (f"{short(ssd)}\nSSD" if ssd else "no\nSSD" for ssd in ssds)
        named = ", ".join([policy, admission, *([f"hot {_setting(hot)}"] if hot != DEFAULTS["hot"] else [])])
        grids.append(Grid([f"hit rate, % of tokens\n{named}", *columns], rows))
    return grids


def _front_grid(facts: Facts) -> Grid:
    """Return what money buys: the sizes that no cheaper one equals."""
    headings = ["size", "cost", "hit\nrate", "Belady's\nbound", "of what is\npossible", "prefill\nsaved"]
    rows = []
    for cell in front(facts):
        shares = [percent(cell[name]) for name in ("hit_rate", "bound", "of_possible")]
        rows.append([_marked(facts, cell), f"{cell['cost']:,.0f}", *shares, duration(cell["prefill_seconds_saved"])])
    return Grid(headings, rows)


def _waiting_grid(facts: Facts) -> Grid:
    """Return times to first token and wear, of the sizes on the front, in the order that they were tried."""
    sizes, tbw = facts["sizes"], short(facts["assumed"]["tbw"])
    rows = [["no cache", NONE, *_percentiles(sizes["without"]["ttft"]), NONE, NONE]]
    for cell in sizes["cells"]:
        if not cell["on_front"] and cell is not chosen(facts):
            continue
        written = cell["written_bytes_per_day"]
        name = _marked(facts, cell)
        wear = [NONE if written is None else size(round(written)), years(cell["tbw_years"], written)]
        for ttft in cell["ttft"] if cell["ssd"] else cell["ttft"][:1]:
            rate = f"{short(ttft['ssd_rate'])}/s" if cell["ssd"] else NONE
            rows.append([name, rate, *_percentiles(ttft), *wear])
            name, wear = "", ["", ""]
    headings = ["time to\nfirst token", "SSD\nreads", "p50", "p90", "p99", "written\na day", f"{tbw} last,\nyears"]
    return Grid(headings, rows)


def _hot_grid(facts: Facts) -> Grid:
    """Return what hot prompts give at the advised size, by their share of its RAM."""
    rows = []
    for cell in facts["sizes"]["hot"]["cells"]:
        name = _setting(cell["hot"]) + (f" {CHOSEN}" if cell["hot"] == (chosen(facts) or {})["hot"] else "")
        given = [
            short(cell["hot_bytes"]),
            f"{cell['hot_hits']:,}",
            *(percent(cell[n]) for n in ("hot_hit_rate", "hit_rate")),
        ]
        ttft, written = cell["ttft"][0], cell["written_bytes_per_day"]
        times = [duration(seconds) for seconds in (cell["decode_seconds_saved"], ttft["mean"], ttft["p50"])]
        rows.append([name, *given, *times, NONE if written is None else size(round(written))])
    headings = ["hot", "of the\nRAM", "hot\nhits", "hot\ntokens", "hit\nrate", "decoding\nsaved"]
    return Grid([*headings, "mean time to\nfirst token", "p50", "written\na day"], rows)


def _percentiles(ttft: Facts) -> list[str]:
    return [duration(ttft[name]) for name in ("p50", "p90", "p99")]


def _trace_notes(facts: Facts) -> list[str]:
    assumed, sizes, trace = facts["assumed"], facts["sizes"], facts["trace"]
    ssds = ", ".join(f"{short(rate)}/s" for rate in assumed["ssd_rates"])
    notes = [
        f"{CHOSEN} What is advised: of the sizes that can be lived with (the SSD lasts a year, the longest prompt fits into "
        "RAM, a Mac has room) and that no cheaper one equals, the one up to which more money brings at least half of the "
        f"hits that it brings on the average. Cost: {assumed['ram_price']:g} a GB of RAM, "
        f"{assumed['ssd_price']:g} a GB of SSD; only their ratio matters.",
        f"Time to first token: what is not hit at {assumed['prefill_rate']:,.0f} tokens/s, plus reading at {ssds}, plus "
        f"decoding at {short(assumed['decode_rate'])}/s. Nobody queues, and the SSD's writer keeps up.",
        "Hit rates are of all tokens of all prompts, from a cache that begins empty. What is possible: a RAM that nothing "
        "leaves; Belady's bound: what a cache of this size that knows the future could hit, in the trace's blocks.",
    ]
    for rate, pays in zip(assumed["ssd_rates"], sizes["reading_pays"], strict=True):
        if not pays:
            notes.append(
                f"At {short(rate)}/s a token is computed sooner than it is read: hits from such an SSD cost time."
            )
    cells, best = sizes["cells"], chosen(facts)
    if best and len(cells) > 1 and best is min(cells, key=lambda cell: cell["cost"]):
        notes.append(
            "What is advised is the cheapest size that was tried: a smaller one may do. Try some with --ram and --ssd."
        )
    if dropped := sum(cell["dropped"] > 0 for cell in cells):
        notes.append(f"In {many(dropped, 'size')} of these RAM was too small to hand all of its images on to the SSD.")
    if trace["torn"]:
        notes.append("The trace ends within a line or its gzip stream; what was cut off is left out.")
    if trace["backwards"]:
        notes.append(f"{many(trace['backwards'], 'timestamp')} went back; they count as the time before.")
    if trace["seconds"] <= 0:
        notes.append("The trace takes no time, so bytes a day can't be told.")
    return notes


# -- a fleet ----------------------------------------------------------------------------------------------------------


def _fleet_grids(facts: Facts) -> list[Grid]:
    """Return of each size of the machines what is hit and how long that takes, and what the remote tier does."""
    grids, machines = [], facts["fleet"]["machines"]
    for rows in facts["fleet"]["sizes"]:
        named = list(zip(_fleet_names(rows), rows, strict=True))
        headings = [
            f"{machines} machines,\neach {sizes_of(rows[0])}",
            "hit\nrate",
            "in\nRAM",
            "from\nSSD",
            "from\nremote",
        ]
        hits = []
        for name, row in named:
            shares = [f"{100 * row[f'{part}hit_rate']:.1f}" for part in ("", "ram_", "ssd_", "remote_")]
            hits.append([name, *shares, *_percentiles(row["ttft"][0])])
        grids.append(Grid([*headings, "p50", "p90", "p99"], hits))
        headings = ["the remote tier", "sent", "sent a token\nused again", "read", "round\ntrips", "images\nevicted"]
        grids.append(Grid(headings, [_remote_row(name, row) for name, row in named if row["remote_admission"]]))
    return grids


def _remote_row(name: str, row: Facts) -> list[str]:
    again = row["sent_per_reused_token"]
    nbytes = [size(row["sent_bytes"]), NONE if again is None else size(round(again)), size(row["remote_read_bytes"])]
    return [name, *nbytes, f"{row['trips']:,}", f"{row['remote_evicted']:,}"]


def _fleet_names(rows: list[Facts]) -> list[str]:
    fleets = (f"{row['routing']}, {row['remote_admission'] or 'no remote'}" for row in rows[2:])
    return ["one machine", "one with all of it", *fleets]


def _fleet_notes(facts: Facts) -> list[str]:
    fleet, prefill = facts["fleet"], facts["assumed"]["prefill_rate"]
    limit = "no limit" if fleet["remote"] is None else f"a limit of {short(fleet['remote'])}"
    notes = [
        "Hit rates are % of all tokens of all prompts. One machine serves all requests with the RAM and SSD of one, the next "
        f"with {fleet['machines']} times as much. The remote tier has {limit}. Times to first token have its round trips of "
        f"{1000 * fleet['rtt']:g} ms and its reads at {short(fleet['rate'])}/s in them; no request waits for what is sent.",
        "Sticky: all requests of a session go to one machine. By its blocks the trace has "
        f"{many(fleet['sessions'], 'session')}; the largest has {percent(fleet['largest_session'])} of the requests.",
    ]
    if not fleet["reading_pays"]:
        notes.append(
            f"At {short(fleet['rate'])}/s a token is computed sooner than it comes from the remote tier (at {prefill:,.0f} "
            "tokens/s), so nothing is read from it."
        )
    return notes
