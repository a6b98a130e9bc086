"""What the cache relies on: writes, deletions, touches, reads, and what they report."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from prefixcache import keys
from prefixcache.ssd import Cancelled, NamespaceRow, SsdError
from tests.inside import directory_of
from tests.waiting import until

from .images import ROOT, SPACE, chain, gate, hold, make, path_of


@pytest.mark.parametrize("kind", ["rows", "window", "snapshot"])
def test_what_is_written_is_read_back_bit_for_bit(ssd, root, kind):
    entry, image = make(1, kind=kind, start=512)
    (stored,) = ssd.put((entry, image))
    assert ssd.holds(stored, image)
    assert path_of(root, entry).read_bytes() == image.data.tobytes()
    assert stored.disk == path_of(root, entry).stat().st_blocks * 512
    ssd.check_integrity()


def test_everything_about_an_entry_survives_a_restart(open_tier):
    ssd = open_tier()
    pairs = [*chain(3, used=7), make(50, kind="window", start=256), make(51, kind="snapshot", start=300, count=44)]
    stored = ssd.put(*pairs)
    ssd.close()
    again = open_tier()
    assert sorted(again.entries()) == sorted(stored)
    assert again.namespaces() == [SPACE]
    assert all(again.holds(entry, image) for entry, (_, image) in zip(stored, pairs, strict=True))
    again.check_integrity()


def test_entries_come_parents_first(open_tier):
    ssd = open_tier()
    pairs = chain(40)
    ssd.put(*reversed(pairs))
    seen = {ROOT}
    for entry in ssd.entries():
        assert entry.parent in seen
        seen.add(entry.key)


def test_blocks_that_were_written_before_their_parents_come_after_them(ssd):
    pairs = [*chain(40), make(70, kind="window", parent=chain(3)[2][0].key, start=512)]
    lost = make(71, kind="snapshot", parent=b"x" * 32, start=256)
    for pair in (lost, *reversed(pairs)):
        ssd.put(pair)
    seen, last = {ROOT}, None
    for last in ssd.entries():
        assert last.parent in seen or last.address == lost[0].address
        seen.add(last.key)
    assert len(seen) == 1 + len(pairs) + 1
    assert last.address == lost[0].address


def test_token_ids_beyond_32_bits_and_negative_ones_survive(open_tier):
    import numpy as np

    from prefixcache.image_format import Blueprint, HeaderFields, Spec
    from prefixcache.ssd import Entry

    tokens = np.array([-(2**63), -1, 0, 2**31, 2**63 - 1], "<i8")
    key = keys.chain(ROOT, tokens.tobytes())
    meta = HeaderFields("rows", key.hex(), ROOT.hex(), ROOT.hex(), "tiny", "{}", "{}", 0)
    draft = Blueprint(meta, [Spec("tokens", "I64", (5,))]).draft()
    draft.tensors["tokens"][:] = tokens
    image = draft.seal()
    ssd = open_tier()
    ssd.put((Entry("rows", key, ROOT, ROOT, 0, tokens.tobytes(), image.nbytes, image.checksum), image))
    ssd.close()
    assert next(open_tier().entries()).tokens == tokens.tobytes()


def test_namespaces_are_kept_apart(ssd):
    other = NamespaceRow(b"o" * 32, "other", "{}", "{}", 1.7e9)
    first, second = make(1), make(1, space=other, parent=other.root)
    assert ssd.write(first[0], SPACE, first[1])
    assert ssd.write(second[0], other, second[1])
    assert ssd.flush(10)
    assert ssd.namespaces() == [SPACE, other]
    assert {entry.namespace for entry in ssd.entries()} == {ROOT, other.root}


def test_a_deletion_takes_row_file_and_account(ssd, root):
    before = ssd.used
    stored = ssd.put(*chain(5))
    ssd.delete(stored[2:])
    assert ssd.flush(10)
    assert {entry.address for entry in ssd.entries()} == {entry.address for entry in stored[:2]}
    assert not any(path_of(root, entry).exists() for entry in stored[2:])
    ssd.delete(stored[:2])
    ssd.flush(10)
    ssd.check_integrity()
    assert ssd.used - before < 200_000  # the index and the folders have grown


def test_a_queued_deletion_counts_at_once(ssd):
    stored = ssd.put(*chain(3))
    before = ssd.used
    ssd.delete(stored)
    assert ssd.used <= before - sum(entry.disk for entry in stored) + 200_000


def test_deleting_twice_and_what_never_was_changes_nothing_else(ssd):
    stored = ssd.put(*chain(3))
    ssd.delete(stored[:1])
    ssd.delete(stored[:1])
    ssd.flush(10)
    ssd.delete([*stored[:1], make(77)[0]])
    assert ssd.flush(10)
    ssd.check_integrity()
    assert ssd.stats().files == 2


def test_deleting_a_waiting_write_cancels_it(ssd, monkeypatch):
    event = hold(monkeypatch, ssd)
    entry, image = make(1)
    assert ssd.write(entry, SPACE, image)
    ssd.delete([entry])
    event.set()
    assert ssd.flush(10)
    errors = {reported.address: error for reported, error in ssd.reports}
    assert isinstance(errors[entry.address], Cancelled)
    assert len(ssd.reports) == 2
    assert ssd.stats().files == 1
    ssd.check_integrity()


def test_deleting_a_write_that_is_under_way_deletes_its_file(ssd, monkeypatch, root):
    event = gate(monkeypatch, ssd)
    entry, image = make(1)
    assert ssd.write(entry, SPACE, image)
    until(lambda: ssd.stats().queued_files == 0)
    ssd.delete([entry])
    event.set()
    assert ssd.flush(10)
    assert ssd.reports[0][1] is None
    assert not path_of(root, entry).exists()
    ssd.check_integrity()


def test_deleting_and_writing_again_keeps_the_new_one(ssd, monkeypatch):
    entry, image = make(1)
    (stored,) = ssd.put((entry, image))
    event = hold(monkeypatch, ssd)
    ssd.delete([stored])
    assert ssd.write(entry, SPACE, image)
    event.set()
    assert ssd.flush(10)
    assert ssd.holds(stored, image)
    ssd.check_integrity()


def test_writing_the_same_again_is_acknowledged_without_writing(ssd, root):
    entry, image = make(1)
    (stored,) = ssd.put((entry, image))
    inode = path_of(root, entry).stat().st_ino
    (again,) = ssd.put((entry, image))
    assert again == stored._replace(used_at=again.used_at)
    assert path_of(root, entry).stat().st_ino == inode
    ssd.check_integrity()


def test_other_content_under_the_same_key_replaces_the_file(ssd):
    entry, image = make(1)
    ssd.put((entry, image))
    _, other = make(1, size=9000)
    (stored,) = ssd.put((entry, other))
    assert stored.checksum == other.checksum
    assert ssd.holds(stored, other)
    ssd.check_integrity()


def test_a_write_that_is_replaced_in_the_queue_is_reported_cancelled(ssd, monkeypatch):
    event = hold(monkeypatch, ssd)
    entry, image = make(1)
    assert ssd.write(entry, SPACE, image)
    assert ssd.write(entry, SPACE, image)
    event.set()
    assert ssd.flush(10)
    outcomes = [error for reported, error in ssd.reports if reported.address == entry.address]
    assert [type(outcome) for outcome in outcomes] in ([Cancelled, type(None)], [type(None), Cancelled])


def test_the_queue_takes_no_more_than_its_bytes(open_tier, monkeypatch):
    ssd = open_tier(queue_bytes=30_000)
    event = hold(monkeypatch, ssd)  # 8 kB
    assert ssd.write(make(1)[0], SPACE, make(1)[1])
    assert ssd.write(make(2)[0], SPACE, make(2)[1])
    assert not ssd.write(make(3, size=20_000)[0], SPACE, make(3, size=20_000)[1])
    assert ssd.stats().dropped == 1
    event.set()
    assert ssd.flush(10)
    assert ssd.stats().queued_bytes == 0
    assert ssd.write(make(4, size=90_000)[0], SPACE, make(4, size=90_000)[1])  # alone, it may be larger
    assert ssd.flush(10)
    ssd.check_integrity()


def test_touches_reach_the_index_coalesced(open_tier):
    ssd = open_tier()
    first, second = ssd.put(*chain(2, used=5))
    ssd.touch([("rows", first.key, 10, 3), ("rows", second.key, 11, 0)])
    ssd.touch([("rows", first.key, 12, 4)])
    ssd.touch([("rows", first.key, 9, 0)])
    assert ssd.max_tick() == 12
    ssd.close()
    again = open_tier()
    assert [(entry.used, entry.hits) for entry in again.entries()] == [(12, 7), (11, 0)]
    assert again.max_tick() == 12
    again.touch([("rows", first.key, 13, 1)])
    again.flush(10)
    assert [(entry.used, entry.hits) for entry in again.entries()] == [(13, 8), (11, 0)]


def test_the_time_of_use_is_set_by_a_write_and_by_a_touch(ssd, monkeypatch):
    now = [2e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    first, second = ssd.put(*chain(2))
    assert (first.created, first.used_at) == (1.7e9, 2e9)
    now[0] = 2e9 + 7
    ssd.touch([("rows", first.key, 5, 1)])
    now[0] = 2e9 + 3  # a clock that was set back
    ssd.touch([("rows", first.key, 6, 1)])
    assert ssd.flush(10)
    assert [entry.used_at for entry in ssd.entries()] == [2e9 + 7, 2e9]
    ssd.put(chain(2)[1])  # there already: that it was written again is a use
    assert [entry.used_at for entry in ssd.entries()] == [2e9 + 7, 2e9 + 3]
    assert second.used_at == 2e9


def test_a_touch_of_what_is_being_written_is_not_lost(ssd, monkeypatch):
    event = hold(monkeypatch, ssd)
    entry, image = make(1)
    ssd.write(entry, SPACE, image)
    ssd.touch([("rows", entry.key, 99, 1)])
    event.set()
    ssd.flush(10)
    assert {found.used for found in ssd.entries() if found.key == entry.key} == {99}


def test_every_write_is_reported_once_and_after_its_row(open_tier):
    seen = []

    def written(entry, error):
        seen.append((entry, error, entry.key in {found.key for found in ssd.entries()}))

    ssd = open_tier(written=written)
    pairs = chain(300)
    for entry, image in pairs:
        assert ssd.write(entry, SPACE, image)
    assert ssd.flush(30)
    assert sorted(entry.key for entry, _, _ in seen) == sorted(entry.key for entry, _ in pairs)
    assert all(error is None and there for _, error, there in seen)


def test_the_callback_may_queue_more_and_may_fail(open_tier):
    second = make(2)

    def written(entry, error):
        if entry.key != second[0].key:
            ssd.write(second[0], SPACE, second[1])
        raise RuntimeError("of the cache")

    ssd = open_tier(written=written)
    ssd.write(make(1)[0], SPACE, make(1)[1])
    assert ssd.flush(10)
    assert ssd.flush(10)
    assert ssd.stats().files == 2


def test_flush_says_when_it_was_not_in_time(ssd, monkeypatch):
    event = hold(monkeypatch, ssd)
    assert not ssd.flush(0.05)
    event.set()
    assert ssd.flush(10)


def test_close_in_no_time_cancels_what_waits(ssd, monkeypatch, open_tier):
    event = hold(monkeypatch, ssd)
    entry, image = make(1)
    ssd.write(entry, SPACE, image)
    threading.Timer(0.2, event.set).start()
    ssd.close(0.01)
    assert {type(error) for _, error in ssd.reports} == {type(None), Cancelled}
    ssd.close()
    assert open_tier().stats().files == 1


def test_a_closed_tier_takes_nothing_and_says_so(ssd):
    (stored,) = ssd.put(make(1))
    ssd.close()
    assert not ssd.write(make(2)[0], SPACE, make(2)[1])
    with pytest.raises(SsdError, match="closed"):
        ssd.read(stored).result(1)
    assert ssd.flush(1)  # nothing was left undone


def test_an_entry_that_is_none_is_refused_at_the_door(ssd):
    entry, image = make(1)
    for wrong in (
        entry._replace(kind="row"),
        entry._replace(key=b"short"),
        entry._replace(tokens=b"123"),
        entry._replace(namespace=b"x" * 32),
        entry._replace(parent=b""),
        entry._replace(start=-1),
        entry._replace(start=1 << 40),
        entry._replace(hits=1 << 40),
    ):
        with pytest.raises(ValueError, match=r"^Entry"):
            ssd.write(wrong, SPACE, image)


def test_no_text_quotes_tokens():
    entry, _ = make(1)
    assert str(entry.tokens) not in repr(entry)
    assert "tokens=" not in repr(entry)


def test_a_namespace_leaves_the_index_with_its_last_image_and_comes_back_with_the_next(open_tier):
    ssd = open_tier()
    others = [SPACE._replace(root=bytes([n]) * 32, layout=f'{{"layers":{n}}}') for n in range(1, 6)]
    for n, space in enumerate([SPACE, *others]):
        for entry, image in (make(10 * n + i, parent=space.root, space=space) for i in range(2)):
            assert ssd.write(entry, space, image)
    assert ssd.flush(10)
    kept = {SPACE.root, others[0].root}
    entries = list(ssd.entries())
    ssd.delete([entry for entry in entries if entry.namespace not in kept])
    ssd.delete([entry for entry in entries if entry.namespace == others[0].root][:1])
    assert ssd.flush(10)
    assert {space.root for space in ssd.namespaces()} == kept
    entry, image = make(77, parent=others[3].root, space=others[3])
    ssd.delete([entry for entry in entries if entry.namespace == SPACE.root])
    assert ssd.write(entry, others[3], image)
    assert ssd.flush(10)
    assert {space.root: space.layout for space in ssd.namespaces()} == {
        space.root: space.layout for space in (others[0], others[3])
    }
    ssd.check_integrity()
    ssd.close()
    open_tier().check_integrity()


def test_folders_leave_with_their_last_image(open_tier, root):
    ssd = open_tier()
    stored = ssd.put(*(make(seed) for seed in range(40)))
    ssd.delete(stored[1:])
    assert ssd.flush(10)
    assert [folder.name for folder in (root / "rows").iterdir()] == [stored[0].key[:1].hex()]
    ssd.check_integrity()
    ssd.put(make(3))
    ssd.close()
    for name in ("00", "01", "fe"):
        (root / "rows" / name).mkdir(exist_ok=True)
    again = open_tier()
    own = {entry.key[:1].hex() for entry in again.entries()}
    assert {folder.name for folder in (root / "rows").iterdir()} == own


def test_a_transaction_that_fails_leaves_the_namespaces_as_they_were(open_tier):
    ssd = open_tier()
    stored = ssd.put(*chain(2))
    index = directory_of(ssd).index
    with suppress(ZeroDivisionError), index.transaction():
        index.remove([entry.address for entry in stored])
        raise ZeroDivisionError
    assert [space.root for space in ssd.namespaces()] == [SPACE.root]
    ssd.put(make(5))
    ssd.delete(ssd.put(make(6)))
    assert ssd.flush(10)
    ssd.check_integrity()


def test_the_limit_refuses_what_would_pass_it(open_tier):
    ssd = open_tier(limit=1 << 20)
    big = make(1, size=900_000)
    assert not ssd.write(big[0], SPACE, big[1])
    assert ssd.put(make(2))
    assert Path(ssd.directory).is_dir()
    with pytest.raises(ValueError, match="limit=0"):
        open_tier(Path(ssd.directory).with_name("none"), limit=0)
