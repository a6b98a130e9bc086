"""Images that somebody sealed anew, with rows that agree: what he can reach who may write into the directory.

Promised: no code of his runs, no path of his is used, the process lives, memory stays bounded. Not promised: that the
numbers in a tensor are the model's, because whoever writes the directory can write any.
"""

import os
import tracemalloc

import numpy as np
import pytest

from prefixcache.image_format import FORMAT, Image
from prefixcache.ssd import NewerFormat
from tests.fuzz.targets import sealed_anew

from .directories import EXACT, PLAIN, Parts, execute, file_of, judge, opened, parts_of, put_image, rows_of
from .test_image_files import claim


def reseal(root, row, change):
    """Rewrite an image with another header, and say so in the index."""
    meta, specs, tensors = parts_of(root, row)
    put_image(root, row, Parts(*change(meta, specs), tensors))


def shaped(to):
    return lambda meta, specs: (meta, [s if s.name == "tokens" else s._replace(shape=to(s.shape)) for s in specs])


LIES = {
    "no tensors": lambda meta, specs: (meta, []),
    "other names": lambda meta, specs: (meta, [spec._replace(name=f"../{spec.name}") for spec in specs]),
    "half as wide": shaped(lambda shape: (*shape[:-1], shape[-1] // 2)),
    "flat": shaped(lambda shape: (int(np.prod(shape)),)),
    "scalars": shaped(lambda shape: ()),
}


@pytest.mark.parametrize("what", LIES)
def test_an_image_with_other_tensors_than_its_namespace_has_is_a_miss(root, what):
    for model, kind in (("plain", 0), ("window", 1), ("state", 2)):
        reseal(root, rows_of(root, model, kind)[-1], LIES[what])
    with opened(root) as cache:
        for kept in EXACT:
            cache.promote(kept.tokens, **kept.where).result(30)
            cache.fetch(kept.tokens, **kept.where)


META = {
    "another model": lambda meta: meta._replace(model="../../etc"),
    "another start": lambda meta: meta._replace(start=99_999),
    "another parent": lambda meta: meta._replace(parent="0" * 64),
    "another layout": lambda meta: meta._replace(layout="["),
}


@pytest.mark.parametrize("what", META)
def test_a_header_that_says_something_else_of_the_same_block_does_no_harm(root, what):
    reseal(root, rows_of(root, "plain")[-1], lambda meta, specs: (META[what](meta), specs))
    judge(root)


@pytest.mark.parametrize("field", ["key", "namespace", "kind"])
def test_a_header_that_names_another_image_is_set_aside(root, field):
    value = "window" if field == "kind" else "0" * 64
    reseal(root, rows_of(root, "plain")[-1], lambda meta, specs: (meta._replace(**{field: value}), specs))
    assert judge(root).reasons == ["the file is another image's"]


@pytest.mark.parametrize("what", META)
def test_the_same_without_an_index_does_no_harm(root, what):
    reseal(root, rows_of(root, "plain")[-1], lambda meta, specs: (META[what](meta), specs))
    (root / "index.db").unlink()
    judge(root)


def test_a_header_that_names_a_field_twice_is_refused_when_it_is_read(root):
    row = rows_of(root, "plain")[-1]
    path = file_of(root, row)
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    text = content[8:end].rstrip().replace(b'"kind":"rows"', b'"kind":"rows","kind":"rows"')
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    seal(root, row)
    assert judge(root).reasons == ["the header names a field twice"]


def seal(root, row):
    path = file_of(root, row)
    data = sealed_anew(path.read_bytes())
    path.write_bytes(data.tobytes())
    execute(root, ("UPDATE image SET checksum = ?, nbytes = ? WHERE id = ?", [Image(data).checksum, data.nbytes, row]))


@pytest.mark.parametrize("nbytes", [1 << 63, (1 << 64) - 1, 1 << 40, 4 << 20])
def test_a_sealed_header_of_any_length_takes_no_memory(root, nbytes):
    row = rows_of(root, "plain")[-1]
    path = file_of(root, row)
    content = bytearray(path.read_bytes())
    claim(nbytes)(content)
    path.write_bytes(content)
    seal(root, row)
    tracemalloc.start()
    try:
        assert judge(root, ask=(PLAIN,)).corrupt <= 1
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_an_image_that_is_larger_than_ram_is_not_read(root):
    row = rows_of(root, "plain")[-1]
    path = file_of(root, row)
    os.truncate(path, 1 << 39)
    execute(root, ("UPDATE image SET nbytes = ? WHERE id = ?", [1 << 39, row]))
    with opened(root) as cache:
        cache.promote(PLAIN.tokens, **PLAIN.where).result(30)
        assert cache.stats().ram_peak <= 10_000_000


def test_one_file_of_a_newer_format_among_files_without_an_index_is_no_damage(root):
    path = file_of(root, rows_of(root, "plain")[-1])
    newer = b'"format":"%d"' % (FORMAT + 1)
    path.write_bytes(sealed_anew(path.read_bytes().replace(b'"format":"%d"' % FORMAT, newer)).tobytes())
    (root / "index.db").unlink()
    try:
        opened(root).close()
    except NewerFormat as error:
        refused = str(error)
    else:
        refused = "upgrade prefixcache"
    assert "upgrade prefixcache" in refused
    assert path.exists()
