"""Stop texts are found as in the whole text, however it comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.servers.mlx_lm.stop_texts import StopTexts

TEXT = st.text("ab", max_size=12)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(TEXT, max_size=8))
def test_the_first_stop_text_is_found_where_the_whole_text_has_its_end(stops, pieces):
    whole, reader, read = "".join(pieces), StopTexts(stops), ""
    for piece in pieces:
        if (end := reader.end_in(piece)) is not None:
            read += piece[:end]
            assert read.endswith(reader.ended_by)
            assert len(read) == min(whole.find(stop) + len(stop) for stop in stops if stop in whole)
            return
        read += piece
    assert not [stop for stop in stops if stop in whole]
    assert reader.ended_by == ""
