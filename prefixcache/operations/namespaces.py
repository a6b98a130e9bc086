"""Which namespaces a model and a salt have: found by their root keys, made for a layout that is new."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from prefixcache.blocks.budget import Reservation
from prefixcache.codecs import Codec, codec_from_spec
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.keys import canonical, root_key
from prefixcache.layers.image_layout import Plan
from prefixcache.ssd.entries import NamespaceRow
from prefixcache.tiers.namespace import Namespace
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")

SWEEP_AT = 1024  # from so many namespaces on, empty ones are forgotten when one is added
ROOTS = 1024  # root keys that are remembered


class Namespaces:
    """The namespaces that are known, by model and salt. The storage's lock guards all but the root keys, which any
    thread may derive.
    """

    def __init__(self, storage: Storage, codec: Codec, bases: Bases):
        self._storage = storage
        self._codec, self._bases = codec, bases
        self._codecs: dict[str, tuple[Codec, str]] = {}  # of models, with the text of their specs
        self._reserved: dict[str, Reservation] = {}  # RAM of the bases in use, by their hashes
        self._layouts: dict[str, set[str]] = {}  # of each model
        self._plans: dict[tuple[str, str], Plan] = {}  # by codec and layout: models and salts share them
        self._roots: dict[tuple[str, str, bytes], bytes] = {}
        self._sweep_at = SWEEP_AT

    def from_row(self, row: NamespaceRow) -> Namespace | None:
        """A namespace that an index names. None, with a warning, when this process can't make its caches."""
        try:
            return self._make(row)
        except Exception as error:
            log.warning("namespace %s of model %r cannot be loaded: %s", row.root.hex(), row.model, error)
            return None

    def derive_roots(self, model: str, salt: bytes) -> None:
        """Derive the root keys that `known` looks up, before it is called under the lock."""
        self._codec_of(model)
        for layout in tuple(self._layouts.get(model, ())):
            self._root(model, layout, salt)

    def known(self, model: str, salt: bytes) -> list[Namespace]:
        """Those of a model and a salt: one for each layout that its caches have had."""
        _, codec_text = self._codec_of(model)
        with self._storage.lock:
            found = []
            for layout in self._layouts.get(model, ()):
                namespace = self._storage.namespaces.get(self._root(model, layout, salt))
                if namespace is not None and namespace.row.stated == (model, codec_text, layout):
                    found.append(namespace)
            return found

    def of_layout(self, model: str, layout: dict[str, Any], salt: bytes) -> Namespace:
        """The namespace of a layout, made when it isn't there."""
        text, storage = canonical(layout), self._storage
        root = self._root(model, text, salt)
        _, codec_text = self._codec_of(model)
        with storage.lock:
            row = NamespaceRow(root, model, codec_text, text, time.time())
            known = storage.namespaces.get(root)
            if known is not None and known.row.stated != row.stated:  # nobody else could tell, if there is a salt
                log.warning("namespace %s was forged: it is not what model %r makes; deleted", root.hex(), model)
                storage.delete_namespace(known)
            if root not in storage.namespaces:
                if len(storage.namespaces) >= self._sweep_at:
                    storage.forget_empty_namespaces()
                    self._sweep_at = max(SWEEP_AT, 2 * len(storage.namespaces))
                storage.namespaces[root] = self._make(row)
            return storage.namespaces[root]

    def recorded_root(self, model: str, salt: bytes) -> bytes:
        """What a recording's ids begin from: the same for all layouts, so also before a namespace is known."""
        return self._root(model, "{}", salt)

    def codec_of(self, model: str) -> Codec:
        """What codes a model's rows."""
        return self._codec_of(model)[0]

    def _make(self, row: NamespaceRow) -> Namespace:
        plan = self._plans.get((row.codec, row.layout))
        if plan is None:
            codec, codec_text = self._codec_of(row.model)
            codec = codec if codec_text == row.codec else codec_from_spec(json.loads(row.codec), self._bases)
            plan = Plan(json.loads(row.layout), codec)
            plan.check_classes()
            self._plans[row.codec, row.layout] = plan
        if row.codec == self._codec_of(row.model)[1]:
            self._layouts.setdefault(row.model, set()).add(row.layout)
        return Namespace(row, plan, self._storage.graph.tree(row.root, plan.windows, bool(plan.snapshots)))

    def _root(self, model: str, layout: str, salt: bytes) -> bytes:
        known = self._roots.get((model, layout, salt))
        if known is None:
            known = root_key(model, self._codec_of(model)[0].spec(), json.loads(layout), salt)
            if len(self._roots) >= ROOTS:
                self._roots.clear()
            self._roots[model, layout, salt] = known
        return known

    def _codec_of(self, model: str) -> tuple[Codec, str]:
        """What codes a model's rows, and its spec's text. The first call for a model may read its basis."""
        known = self._codecs.get(model)
        if known is None:
            codec = self._codec
            if isinstance(codec, Transform):
                codec = self._within_budget(codec.for_model(model, self._bases), model)
            known = self._codecs[model] = codec, canonical(codec.spec())
        return known

    def _within_budget(self, codec: Codec, model: str) -> Codec:
        """The codec, once RAM has room for its basis; without it what codes the rows otherwise."""
        if not isinstance(codec, Calibrated):
            return codec
        nbytes = codec.basis.nbytes
        with self._storage.lock:
            room = self._reserved.get(codec.basis.hash) or self._storage.ram.reserve(nbytes, 0)
        if room is None:
            log.warning(
                "the basis of model %r takes %d bytes of RAM, and there are not so many: its rows are coded by %s",
                model, nbytes, codec.otherwise,
            )  # fmt: skip
            return codec.otherwise
        self._reserved[codec.basis.hash] = room
        return codec
