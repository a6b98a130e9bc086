"""index.db has no checksum of a row: each field of each kind of row, changed to a value that a cache might have written.

Whatever the index says, an answer is exact or a miss: tokens are proved by keys, a window's ranges by its key, a file by its
checksum and by the kind, key and namespace that it says it is of.
"""

from __future__ import annotations

import pytest

from prefixcache.ssd import NewerFormat

from .directories import (
    BRANCH,
    CODED,
    EXACT,
    PLAIN,
    STATE,
    TENANT,
    WINDOW,
    depth,
    execute,
    judge,
    opened,
    restored,
    rows_of,
    store,
)

ROWS = {
    "the first block": ("plain", 0, 0),
    "a block within": ("plain", 0, 2),
    "a tail": ("plain", 0, -1),
    "a window": ("window", 1, 1),
    "the last window": ("window", 1, 2),
    "a snapshot": ("state", 2, 0),
}
DEEP = '{"ranges":' + "[" * 100_000

FIELDS: dict[str, list[object]] = {
    "start": [0, 1 << 39],
    "length": [0, 512],
    "nbytes": [1, 1 << 22],
    "disk": [0, 1 << 39],
    "used": [0, 1 << 59],
    "hits": [1 << 39],
    "created": [-1e18, 1e18],
    "used_at": [-1e18, 1e18],
    "checksum": ["0" * 32],
}


def row_of(root, which):
    model, kind, place = ROWS[which]
    return rows_of(root, model, kind)[place]


def change(root, row, field, value):
    execute(root, (f"UPDATE image SET {field} = ? WHERE id = ?", [value, row]))


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_or_a_text_that_is_wrong_gives_no_wrong_answer(copies, field):
    each = copies()
    for which in ("a block within", "the last window", "a snapshot"):
        for value, root in zip(FIELDS[field], each, strict=False):
            change(root, row_of(root, which), field, value)
            judge(root)


@pytest.mark.parametrize(
    "extra",
    [
        "{}",
        "[]",
        "",
        '{"ranges":[]}',
        '{"ranges":[[[0,256]]]}',
        '{"ranges":[[[0,87]]]}',
        '{"ranges":[[[0,88]],[]]}',
        '{"ranges":5}',
        '{"ranges":{"a":"b"}}',
        '{"ranges":[[[0,1e400]]]}',
        '{"ranges":' + "9" * 5000 + "}",
        DEEP,
    ],
)
def test_a_window_with_other_ranges_is_out_of_reach(root, extra):
    change(root, row_of(root, "the last window"), "extra", extra)
    with opened(root) as cache:
        assert depth(cache, WINDOW) < 600
        store(cache, WINDOW)
        assert depth(cache, WINDOW) == 600


def test_a_window_whose_ranges_were_wrong_is_within_reach_again_after_a_store(root):
    change(root, row_of(root, "the last window"), "extra", '{"ranges":[[[0,87]]]}')
    judge(root)


@pytest.mark.parametrize("which", [which for which in ROWS if which != "the first block"])
def test_another_blocks_parent_gives_no_wrong_answer(copies, which):
    each = copies()
    for other in ("the first block", "a tail", "a window"):
        root = next(each)
        theirs = row_of(root, other)
        execute(
            root,
            f"UPDATE image SET parent = (SELECT key FROM image WHERE id = {theirs}) WHERE id = {row_of(root, which)}",
        )
        with opened(root) as cache:
            for kept in EXACT:
                depth(cache, kept)
                restored(cache, kept)


@pytest.mark.parametrize("which", ROWS)
def test_another_namespaces_number_gives_no_wrong_answer(copies, which):
    each = copies()
    for model, root in zip(("window", "state", "coded"), each, strict=False):
        execute(
            root,
            (
                "UPDATE image SET namespace = (SELECT id FROM namespace WHERE model = ?) WHERE id = ?",
                [model, row_of(root, which)],
            ),
        )
        for codec, ask in (("raw", EXACT), ("turboquant", (CODED,))):
            with opened(root, codec) as cache:
                for kept in ask:
                    depth(cache, kept)
                    restored(cache, kept)


def test_a_block_that_was_of_another_namespace_is_within_reach_again_after_a_store(root):
    execute(
        root,
        "UPDATE image SET namespace = (SELECT id FROM namespace WHERE model = 'window') "
        f"WHERE id = {row_of(root, 'a block within')}",
    )
    execute(
        root,
        "UPDATE image SET namespace = (SELECT id FROM namespace WHERE model = 'window') "
        f"WHERE id = {row_of(root, 'the first block')}",
    )
    judge(root)


@pytest.mark.parametrize("which", ROWS)
def test_a_wrong_key_or_kind_gives_no_wrong_answer(copies, which):
    each = copies()
    wrong = ["key = randomblob(16)", "kind = (kind + 1) % 3", "parent = randomblob(16)"]
    wrong += [f"key = (SELECT key FROM image WHERE id = {{{n}}})" for n in range(2)]
    for what in wrong:
        root = next(each)
        others = [row_of(root, other) for other in ("the first block", "a window") if other != which]
        execute(root, f"UPDATE OR REPLACE image SET {what.format(*others, *others)} WHERE id = {row_of(root, which)}")
        with opened(root) as cache:
            for kept in EXACT:
                depth(cache, kept)
                restored(cache, kept)


@pytest.mark.parametrize(
    "what", ["DELETE FROM image WHERE id = {}", "UPDATE image SET key = randomblob(16) WHERE id = {}"]
)
def test_a_file_whose_row_is_gone_is_accounted_for(root, what):
    execute(root, what.format(row_of(root, "a tail")))
    judge(root)


def test_a_row_that_claims_more_than_ram_has_is_mended(root):
    change(root, row_of(root, "a block within"), "nbytes", 1 << 39)
    judge(root)


def test_other_tokens_are_refused_by_the_key(copies):
    each = copies()
    for change_of_tokens in (
        "UPDATE tokens SET tokens = zeroblob(length(tokens)) WHERE id = {row}",
        "UPDATE tokens SET tokens = (SELECT tokens FROM tokens WHERE id = {other}) WHERE id = {row}",
        "UPDATE tokens SET tokens = substr(tokens, 9) || substr(tokens, 1, 8) WHERE id = {row}",
        "DELETE FROM tokens WHERE id = {row}",
    ):
        root = next(each)
        row, other = row_of(root, "a block within"), row_of(root, "the first block")
        execute(root, change_of_tokens.format(row=row, other=other))
        judge(root)


def test_a_tick_near_the_bound_does_not_stop_the_cache(root):
    change(root, row_of(root, "a tail"), "used", (1 << 60) - 1)
    with opened(root) as cache:
        for kept in EXACT:
            depth(cache, kept)
        fresh = PLAIN._replace(tokens=[77, *PLAIN.tokens])
        store(cache, fresh)
        assert depth(cache, fresh) == 601


NAMESPACE = {
    "root": "randomblob(16)",
    "model": "'another'",
    "codec": "replace(codec, 'raw', 'turboquant')",
    "layout": "replace(layout, '8', '9')",
}


@pytest.mark.parametrize("field", NAMESPACE)
def test_a_wrong_namespace_is_rebuilt_from_the_files(root, field):
    execute(root, f"UPDATE namespace SET {field} = {NAMESPACE[field]} WHERE model = 'plain'")
    verdict = judge(root)
    assert verdict.reasons[0].startswith("the index is broken")
    for kept in (PLAIN, BRANCH, WINDOW, STATE):
        assert verdict.depths[kept.name] == len(kept.tokens)


@pytest.mark.parametrize(
    "layout", ["[]", "{}", "null", '{"kinds":[],"layers":[0]}', '{"kinds":[5],"layers":[0]}', "[" * 100_000]
)
def test_a_namespace_that_an_attacker_described_is_out_of_reach(root, layout):
    describe(root, "plain", layout)
    with opened(root) as cache:
        for kept in (WINDOW, STATE):
            assert depth(cache, kept) == len(kept.tokens)


def test_a_class_whose_module_ends_the_process_is_out_of_reach(root):
    ((text,),) = execute(root, "SELECT layout FROM namespace WHERE model = 'plain' LIMIT 1")[0]
    describe(root, "plain", text.replace("models.cache.KVCache", "models.olmo.KVCache"))
    with opened(root) as cache:
        assert depth(cache, WINDOW) == 600


def describe(root, model, layout):
    execute(root, ("UPDATE namespace SET layout = ? WHERE model = ?", [layout, model]))


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 0",
        "PRAGMA user_version = -1",
        "DELETE FROM meta",
        "DROP TABLE meta",
        "UPDATE meta SET value = x'ff' WHERE name = 'clean'",
        "INSERT INTO meta VALUES ('more', zeroblob(100000))",
        "DROP TABLE tokens",
        "CREATE TABLE other (a)",
        "ALTER TABLE image RENAME COLUMN hits TO misses",
    ],
)
def test_tables_that_say_of_themselves_what_is_not_so_are_rebuilt_or_make_no_difference(root, statement):
    execute(root, statement)
    verdict = judge(root)
    assert {kept.name: len(kept.tokens) for kept in (PLAIN, BRANCH, WINDOW, STATE)}.items() <= verdict.depths.items()


def test_what_looks_like_a_newer_release_is_refused(root):
    execute(root, "PRAGMA user_version = 2")
    with pytest.raises(NewerFormat, match=r"index\.db.*upgrade prefixcache"):
        opened(root)


TRIGGERS = {
    "a trigger that forgets tokens": "CREATE TRIGGER t AFTER INSERT ON image BEGIN DELETE FROM tokens; END",
    "a trigger that lies of sizes": "CREATE TRIGGER t AFTER UPDATE ON meta BEGIN UPDATE image SET disk = 0; END",
}


@pytest.mark.parametrize("what", TRIGGERS)
def test_statements_that_somebody_left_in_the_database_give_no_wrong_answer(root, what):
    execute(root, TRIGGERS[what])
    with opened(root) as cache:
        for kept in EXACT:
            depth(cache, kept)
    with opened(root) as cache:
        for kept in (*EXACT, TENANT):
            depth(cache, kept)
