"""The names of images in an engine, and the seal on their bytes: AES-256-GCM under the key that a fleet's machines share.

A sealed image is a nonce (12 bytes, random), the encrypted image, and a tag (16 bytes), with its name as associated data: an
image under another's name is no image. Names follow from root key and tokens alone, so every machine makes the same. With
a key they are keyed hashes, and tell nothing about prompts even to who guesses one. Whoever has the key can read and write.
Decision 0034 says why.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from prefixcache import image_memory
from prefixcache.image_format import SNAPSHOT, ImageKind
from prefixcache.keys import canonical

log = logging.getLogger("prefixcache")

KEY_BYTES = 32
NONCE, TAG = 12, 16  # bytes
OVERHEAD = NONCE + TAG
ALIGNED = 64  # bytes
# Of names, seals and images: another image_format.FORMAT has another, or machines would refuse each other's images.
VERSION = "v1"
_REMEDY = "make one with `openssl rand -hex 32 > fleet.key`, and give every machine the same"


class NotSealed(Exception):
    """Bytes that were not sealed under this key and this name."""


class FleetKey:
    """The secret of a fleet, and what is derived from it."""

    def __init__(self, secret: bytes):
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a fleet key of {len(secret)} bytes: give {KEY_BYTES}")
        self._secret = secret

    @classmethod
    def read(cls, path: str | os.PathLike[str], setting: str = "remote_key_file", warn: bool = True) -> FleetKey:
        """Read a key from a file of 64 hex digits, or of 32 bytes. ValueError names the setting, the file and the remedy.

        `warn`: of a file that others may read.
        """
        file = Path(path)
        if re.fullmatch(r"[0-9a-fA-F]{64}", file.name):
            raise ValueError(f"{setting} is the key itself: write it to a file, and name that")
        named = f"{setting}={str(file)!r}"
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"{named}: {os.strerror(error.errno or 0)}; {_REMEDY}") from None
        text = content.strip()
        if len(content) != KEY_BYTES and not re.fullmatch(rb"[0-9a-fA-F]{64}", text):
            raise ValueError(f"{named}: {len(content)} bytes that are no key of 64 hex digits; {_REMEDY}")
        if len(content) == KEY_BYTES:
            if re.fullmatch(rb"[0-9a-fA-F]*", content):
                raise ValueError(f"{named}: 32 hex digits, half of a key; {_REMEDY}")
            if len(set(content)) == 1:
                raise ValueError(f"{named}: one byte 32 times, which is no secret; {_REMEDY}")
        if warn and file.stat().st_mode & 0o077:
            log.warning("%s=%r: others may read it; run chmod 600 on it", setting, str(file))
        return cls(content if len(content) == KEY_BYTES else bytes.fromhex(text.decode()))

    def derive(self, person: bytes) -> bytes:
        """Return a key for one purpose, which tells nothing about the others. `person`: at most 16 bytes."""
        return hashlib.blake2b(key=self._secret, digest_size=KEY_BYTES, person=person).digest()


class Seal(Protocol):
    """How images are named and sealed."""

    overhead: int
    """Bytes that a sealed image has more."""

    is_secret: bool
    """Tell whether nobody without the key can read what is sealed, or seal."""

    def opaque(self, part: bytes) -> str:
        """Return how a part of a name stands in it, in hex digits."""

    def seal(self, name: str, data: np.ndarray, memory: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes (uint8) to keep under a name. They may stand in `memory` (uint8), which is large enough."""

    def unseal(self, name: str, nbytes: int) -> Unsealing:
        """Begin to unseal the `nbytes` that are kept under a name."""


class Unsealing(Protocol):
    """Sealed bytes on their way in: each piece is unsealed as it comes, while the next is on its way."""

    def take(self, piece: memoryview) -> memoryview:
        """Take the next bytes, and return those that were sealed, as far as this piece has them. Not to be believed before
        `finish`.
        """

    def finish(self) -> np.ndarray:
        """Return the bytes (uint8) that were sealed, in memory of their own that begins at a multiple of 64. Raise NotSealed
        for what another key has sealed, what was sealed for another name, and anything else.
        """


class KeySeal:
    """Names and seals under a fleet's key."""

    overhead, is_secret = OVERHEAD, True

    def __init__(self, key: FleetKey):
        """Raise ValueError where the package `cryptography` is missing."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.ciphers.algorithms import AES256
            from cryptography.hazmat.primitives.ciphers.modes import GCM
        except ImportError:
            raise ValueError(
                'remote_key_file needs the package cryptography: pip install "prefixcache[s3]" or "prefixcache[valkey]"'
            ) from None
        self._invalid: type[Exception] = InvalidTag
        secret = key.derive(b"prefixcache.seal")
        self._cipher = AESGCM(secret)
        self._decryptor = lambda nonce: Cipher(AES256(secret), GCM(nonce)).decryptor()
        self._naming = key.derive(b"prefixcache.name")

    def opaque(self, part: bytes) -> str:
        return hashlib.blake2b(part, key=self._naming, digest_size=16).hexdigest()

    def seal(self, name: str, data: np.ndarray, memory: np.ndarray | None = None) -> np.ndarray:
        nbytes, nonce = data.nbytes + OVERHEAD, os.urandom(NONCE)
        sealed = np.empty(nbytes, np.uint8) if memory is None else memory[:nbytes]
        sealed[:NONCE] = np.frombuffer(nonce, np.uint8)
        self._cipher.encrypt_into(nonce, data.data, name.encode(), sealed[NONCE:].data)
        return sealed

    def unseal(self, name: str, nbytes: int) -> Unsealing:
        return _KeyUnsealing(self._decryptor, self._invalid, name, nbytes)


class _KeyUnsealing:
    def __init__(self, decryptor: Callable[[bytes], Any], invalid: type[Exception], name: str, nbytes: int):
        self._decryptor, self._invalid, self._name = decryptor, invalid, name.encode()
        self._memory = _aligned(max(nbytes - OVERHEAD, 0))
        self._nonce, self._tag = b"", b""
        self._at = 0  # bytes of the image that have come
        self._opened: Any = None

    def take(self, piece: memoryview) -> memoryview:
        if self._opened is None:
            missing = NONCE - len(self._nonce)
            self._nonce, piece = self._nonce + piece[:missing], piece[missing:]
            if len(self._nonce) < NONCE:
                return piece
            self._opened = self._decryptor(self._nonce)
            self._opened.authenticate_additional_data(self._name)
        body = piece[: len(self._memory) - self._at]
        unsealed = self._memory[self._at : self._at + len(body)].data
        if body:
            self._opened.update_into(body, unsealed)
            self._at += len(body)
        self._tag += piece[len(body) :]
        return unsealed

    def finish(self) -> np.ndarray:
        if self._opened is None or self._at < len(self._memory) or len(self._tag) != TAG:
            raise NotSealed
        try:
            self._opened.finalize_with_tag(self._tag)
        except self._invalid:
            raise NotSealed from None
        return self._memory


class NoSeal:
    """Images as they are, under their own keys: where only its users can reach the engine."""

    overhead, is_secret = 0, False

    def opaque(self, part: bytes) -> str:
        return part.hex()

    def seal(self, name: str, data: np.ndarray, memory: np.ndarray | None = None) -> np.ndarray:
        return data

    def unseal(self, name: str, nbytes: int) -> Unsealing:
        return _NoUnsealing(nbytes)


class _NoUnsealing:
    def __init__(self, nbytes: int):
        self._memory, self._at = _aligned(nbytes), 0

    def take(self, piece: memoryview) -> memoryview:
        taken = self._memory.data[self._at : self._at + len(piece)]
        taken[:] = piece
        self._at += len(piece)
        return taken

    def finish(self) -> np.ndarray:
        if self._at < len(self._memory):
            raise NotSealed
        return self._memory


def _aligned(nbytes: int) -> np.ndarray:
    memory = image_memory.take(nbytes + ALIGNED)
    skipped = -memory.ctypes.data % ALIGNED
    return memory[skipped : skipped + nbytes]


def image_name(seal: Seal, root: bytes, kind: ImageKind, key: bytes, parent: bytes) -> str:
    """Return where an image is kept: `v1/<root>/<kind>/<key>`. Snapshots stand together below the key of their parent: a
    prompt doesn't tell where they end.
    """
    folder = snapshot_folder(seal, root, parent) if kind == SNAPSHOT else _folder(seal, root, kind)
    return f"{folder}/{seal.opaque(key)}"


def snapshot_folder(seal: Seal, root: bytes, parent: bytes) -> str:
    """Return where the snapshots behind a block are kept, by its key."""
    return f"{_folder(seal, root, SNAPSHOT)}/{seal.opaque(parent)}"


def layouts_folder(seal: Seal, model: str, codec: str) -> str:
    """Return where the layouts of a model with a codec (JSON) are kept."""
    return f"{VERSION}/layouts/{seal.opaque(_digest(canonical([model, codec]).encode()))}"


def layout_id(seal: Seal, layout: bytes) -> str:
    """Return the last part of the name of a layout (JSON as UTF-8)."""
    return seal.opaque(_digest(layout))


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _folder(seal: Seal, root: bytes, kind: ImageKind) -> str:
    return f"{VERSION}/{seal.opaque(root)}/{kind}"
