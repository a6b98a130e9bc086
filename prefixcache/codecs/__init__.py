"""Codecs: how rows of attention state become bytes and come back.

`Raw`, `TurboQuant` and `Transform` are what a user chooses from; `as_codec` reads a choice from a setting,
`codec_from_spec` from a file's header. Called by `prefixcache.layers`; nothing here knows blocks, images or files.
"""

from prefixcache.codecs.base import Codec, Plane, RowCodec, Stream
from prefixcache.codecs.choice import as_codec, codec_from_spec
from prefixcache.codecs.raw import Raw, RawRows
from prefixcache.codecs.transform.codec import Transform
from prefixcache.codecs.turboquant.codec import TurboQuant

__all__ = [
    "Codec",
    "Plane",
    "Raw",
    "RawRows",
    "RowCodec",
    "Stream",
    "Transform",
    "TurboQuant",
    "as_codec",
    "codec_from_spec",
]
